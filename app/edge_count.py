"""How many edge processes a machine should have, where the operator leaves it to us."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MOST_EDGES = 64
# With so few cores another process only takes from the engine what it gives.
_FEWEST_CORES = 4
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class EdgeCount:
    """So many edge processes, and the reason, for the log. 0: one process does everything."""

    count: int
    why: str


def choose_edges(cores: int, *, has_gpu: bool, room: int) -> EdgeCount:
    """For a budget of so many cores; `room` is for how many edges there is memory.

    A GPU leaves the cores to the edges, up to the eight of them that keep one core process busy. Where the CPU
    computes, the engine wants all cores, and one in four is enough to feed it.
    """
    if cores < _FEWEST_CORES:
        return EdgeCount(0, f"{cores} cores; with fewer than {_FEWEST_CORES} one process is best")
    wanted = min(8, cores // 2 - 1) if has_gpu else min(4, cores // 4)
    device = "beside a GPU" if has_gpu else "that also compute"
    if wanted > room:
        return EdgeCount(max(0, room), f"{cores} cores {device}; more of --max-inflight-mb would allow {wanted}")
    return EdgeCount(wanted, f"{cores} cores {device}")


def has_gpu_driver(driver: Path = _DRIVER) -> bool:
    """Whether there may be a GPU. To ask the driver itself would start it in a process that has no use for it."""
    return driver.exists()
