"""How many processes generate a load.

Knows the cores that this process may use, and what one generator can send. More processes than the load
needs are not harmless: on a machine shared with the server each takes time from it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from convoy.loadtest.options import MAX_PROCESSES, LoadTestOptions
from convoy.loadtest.request_pool import Protocol

# Well below half of what one process can send (docs/loadtest.md): a process at its limit is a late one.
RATE_PER_PROCESS: dict[Protocol, float] = {"http": 10_000, "grpc": 1000}
CLIENTS_PER_PROCESS = 128


def process_count(options: LoadTestOptions, protocol: Protocol, budget: int) -> int:
    """At least 1; what is asked for, if it is; else as few as the load needs, leaving the server a core."""
    most = options.clients or MAX_PROCESSES
    if options.processes is not None:
        return min(options.processes, most)
    rate = options.peak_rate
    needed = (options.clients or 1) / CLIENTS_PER_PROCESS if rate is None else rate / RATE_PER_PROCESS[protocol]
    return max(1, min(math.ceil(needed), budget - 1, most))


def core_budget(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many threads may run at once: the affinity mask, or the container's quota if that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return allowed
