"""What can be said of a run while it goes on, read from the rows as they are written.

Knows the rows' memory. Looks only at their last part, because it looks while the generators need the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.loadtest.records import Times
from convoy.loadtest.rows import GOOD, Rows
from convoy.loadtest.units import NS_PER_MS, NS_PER_S

LOOK_S = 0.5
RECENT_S = 1.0
MOST_ROWS = 50_000  # of each process


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Counts since the start; percentiles and rate of the good answers of the last second, if there were any."""

    elapsed_s: float
    begun: int
    good: int
    failed: int
    recent_per_s: float
    p50_ms: float | None
    p99_ms: float | None

    @property
    def in_flight(self) -> int:
        return self.begun - self.good - self.failed


class Watcher:
    """Looks now and then and shows what it sees. Sees nothing before `start_ns` is set."""

    def __init__(self, rows: Sequence[Rows], show: Callable[[RunProgress], None]) -> None:
        self._rows = rows
        self._show = show
        self._next_ns = 0
        self.start_ns = 0

    def look(self) -> None:
        now_ns = time.monotonic_ns()
        if not self.start_ns or now_ns < self._next_ns:
            return
        self._next_ns = now_ns + int(LOOK_S * NS_PER_S)
        self._show(progress_of(self._rows, self.start_ns, now_ns))


def progress_of(parts: Sequence[Rows], start_ns: int, now_ns: int) -> RunProgress:
    """At `now_ns`, from rows that others are still writing."""
    recent_s = min(RECENT_S, max((now_ns - start_ns) / NS_PER_S, 1e-3))
    latencies_ns = np.concatenate([np.empty(0, np.int64), *(_recent(rows, now_ns, recent_s) for rows in parts)])
    p50_ms, p99_ms = np.percentile(latencies_ns, [50, 99]) / NS_PER_MS if len(latencies_ns) else (None, None)
    return RunProgress(
        elapsed_s=max(0, now_ns - start_ns) / NS_PER_S,
        begun=sum(rows.begun for rows in parts),
        good=sum(int(rows.header[1]) for rows in parts),
        failed=sum(int(rows.header[2]) for rows in parts),
        recent_per_s=len(latencies_ns) / recent_s,
        p50_ms=None if p50_ms is None else float(p50_ms),
        p99_ms=None if p99_ms is None else float(p99_ms),
    )


def _recent(rows: Rows, now_ns: int, recent_s: float) -> Times:
    """Latencies of good answers that came within the last moments, of the rows begun last."""
    end = rows.begun
    part = slice(max(0, end - MOST_ROWS), end)
    finished_ns = np.array(rows.finished_ns[part], dtype=np.int64)
    good = np.array(rows.outcome[part], dtype=np.int16) == GOOD
    chosen = good & (finished_ns > now_ns - int(recent_s * NS_PER_S))
    latencies_ns: Times = (finished_ns - np.array(rows.intended_ns[part], dtype=np.int64))[chosen]
    return latencies_ns
