"""The last minute of one model, for people: rates, batch sizes, and percentiles of what each stage took; and the last
five minutes, in periods of five seconds.

A minute is sixty slices of a second, the latest of which has just begun, each with all that was measured in it. Times
fall into buckets whose width is a 64th of their power of two (log-linear, as in HdrHistogram), so that a percentile is
within 0.8 % of the value of its rank, and memory depends on how different values are and not on how many.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from convoy.app.telemetry.ran_batches import RanBatches

WINDOW_S = 60
PERIOD_S, PERIODS = 5, 60
STAGES = ("decode_wait", "decode", "queue", "copy_in", "compute", "copy_out", "encode", "total")
BATCH_STAGES = ("copy_in", "compute", "copy_out")  # which all requests of a batch spend together
_SUB_BITS = 6  # an octave has 64 buckets
_LONGEST_NS = (1 << 42) - 1  # over an hour; what took longer counts as that
_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StagePercentiles:
    """Milliseconds of one stage over the last minute's requests; None before there was one."""

    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Period:
    """What is kept of `PERIOD_S` seconds that have ended: how many batches of each size, what calls took in all."""

    number: int
    batches: dict[int, int]
    total: StagePercentiles


# A float's bits are its exponent and then its mantissa: without the mantissa's last bits they number the buckets.
_DROPPED_BITS = 52 - _SUB_BITS
_OF_ONE = int(np.float64(1).view(np.int64)) >> _DROPPED_BITS


def _buckets_of(values_ns: Sequence[int]) -> _Ints:
    bits = np.clip(np.array(values_ns, np.float64), 1, _LONGEST_NS).view(np.int64)
    return (bits >> _DROPPED_BITS) - _OF_ONE


def _middle_ns(bucket: int) -> float:
    """The middle of a bucket's values."""
    ends = (np.array([bucket, bucket + 1], np.int64) + _OF_ONE) << _DROPPED_BITS
    return float(ends.view(np.float64).mean())


_BUCKETS = int(_buckets_of([_LONGEST_NS])[0]) + 1


class _Times:
    """What one stage took in one second: how many values, their sum, and how many of them fell into each bucket."""

    __slots__ = ("_buckets", "_counts", "count", "sum_ns")

    def __init__(self) -> None:
        self.count = self.sum_ns = 0
        self._buckets: np.ndarray | slice = slice(None)  # whose counts these are
        self._counts: np.ndarray = np.zeros(_BUCKETS, np.int64)

    def add(self, values_ns: Sequence[int]) -> None:
        self.count += len(values_ns)
        self.sum_ns += sum(values_ns)
        self._counts += np.bincount(_buckets_of(values_ns), minlength=_BUCKETS)

    def close(self) -> None:
        """The second is over: keep only the buckets that have any."""
        found = np.flatnonzero(self._counts)
        self._buckets, self._counts = found.astype(np.uint16), self._counts[found].astype(np.uint32)

    def add_to(self, total: _Ints) -> None:
        total[self._buckets] += self._counts


@dataclass(slots=True)
class _Slice:
    """One second. `batch_ns` is what the requests of its batches have spent in the stages of batches."""

    second: int
    requests: int = 0
    samples: int = 0
    batches: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    times: defaultdict[str, _Times] = field(default_factory=lambda: defaultdict(_Times))
    batch_ns: list[int] = field(default_factory=lambda: [0] * len(BATCH_STAGES))

    def close(self) -> None:
        for one in self.times.values():
            one.close()


class MinuteCounts:
    """How much there was in the last minute, and in each period of the last five, by name.

    `now_s` is a clock that never goes back.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s, self._started_s = now_s, now_s()
        self._seconds: deque[tuple[int, Counter[str]]] = deque()

    def add(self, name: str, amount: int = 1, second: int | None = None) -> None:
        """Count it now, or in that second of the clock; seconds before the latest are counted as the latest."""
        second = int(self._now_s()) if second is None else second
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, Counter()))
            # One period has begun, beside those that have ended.
            while self._seconds[0][0] // PERIOD_S < second // PERIOD_S - PERIODS:
                self._seconds.popleft()
        self._seconds[-1][1][name] += amount

    def per_second(self) -> dict[str, float]:
        """Over the last minute or since the start, sorted by name; names that did not come are left out."""
        now_s = self._now_s()
        oldest = int(now_s) - WINDOW_S
        total = sum((counts for second, counts in self._seconds if second > oldest), Counter[str]())
        span_s = _span_s(self._started_s, now_s)
        return {name: total[name] / span_s for name in sorted(total)}

    def history(self, span: PeriodSpan) -> dict[str, list[float]]:
        """How much there was per second in each of these periods, sorted by name."""
        by_number: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for second, counts in self._seconds:
            by_number[second // PERIOD_S].update(counts)
        names = sorted({name for number in span.numbers for name in by_number[number]})
        return {
            name: [
                by_number[number][name] / seconds for number, seconds in zip(span.numbers, span.seconds, strict=True)
            ]
            for name in names
        }


@dataclass(frozen=True, slots=True)
class PeriodSpan:
    """The periods that have ended since a start, the latest last, and at most `PERIODS`.

    `seconds` is how much of each there was, `until_s_ago` when the latest ended.
    """

    numbers: range
    seconds: list[float]
    until_s_ago: float

    period_s: ClassVar[int] = PERIOD_S

    @staticmethod
    def of(started_s: float, now_s: float) -> PeriodSpan:
        end = int(now_s) // PERIOD_S
        numbers = range(max(int(started_s) // PERIOD_S, end - PERIODS), end)
        seconds = [max(1.0, min(float(PERIOD_S), (number + 1) * PERIOD_S - started_s)) for number in numbers]
        return PeriodSpan(numbers, seconds, now_s - end * PERIOD_S)


def _span_s(started_s: float, now_s: float) -> float:
    """How much of the last minute there was; at least a second, so that one request is no rate of thousands."""
    return max(1.0, now_s - max(started_s, int(now_s) - WINDOW_S + 1))


class LastMinute:
    """Belongs to one event loop. `now_s` is a clock that never goes back."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._started_s = now_s()
        self._slices: deque[_Slice] = deque([_Slice(int(self._started_s))])
        self._periods: deque[Period] = deque(maxlen=PERIODS)

    def record_batches(self, ran: RanBatches, second: int) -> None:
        """Some that ran in this second of the clock; never a second before the latest that was recorded."""
        now, taken_ns = self._slice_of(second), ran.for_requests
        now.requests += taken_ns.count
        now.samples += sum(ran.samples)
        for size, sums in ran.by_size.items():
            now.batches[size] += sums.count
        for at, ns in enumerate((taken_ns.copy_in_ns, taken_ns.compute_ns, taken_ns.copy_out_ns)):
            now.batch_ns[at] += ns
        now.times["queue"].add(ran.queued_ns)
        for stage, each_ns in zip(BATCH_STAGES, (ran.copy_in_ns, ran.compute_ns, ran.copy_out_ns), strict=True):
            now.times[stage].add(each_ns)

    def record_stages(self, took_ns: Mapping[str, Sequence[int]], second: int) -> None:
        """Stages of some requests have ended, by name, in this second of the clock."""
        now = self._slice_of(second)
        for stage, each_ns in took_ns.items():
            now.times[stage].add(each_ns)

    def per_second(self) -> tuple[float, float]:
        """Requests and samples per second, over the last minute or since the start."""
        slices, span_s = self._last(), _span_s(self._started_s, self._now_s())
        return sum(one.requests for one in slices) / span_s, sum(one.samples for one in slices) / span_s

    def stages(self) -> dict[str, StagePercentiles]:
        return {stage: self.percentiles(stage) for stage in STAGES}

    def percentiles(self, stage: str) -> StagePercentiles:
        return _percentiles(stage, self._last())

    def means_ms(self) -> dict[str, float | None]:
        """What a request spends in each stage, and a call in all; those of batches count for each of their requests."""
        slices = self._last()
        requests = sum(one.requests for one in slices)
        sums_ns = {stage: sum(one.batch_ns[at] for one in slices) for at, stage in enumerate(BATCH_STAGES)}
        counts = dict.fromkeys(BATCH_STAGES, requests)
        for stage in STAGES:
            if stage not in BATCH_STAGES:
                times = [one.times[stage] for one in slices if stage in one.times]
                sums_ns[stage], counts[stage] = sum(one.sum_ns for one in times), sum(one.count for one in times)
        return {s: round(sums_ns[s] / counts[s] / 1e6, 4) if counts[s] else None for s in STAGES}

    def batch_sizes(self) -> dict[int, int]:
        """How many batches of each size ran in the last minute."""
        return _batch_sizes(self._last())

    def span(self) -> PeriodSpan:
        """Of the last five minutes, as far as it has counted them."""
        return PeriodSpan.of(self._started_s, self._now_s())

    def history(self, span: PeriodSpan) -> list[Period | None]:
        """What there was in these periods; None where nothing ended."""
        if self._slices[-1].second // PERIOD_S < int(self._now_s()) // PERIOD_S:
            self._end_period()
        by_number = {one.number: one for one in self._periods}
        return [by_number.get(number) for number in span.numbers]

    def _end_period(self) -> None:
        """Keep a few numbers of the period that the latest slice is in, unless they are kept already."""
        number = self._slices[-1].second // PERIOD_S
        if self._periods and self._periods[-1].number == number:
            return
        slices = [one for one in self._slices if one.second // PERIOD_S == number]
        if any(one.times for one in slices):
            self._periods.append(Period(number, _batch_sizes(slices), _percentiles("total", slices)))

    def _slice_of(self, second: int) -> _Slice:
        """The slice of this second, and behind it the last of the others."""
        latest = self._slices[-1]
        if latest.second < second:
            latest.close()
            if latest.second // PERIOD_S != second // PERIOD_S:
                self._end_period()
            self._slices.append(_Slice(second))
            while self._slices[0].second <= second - WINDOW_S:
                self._slices.popleft()
            latest = self._slices[-1]
        return latest

    def _last(self) -> list[_Slice]:
        oldest = int(self._now_s()) - WINDOW_S
        return [one for one in self._slices if one.second > oldest]


def _percentiles(stage: str, slices: Sequence[_Slice]) -> StagePercentiles:
    total = np.zeros(_BUCKETS, np.int64)
    for one in slices:
        if stage in one.times:
            one.times[stage].add_to(total)
    ranks = np.cumsum(total)
    if not ranks[-1]:
        return StagePercentiles(None, None, None)
    wanted = [max(1, -(-int(ranks[-1]) * percent // 100)) for percent in (50, 95, 99)]
    p50, p95, p99 = (round(_middle_ns(int(bucket)) / 1e6, 4) for bucket in np.searchsorted(ranks, wanted))
    return StagePercentiles(p50, p95, p99)


def _batch_sizes(slices: Sequence[_Slice]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for one in slices:
        total.update(one.batches)
    return dict(sorted(total.items()))
