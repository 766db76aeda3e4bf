"""Processes that start others by detours: found by a mark in their environment, and ended all together."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

MARK = "CONVOY_TREE_MARK"
_END_WITHIN_S = 30.0


def marked(mark: str) -> list[psutil.Process]:
    """Every process that has been started, by whatever detour, with this mark in its environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def cpu_s(mark: str) -> float:
    """CPU time of all of them, in user and system mode, since each began."""
    total = 0.0
    for process in marked(mark):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def end_marked(mark: str) -> None:
    """Kill all of them, and those that they start meanwhile."""
    deadline_s = time.monotonic() + _END_WITHIN_S
    while left := marked(mark):
        assert time.monotonic() < deadline_s, f"{left} do not end"
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
