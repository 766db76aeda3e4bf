"""Whether the results of one run, step or probe are valid and stable. Pure.

A slow load generator adds its own delay to the latency of the server, so the delay is measured, and a run with too much
of it is void. The limit: the 99th percentile of (time taken up - time due) is at most 5 % of the objective, or of the
median latency without an objective, and at least 1 ms. 5 %, because results are shown with two digits; 1 ms, because an
ordinary kernel on a shared machine keeps that. Latency counts from the time due, so a late generator can make a server
look slower than it is, never faster.

Stability follows Triton's perf_analyzer. The measured time is divided into windows. The run is stable if over the last
three windows the highest throughput is at most 1.1 times the lowest, and the same holds for the mean latency. A
response belongs to the window in which it arrived, and a window needs 50 of them. Unlike in perf_analyzer, the length
of the run is fixed in advance, because a tool that runs until the figures are stable selects its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from convoy.loadtest.records import Records
from convoy.loadtest.rows import GOOD
from convoy.loadtest.statistics import Summary, Window, nearest_rank
from convoy.loadtest.units import NS_PER_MS, NS_PER_S

WINDOWS = 3
MOST_WINDOWS = 10
LEAST_ANSWERS = 50
WITHIN = 1.1


@dataclass(frozen=True, slots=True)
class StabilityWindow:
    """Times are seconds from the start of the run. `latency_ms` is the mean; None without a successful response."""

    start_s: float
    end_s: float
    throughput_rps: float
    latency_ms: float | None


@dataclass(frozen=True, slots=True)
class Stability:
    """`why_not` says why the figures are not stable; None if they are."""

    windows: tuple[StabilityWindow, ...]
    why_not: str | None


def stability_of(records: Records, window: Window) -> Stability:
    """The stability over three to ten windows, as many as have 50 responses each on average."""
    chosen = (records.outcome == GOOD) & (records.finished_ns >= window.start_ns)
    chosen &= records.finished_ns < window.end_ns
    count = min(MOST_WINDOWS, int(np.count_nonzero(chosen)) // LEAST_ANSWERS)
    if count < WINDOWS or window.seconds <= 0:
        return Stability((), f"fewer than {WINDOWS * LEAST_ANSWERS} responses; choose a longer --duration")
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
        return "one of the last three windows has no successful response"
    spreads = []
    for name, values in (("throughput", [window.throughput_rps for window in last]), ("mean latency", latencies_ms)):
        ratio = max(values) / min(values)
        if ratio > WITHIN:
            spreads.append(f"{name} varied by {100 * (ratio - 1):.0f} %")
    return f"{' and '.join(spreads)} over the last three windows (limit 10 %)" if spreads else None


LATENESS_FLOOR_MS = 1.0
LATENESS_SHARE = 0.05  # of the objective, or of the median latency without an objective
BUSY_SHARE = 0.9  # of one core; each generator process is one thread
CROWDED_SHARE = 0.6  # below this, other programs made the generator late


@dataclass(frozen=True, slots=True)
class Lateness:
    """The delay of the generator, from when a request was due until it was taken up, and the limit of its p99."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    limit_ms: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`void` says why the results are not valid; None if they are valid. `notes` are remarks on valid results.

    `lateness` is None in a closed loop, which has no schedule.
    """

    void: str | None
    notes: tuple[str, ...]
    lateness: Lateness | None


def lateness_limit_ms(slo_ms: float | None, median_ms: float | None) -> float:
    """The limit of the generator's p99 delay."""
    reference_ms = slo_ms if slo_ms is not None else median_ms
    return max(LATENESS_FLOOR_MS, LATENESS_SHARE * (reference_ms or 0.0))


def judge(
    summary: Summary,
    *,
    rate: float | None,
    slo_ms: float | None,
    generator_cpu_share: float,
    waited: int,
    deaths: Sequence[str] = (),
) -> Verdict:
    """The verdict on one run, step or probe. `rate` is None in a closed loop.

    `generator_cpu_share` is the CPU time of the busiest generator process per second of the run. `waited` counts
    requests that waited for a free connection. `deaths` says which generator processes died, and how.
    """
    notes = _notes(summary, rate, generator_cpu_share, waited)
    lateness = _lateness(summary, slo_ms) if rate is not None and len(summary.lateness_ns) else None
    return Verdict(_void(summary, rate, lateness, generator_cpu_share, deaths), notes, lateness)


def _void(
    summary: Summary, rate: float | None, lateness: Lateness | None, cpu_share: float, deaths: Sequence[str]
) -> str | None:
    if deaths:
        return f"{'; '.join(deaths)}, so part of the load is missing"
    if summary.offered == 0:
        return "nothing was measured; choose a longer --duration"
    if lateness is None or lateness.p99_ms <= lateness.limit_ms:
        return None
    return (
        f"the load generator could not keep the schedule of {rate:g} requests/s: 1 % of requests were sent "
        f"{lateness.p99_ms:.1f} ms or more too late (limit {lateness.limit_ms:.1f} ms); {_remedy(cpu_share)}"
    )


def _lateness(summary: Summary, slo_ms: float | None) -> Lateness:
    ascending = np.sort(summary.lateness_ns)
    return Lateness(
        p50_ms=nearest_rank(ascending, Fraction(1, 2)) / NS_PER_MS,
        p99_ms=nearest_rank(ascending, Fraction(99, 100)) / NS_PER_MS,
        max_ms=int(ascending[-1]) / NS_PER_MS,
        limit_ms=lateness_limit_ms(slo_ms, summary.median_ms),
    )


def _remedy(cpu_share: float) -> str:
    if cpu_share > CROWDED_SHARE:
        return f"its busiest process used {100 * cpu_share:.0f} % of a core: lower --rate, or raise --processes"
    return (
        f"its busiest process used only {100 * cpu_share:.0f} % of a core, so other programs slowed it down: "
        "give it its own core, or run it on another machine"
    )


def _notes(summary: Summary, rate: float | None, cpu_share: float, waited: int) -> tuple[str, ...]:
    notes = []
    if rate is None and cpu_share > BUSY_SHARE:
        notes.append(
            f"the load generator used {100 * cpu_share:.0f} % of a core, so the server may be faster than these "
            "results; raise --processes"
        )
    if waited and rate is not None:
        notes.append(f"{waited:,} requests waited for a free connection; their latency includes the wait")
    if summary.failed_in_warm_up:
        notes.append(f"{summary.failed_in_warm_up:,} requests failed during the warm-up and are not counted")
    if summary.unfinished:
        notes.append(f"{summary.unfinished:,} requests had no response when the run was stopped and are not counted")
    return tuple(notes)
