"""Whether the figures had settled: the rule of Triton's perf_analyzer.

The measured time is cut into windows. It is stable if over the last three of them the highest throughput is
at most 1.1 times the lowest, and so with the mean latency. As there, an answer belongs to the window in which
it came, and a window needs 50 of them. Unlike there, the run's length is fixed beforehand: a tool that goes
on until the figures please it would choose its figures. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convoy.loadtest.records import Records
from convoy.loadtest.rows import GOOD
from convoy.loadtest.statistics import Window
from convoy.loadtest.units import NS_PER_MS, NS_PER_S

WINDOWS = 3
MOST_WINDOWS = 10
LEAST_ANSWERS = 50
WITHIN = 1.1


@dataclass(frozen=True, slots=True)
class StabilityWindow:
    """Seconds from the start of the run; `latency_ms` is the mean, None where no good answer came."""

    start_s: float
    end_s: float
    throughput_rps: float
    latency_ms: float | None


@dataclass(frozen=True, slots=True)
class Stability:
    """`why_not` says in words why the figures are not called stable; None if they are."""

    windows: tuple[StabilityWindow, ...]
    why_not: str | None


def stability_of(records: Records, window: Window) -> Stability:
    """Over as many windows, from three to ten, as have 50 answers each on average."""
    chosen = (records.outcome == GOOD) & (records.finished_ns >= window.start_ns)
    chosen &= records.finished_ns < window.end_ns
    count = min(MOST_WINDOWS, int(np.count_nonzero(chosen)) // LEAST_ANSWERS)
    if count < WINDOWS or window.seconds <= 0:
        return Stability((), f"three windows of {LEAST_ANSWERS} answers are needed; run longer")
    windows = _windows(records, chosen, window, count)
    return Stability(windows, _why_not(windows[-WINDOWS:]))


def _windows(records: Records, chosen: np.ndarray, window: Window, count: int) -> tuple[StabilityWindow, ...]:
    finished_ns = records.finished_ns[chosen]
    latencies_ns = (finished_ns - records.intended_ns[chosen]).astype(np.float64)
    length_s = window.seconds / count
    index = np.minimum(((finished_ns - window.start_ns) / NS_PER_S / length_s).astype(np.int64), count - 1)
    answers = np.bincount(index, minlength=count)
    sums_ns = np.bincount(index, weights=latencies_ns, minlength=count)
    begin_s = (window.start_ns - window.run_start_ns) / NS_PER_S
    return tuple(
        StabilityWindow(
            start_s=begin_s + number * length_s,
            end_s=begin_s + (number + 1) * length_s,
            throughput_rps=float(answers[number]) / length_s,
            latency_ms=float(sums_ns[number] / answers[number]) / NS_PER_MS if answers[number] else None,
        )
        for number in range(count)
    )


def _why_not(last: tuple[StabilityWindow, ...]) -> str | None:
    latencies_ms = [window.latency_ms for window in last if window.latency_ms is not None]
    if len(latencies_ms) < WINDOWS:
        return "there was a window without a good answer"
    spreads = []
    for name, values in (("throughput", [window.throughput_rps for window in last]), ("mean latency", latencies_ms)):
        ratio = max(values) / min(values)
        if ratio > WITHIN:
            spreads.append(f"{name} differed by {100 * (ratio - 1):.0f} %")
    if not spreads:
        return None
    return f"over the last three windows {' and '.join(spreads)}; 10 % are allowed"
