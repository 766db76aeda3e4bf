"""Computes percentiles, throughput, goodput and error counts from the records. Pure.

A percentile is given only with enough responses, and is always the latency of a real request (nearest rank).

The 95 % confidence intervals account for queues. Neighbouring requests share a queue and have similar latencies, so
formulas for independent samples would give intervals that are far too narrow. The run is divided into equal blocks of
time. Whole blocks are resampled with replacement, and each figure is computed from the sample (non-overlapping block
bootstrap: Carlstein, Annals of Statistics 14(3), 1986; Künsch, ibid. 17(3), 1989; percentile intervals). The intervals
hold if the events of a block affect at most the next block. The same records give the same intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from convoy.loadtest.problems import Problem
from convoy.loadtest.records import Records
from convoy.loadtest.rows import GOOD, PENDING
from convoy.loadtest.units import NS_PER_MS, NS_PER_S

RESAMPLES = 500
MOST_BLOCKS = 50
LEAST_BLOCKS = 10
LEAST_BLOCK_S = 0.1
# Bins of latency, finer at the upper end, where the percentiles of interest are.
BINS = 2000

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """The interval that contains 95 % of the resampled figures."""

    low: float
    high: float


class Blocks:
    """A window in blocks, and intervals of figures over the same resamples."""

    def __init__(self, start_ns: int, end_ns: int) -> None:
        self._start_ns = start_ns
        self._seconds = max(0, end_ns - start_ns) / NS_PER_S
        self._count = min(MOST_BLOCKS, int(self._seconds / LEAST_BLOCK_S))
        self._possible = self._count >= LEAST_BLOCKS
        if self._possible:
            self._weights = _draws(self._count)

    def rate_interval(self, times_ns: Integers) -> ConfidenceInterval | None:
        """The interval of events per second."""
        if not self._possible:
            return None
        return _interval(self._weights @ self._counts(times_ns) / self._seconds)

    def share_interval(self, some_ns: Integers, all_ns: Integers) -> ConfidenceInterval | None:
        """The interval of the share that some have of all."""
        if not self._possible or not len(all_ns):
            return None
        drawn = self._weights @ self._counts(all_ns)
        return _interval((self._weights @ self._counts(some_ns))[drawn > 0] / drawn[drawn > 0])

    def percentile_intervals(
        self, times_ns: Integers, values: Integers, shares: Sequence[float]
    ) -> list[ConfidenceInterval | None]:
        """The interval of the percentile at each share (0.99 for p99) of values at `times_ns`."""
        if not self._possible or not len(values):
            return [None] * len(shares)
        edges = _edges(np.sort(values))
        cells = self._block_of(times_ns) * len(edges) + np.searchsorted(edges, values)
        counts = np.bincount(cells, minlength=self._count * len(edges)).reshape(self._count, len(edges))
        reached = np.cumsum(self._weights @ counts, axis=1)
        return [_interval(_percentile_of_each(reached, edges, share)) for share in shares]

    def _block_of(self, times_ns: Integers) -> Integers:
        blocks = ((times_ns - self._start_ns) / (self._seconds * NS_PER_S) * self._count).astype(np.int64)
        return np.clip(blocks, 0, self._count - 1)

    def _counts(self, times_ns: Integers) -> Floats:
        return np.bincount(self._block_of(times_ns), minlength=self._count).astype(np.float64)


def ratio_interval(above: Floats, below: Floats) -> ConfidenceInterval | None:
    """The interval of sum(`above`) / sum(`below`), with one value per block; None for fewer than ten blocks."""
    count = len(above)
    if count < LEAST_BLOCKS:
        return None
    weights = _draws(count)
    totals = weights @ below
    some = totals > 0
    return _interval((weights @ above)[some] / totals[some]) if some.any() else None


def _draws(count: int) -> Floats:
    """How many times each of `count` blocks is in each resample."""
    return np.random.default_rng(0).multinomial(count, [1 / count] * count, RESAMPLES).astype(np.float64)


def _edges(ascending: Integers) -> Integers:
    """The upper bounds of the bins; every value is one if there are few."""
    count = len(ascending)
    even = np.linspace(0, count - 1, BINS)
    late = count - np.geomspace(1, count, BINS)
    return np.unique(ascending[np.union1d(even, late).astype(np.int64)])


def _percentile_of_each(reached: Floats, edges: Integers, share: float) -> Floats:
    """The nearest-rank percentile of each resample; empty resamples are left out."""
    totals = reached[:, -1]
    some = totals > 0
    bins = (reached[some] < share * totals[some, None] - 1e-9).sum(axis=1)
    percentiles: Floats = edges[bins].astype(np.float64)
    return percentiles


def _interval(figures: Floats) -> ConfidenceInterval:
    low, high = np.percentile(figures, [2.5, 97.5])
    return ConfidenceInterval(float(low), float(high))


PERCENTILES = ("50", "90", "95", "99", "99.9")
ANSWERS_BEYOND = 10  # a percentile needs this many responses above it on average

Latencies = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Percentile:
    """`name` as in "99.9". None for too few responses, and for an interval over too short a time."""

    name: str
    latency_ms: float | None
    needs: int
    interval_ms: ConfidenceInterval | None = None


@dataclass(frozen=True, slots=True)
class ErrorCount:
    problem: Problem
    count: int


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a run or step, [start_ns, end_ns), and the time when the run or step began."""

    run_start_ns: int
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return max(0, self.end_ns - self.start_ns) / NS_PER_S


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run.

    `offered`, `good`, `errors` and latencies are of the requests due in the window. `throughput_rps` counts successful
    responses that arrived in the window, whenever they were due. `goodput` is the share of offered requests that
    succeeded within the objective. Latencies are of successful requests only. Intervals are 95 % confidence intervals
    by block bootstrap; None if the window is too short. `failed_in_warm_up` failures are in no other figure.
    """

    window_s: float
    offered: int
    good: int
    failed: int
    failed_in_warm_up: int
    unfinished: int
    offered_rps: float
    throughput_rps: float
    percentiles: tuple[Percentile, ...]
    median_ms: float | None
    mean_ms: float | None
    max_ms: float | None
    goodput: float | None
    throughput_interval_rps: ConfidenceInterval | None
    goodput_interval: ConfidenceInterval | None
    errors: tuple[ErrorCount, ...]
    lateness_ns: Latencies
    good_per_second: tuple[int, ...]
    failed_per_second: tuple[int, ...]


def summarise(records: Records, window: Window, slo_ms: float | None) -> Summary:
    """The figures of a window. A run without rows gives zeros and no percentiles."""
    chosen = (records.intended_ns >= window.start_ns) & (records.intended_ns < window.end_ns)
    in_warm_up = (records.intended_ns >= window.run_start_ns) & (records.intended_ns < window.start_ns)
    outcome = records.outcome[chosen]
    is_good = outcome == GOOD
    latency_ns = (records.finished_ns - records.intended_ns)[chosen][is_good]
    intended_ns = records.intended_ns[chosen]
    blocks = Blocks(window.start_ns, window.end_ns)
    percentiles = _percentiles(latency_ns, intended_ns[is_good], blocks)
    is_answered = outcome != PENDING
    within = intended_ns[is_good][latency_ns <= slo_ms * NS_PER_MS] if slo_ms is not None else None
    latency_ns.sort()
    finished = int(np.count_nonzero(is_answered))
    in_window = (records.finished_ns >= window.start_ns) & (records.finished_ns < window.end_ns)
    answered_ns = records.finished_ns[in_window & (records.outcome == GOOD)]
    good = len(latency_ns)
    return Summary(
        window_s=window.seconds,
        offered=finished,
        good=good,
        failed=finished - good,
        failed_in_warm_up=int(np.count_nonzero(records.outcome[in_warm_up] > GOOD)),
        unfinished=len(outcome) - finished,
        offered_rps=_per_second(len(outcome), window.seconds),
        throughput_rps=_per_second(len(answered_ns), window.seconds),
        percentiles=percentiles,
        median_ms=nearest_rank(latency_ns, Fraction(1, 2)) / NS_PER_MS if good else None,
        mean_ms=float(latency_ns.mean()) / NS_PER_MS if good else None,
        max_ms=float(latency_ns[-1]) / NS_PER_MS if good else None,
        goodput=goodput(latency_ns, finished, slo_ms),
        throughput_interval_rps=blocks.rate_interval(answered_ns),
        goodput_interval=None if within is None else blocks.share_interval(within, intended_ns[is_answered]),
        errors=count_errors(outcome, records.problems),
        lateness_ns=(records.taken_ns - records.intended_ns)[chosen],
        good_per_second=per_second(records, window, good=True),
        failed_per_second=per_second(records, window, good=False),
    )


def _percentiles(latency_ns: Latencies, intended_ns: Latencies, blocks: Blocks) -> tuple[Percentile, ...]:
    """Each with its interval, if there is one."""
    sorted_ns = np.sort(latency_ns)
    found = [percentile(sorted_ns, name) for name in PERCENTILES]
    given = [one for one in found if one.latency_ms is not None]
    intervals = blocks.percentile_intervals(intended_ns, latency_ns, [float(one.name) / 100 for one in given])
    by_name = dict(zip([one.name for one in given], intervals, strict=True))
    return tuple(replace(one, interval_ms=_in_ms(by_name.get(one.name))) for one in found)


def _in_ms(interval_ns: ConfidenceInterval | None) -> ConfidenceInterval | None:
    return interval_ns and ConfidenceInterval(interval_ns.low / NS_PER_MS, interval_ns.high / NS_PER_MS)


def percentile(sorted_ns: Latencies, name: str) -> Percentile:
    """The nearest-rank percentile of ascending latencies; needs at least 10 / (1 - p) of them."""
    share = Fraction(name) / 100  # exact, because in floating point 10 / (1 - 0.999) is not 10000
    needs = int(ANSWERS_BEYOND / (1 - share))
    if len(sorted_ns) < needs:
        return Percentile(name, None, needs)
    return Percentile(name, nearest_rank(sorted_ns, share) / NS_PER_MS, needs)


def nearest_rank(sorted_ns: Latencies, share: Fraction) -> int:
    """The smallest value such that at least `share` of all are not above it. Needs at least one value."""
    rank = -(-len(sorted_ns) * share.numerator // share.denominator)
    return int(sorted_ns[max(rank, 1) - 1])


def goodput(good_latency_ns: Latencies, offered: int, slo_ms: float | None) -> float | None:
    if slo_ms is None or offered == 0:
        return None
    return int(np.count_nonzero(good_latency_ns <= slo_ms * NS_PER_MS)) / offered


def count_errors(outcome: npt.NDArray[np.int16], problems: Sequence[Problem]) -> tuple[ErrorCount, ...]:
    """The errors, most frequent first."""
    counts = np.bincount(outcome[outcome > GOOD], minlength=len(problems) + 1)[1:]
    found = [ErrorCount(problem, int(count)) for problem, count in zip(problems, counts, strict=True) if count]
    return tuple(sorted(found, key=lambda error: -error.count))


def per_second(records: Records, window: Window, *, good: bool) -> tuple[int, ...]:
    """Successes or failures in each second since the start of the run or step, including the warm-up."""
    wanted = records.outcome == GOOD if good else records.outcome > GOOD
    wanted = wanted & (records.intended_ns >= window.run_start_ns) & (records.intended_ns < window.end_ns)
    seconds = (records.finished_ns[wanted] - window.run_start_ns) // NS_PER_S
    return tuple(int(count) for count in np.bincount(seconds[seconds >= 0]))


def _per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
