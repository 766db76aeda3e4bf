"""What this process may use of the CPU, and how to name it.

Inside a container the number of cores that the machine has is not the number that the process may use:
the budget is the smaller of the affinity mask and the cgroup's quota.
"""

from __future__ import annotations

import math
import os
import platform
from functools import cache
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cpu_budget(cgroup: Path = _CGROUP) -> int:
    """How many threads may compute at once: at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_v2(cgroup / "cpu.max") or _quota_v1(cgroup / "cpu")
    return max(1, min(allowed, math.ceil(quota)) if quota else allowed)


@cache
def cpu_model() -> str:
    """The CPU's name as its maker gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def has_int8_dot_product() -> bool:
    """Whether the CPU multiplies and adds 8-bit integers in one instruction (AVX-512 VNNI, AVX-VNNI, AMX)."""
    return bool(_flags() & {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"})


@cache
def has_bf16() -> bool:
    """Whether the CPU multiplies and adds BF16 in one instruction (AVX-512 BF16, AMX).

    ARM's processors have such instructions, too, which OpenVINO does not use.
    """
    return bool(_flags() & {"avx512_bf16", "amx_bf16"})


def _flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


def fingerprint(threads: int, library: str) -> str:
    """The device that a latency was measured on: it holds on no other."""
    return f"{cpu_model()} / {cpu_budget()} cores / {threads} threads / {library}"


def _quota_v2(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
