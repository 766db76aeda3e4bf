"""The CPU budget of this process, and the CPU's name and features.

In a container the process may use fewer cores than the machine has. The budget is the smaller of the affinity mask and
the cgroup's quota.
"""

from __future__ import annotations

import math
import os
import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cpu_budget(cgroup: Path = _CGROUP) -> int:
    """How many threads may compute at once, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, min(allowed, math.ceil(quota)) if quota else allowed)


def _quota(cgroup: Path) -> float | None:
    """The CPU quota of the control group, v1 or v2; None if it has no limit."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError, ValueError):  # without a limit it is the word "max", or -1
            quota, period = [int(word) for file in files for word in (cgroup / file).read_text().split()]
            if quota > 0 and period > 0:
                return quota / period
    return None


@cache
def cpu_model() -> str:
    """The CPU's model name."""
    found = re.search(r"^model name[^:]*:(.*)$", _cpuinfo(), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


@cache
def has_int8_dot_product() -> bool:
    """Whether the CPU has 8-bit integer dot products (AVX-512 VNNI, AVX-VNNI, AMX)."""
    return not {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"}.isdisjoint(_cpuinfo().split())


@cache
def has_bf16() -> bool:
    """Whether the CPU has BF16 dot products (AVX-512 BF16, AMX).

    ARM processors have similar instructions, which OpenVINO does not use.
    """
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpuinfo().split())


@cache
def _cpuinfo() -> str:
    """The contents of /proc/cpuinfo on Linux, otherwise empty."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def fingerprint(threads: int, library: str) -> str:
    """The device on which a latency was measured; it is valid on no other."""
    return f"{cpu_model()} / {cpu_budget()} cores / {threads} threads / {library}"
