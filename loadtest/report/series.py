"""The points of the charts, from the rows of a run. Pure; draws nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convoy.loadtest.records import Records
from convoy.loadtest.rows import GOOD, PENDING
from convoy.loadtest.statistics import ANSWERS_BEYOND, Window
from convoy.loadtest.units import NS_PER_MS, NS_PER_S

MOST_BINS = 100
GOOD_PER_BIN = 50  # so that a bin's median is more than luck
LEAST_BIN_S = 0.1
CURVE_POINTS = 400


@dataclass(frozen=True, slots=True)
class TimeBin:
    """Requests that were due within. Latencies are of good answers, None where there was none."""

    start_s: float
    end_s: float
    due: int
    good: int
    failed: int
    p50_ms: float | None
    p90_ms: float | None
    max_ms: float | None

    @property
    def middle_s(self) -> float:
        return (self.start_s + self.end_s) / 2

    def per_s(self, count: int) -> float:
        return count / (self.end_s - self.start_s)


def over_time(records: Records, window: Window) -> list[TimeBin]:
    """The whole run, warm-up included, in equal bins of time; none for a run that was stopped before it began."""
    total_s = (window.end_ns - window.run_start_ns) / NS_PER_S
    if total_s <= 0:
        return []
    good = int(np.count_nonzero(records.outcome == GOOD))
    bins = max(1, min(MOST_BINS, good // GOOD_PER_BIN, int(total_s / LEAST_BIN_S)))
    edges_ns = np.linspace(window.run_start_ns, window.end_ns, bins + 1).astype(np.int64)
    ends = np.searchsorted(records.intended_ns, edges_ns)  # rows are in the order in which they were due
    return [_time_bin(records, window, edges_ns[i : i + 2], slice(ends[i], ends[i + 1])) for i in range(bins)]


def _time_bin(records: Records, window: Window, edges_ns: np.ndarray, rows: slice) -> TimeBin:
    outcome = records.outcome[rows]
    is_good = outcome == GOOD
    latency_ms = (records.finished_ns[rows] - records.intended_ns[rows])[is_good] / NS_PER_MS
    start_s, end_s = (edges_ns - window.run_start_ns) / NS_PER_S
    p50_ms, p90_ms, max_ms = np.percentile(latency_ms, [50, 90, 100]) if len(latency_ms) else (None, None, None)
    return TimeBin(
        start_s=float(start_s),
        end_s=float(end_s),
        due=len(outcome),
        good=int(np.count_nonzero(is_good)),
        failed=int(np.count_nonzero((outcome != GOOD) & (outcome != PENDING))),
        p50_ms=None if p50_ms is None else float(p50_ms),
        p90_ms=None if p90_ms is None else float(p90_ms),
        max_ms=None if max_ms is None else float(max_ms),
    )


@dataclass(frozen=True, slots=True)
class Curve:
    """Latency at each share of the good answers; `sure` as far as ten answers lie beyond, `rest` from there on."""

    sure: list[tuple[float, float]]
    rest: list[tuple[float, float]]


def distribution(records: Records, window: Window) -> Curve:
    """Of the requests due within the window."""
    chosen = (records.outcome == GOOD) & (records.intended_ns >= window.start_ns)
    chosen &= records.intended_ns < window.end_ns
    latency_ms = np.sort((records.finished_ns - records.intended_ns)[chosen]) / NS_PER_MS
    count = len(latency_ms)
    if not count:
        return Curve([], [])
    beyond = np.unique(np.geomspace(1, count, CURVE_POINTS).astype(np.int64))[::-1]
    points = [(float((count - left) / count), float(latency_ms[count - left])) for left in beyond]
    sure = [point for point, left in zip(points, beyond, strict=True) if left >= ANSWERS_BEYOND]
    return Curve(sure, points[max(0, len(sure) - 1) :])
