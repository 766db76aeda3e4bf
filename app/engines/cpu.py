"""What this process may use of the CPU, and how to name it.

Inside a container the number of cores that the machine has is not the number that the process may use:
the budget is the smaller of the affinity mask and the cgroup's quota.
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
    """How many threads may compute at once: at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, min(allowed, math.ceil(quota)) if quota else allowed)


def _quota(cgroup: Path) -> float | None:
    """How many CPUs a control group of either kind may use; None where it has no limit."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError, ValueError):  # without a limit there is the word "max", or -1
            quota, period = [int(word) for file in files for word in (cgroup / file).read_text().split()]
            if quota > 0 and period > 0:
                return quota / period
    return None


@cache
def cpu_model() -> str:
    """The CPU's name as its maker gives it."""
    found = re.search(r"^model name[^:]*:(.*)$", _cpuinfo(), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


@cache
def has_int8_dot_product() -> bool:
    """Whether the CPU multiplies and adds 8-bit integers in one instruction (AVX-512 VNNI, AVX-VNNI, AMX)."""
    return not {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"}.isdisjoint(_cpuinfo().split())


@cache
def has_bf16() -> bool:
    """Whether the CPU multiplies and adds BF16 in one instruction (AVX-512 BF16, AMX).

    ARM's processors have such instructions, too, which OpenVINO does not use.
    """
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpuinfo().split())


@cache
def _cpuinfo() -> str:
    """What Linux says of the CPU; empty elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def fingerprint(threads: int, library: str) -> str:
    """The device that a latency was measured on: it holds on no other."""
    return f"{cpu_model()} / {cpu_budget()} cores / {threads} threads / {library}"
