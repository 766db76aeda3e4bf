"""CPU time and memory of this process and of the machine, from Linux's /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

from convoy.app.engines.memory import counters, resident_bytes


def host_usage(proc: Path = Path("/proc")) -> dict[str, float] | None:
    """The figures of `/stats`; None without /proc.

    `*_s` are CPU seconds that only grow, summed over all CPUs. Two readings give the utilisation between them.
    """
    try:
        with (proc / "stat").open() as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except OSError:
        return None
    _, _, _, idle, waiting, *_ = ticks
    per_s, memory = os.sysconf("SC_CLK_TCK"), counters(proc / "meminfo")
    return {
        "cpu_s": sum(ticks) / per_s,
        "cpu_busy_s": (sum(ticks) - idle - waiting) / per_s,
        "memory_bytes": memory["MemTotal"] << 10,
        "memory_used_bytes": (memory["MemTotal"] - memory["MemAvailable"]) << 10,
        "process_cpu_s": round(time.process_time(), 3),
        "process_memory_bytes": resident_bytes(),
    }
