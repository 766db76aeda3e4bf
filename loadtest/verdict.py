"""Whether a run may be believed, in plain words, and whether its figures had settled.

Pure. A load generator that is itself late reports its own slowness as the server's; so its lateness is audited and a
run in which it was late is void, however good the figures look.

The rule: the 99th percentile of (taken up - due) may be at most 5 % of the objective, or of the median latency where
there is no objective, and in any case 1 ms. 5 %, because a figure that is told in two digits must not have its second
digit from the generator; 1 ms, because that is what an ordinary kernel on a shared machine can promise. Lateness only
ever adds to latency, which counts from when the request was due: a late generator can make a server look slower than it
is, never faster.

Whether they had settled is told by the rule of Triton's perf_analyzer: the measured time is cut into windows. It is
stable if over the last three of them the highest throughput is at most 1.1 times the lowest, and so with the mean
latency. As there, an answer belongs to the window in which it came, and a window needs 50 of them. Unlike there, the
run's length is fixed beforehand: a tool that goes on until the figures please it would choose its figures.
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


LATENESS_FLOOR_MS = 1.0
LATENESS_SHARE = 0.05  # of the objective, or of the median latency where there is no objective
BUSY_SHARE = 0.9  # of one core; each generator is one thread
CROWDED_SHARE = 0.6  # less than this, and its own work is not what made it late


@dataclass(frozen=True, slots=True)
class Lateness:
    """How long after they were due requests were taken up, and how late the 99th percentile may be."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    limit_ms: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`void` says why the figures mean nothing (None: they mean something). `notes` qualify them.

    `lateness` is None for a closed loop, where nothing is due before the last answer: nothing to be late for.
    """

    void: str | None
    notes: tuple[str, ...]
    lateness: Lateness | None


def lateness_limit_ms(slo_ms: float | None, median_ms: float | None) -> float:
    """How late the generator may be, at p99, before its own delay colours the result."""
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
    """`rate` is None for a closed loop.

    `generator_cpu_share` is the busiest generator's CPU time per second of the run; `waited` counts the
    requests that found every allowed connection busy; `deaths` says which generators died, and how.
    """
    notes = _notes(summary, rate, generator_cpu_share, waited)
    lateness = _lateness(summary, slo_ms) if rate is not None and len(summary.lateness_ns) else None
    return Verdict(_void(summary, rate, lateness, generator_cpu_share, deaths), notes, lateness)


def _void(
    summary: Summary, rate: float | None, lateness: Lateness | None, cpu_share: float, deaths: Sequence[str]
) -> str | None:
    if deaths:
        return f"{'; '.join(deaths)}; the load was not what it should have been"
    if summary.offered == 0:
        return "nothing was measured; choose a longer --duration"
    if lateness is None or lateness.p99_ms <= lateness.limit_ms:
        return None
    return (
        f"the load generator could not keep the schedule of {rate:g} requests/s: 1 in 100 was sent "
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
        f"its busiest process used only {100 * cpu_share:.0f} % of a core, so others kept it from running: "
        "give it a core of its own, or run it on another machine"
    )


def _notes(summary: Summary, rate: float | None, cpu_share: float, waited: int) -> tuple[str, ...]:
    notes = []
    if rate is None and cpu_share > BUSY_SHARE:
        notes.append(
            f"the load generator used {100 * cpu_share:.0f} % of a core: the server may be faster than these "
            "figures; raise --processes"
        )
    if waited and rate is not None:
        notes.append(
            f"{waited} requests found all connections busy and waited; their latency counts from when they were due"
        )
    if summary.failed_in_warm_up:
        notes.append(f"{summary.failed_in_warm_up} requests failed during the warm-up and are not counted")
    if summary.unfinished:
        notes.append(f"{summary.unfinished} requests were still unanswered when the run was stopped; not counted")
    if summary.offered and not summary.good:
        notes.append("not one request was answered well")
    return tuple(notes)
