"""What happened to a model's requests since the start, in the last minute, and in the last five.

The counters since the start are those of the protocol's statistics extension. Their readers take differences, so they
only grow. The last minute, for people, is kept by second and added up when it is read.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np

from convoy.app.engines.batch import StageTimes
from convoy.app.scheduling.request import ModelKey

WINDOW_S = 60
PERIOD_S, PERIODS = 5, 60
_HISTORY_S = PERIOD_S * (PERIODS + 1)  # one period has begun, beside those that have ended
BATCH_STAGES = ("copy_in", "compute", "copy_out")  # which all requests of a batch spend together
STAGES = ("decode_wait", "decode", "queue", *BATCH_STAGES, "encode", "total")
_Name = TypeVar("_Name", str, int)
_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StagePercentiles:
    """Milliseconds of one stage over some requests; None if there were none."""

    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Period:
    """`PERIOD_S` seconds that have ended: the number of batches of each size, and the durations of calls."""

    batches: dict[int, int]
    total: StagePercentiles


@dataclass(frozen=True, slots=True)
class PeriodSpan:
    """The periods that have ended since a start, the latest last, at most `PERIODS`.

    `seconds` is the length of each, `until_s_ago` when the latest ended.
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


# Log-linear buckets, as in HdrHistogram, with a width of a 64th of their power of two: a percentile is within 0.8 % of
# the exact value, and memory depends on the range of values and not on their number. A float's bits are its exponent
# and mantissa: with 6 bits of the mantissa they number the buckets.
_DROPPED_BITS = 52 - 6
_OF_ONE = int(np.float64(1).view(np.int64)) >> _DROPPED_BITS


def _buckets_of(values_ns: Sequence[int]) -> _Ints:
    over_an_hour_ns = (1 << 42) - 1  # longer durations count as this
    bits = np.clip(np.array(values_ns, np.float64), 1, over_an_hour_ns).view(np.int64)
    return (bits >> _DROPPED_BITS) - _OF_ONE


_BUCKETS = int(_buckets_of([1 << 42])[0]) + 1
_ENDS_NS = ((np.arange(_BUCKETS + 1, dtype=np.int64) + _OF_ONE) << _DROPPED_BITS).view(np.float64)
_MIDDLES_MS = (_ENDS_NS[:-1] + _ENDS_NS[1:]) / 2e6


class _StageTimes:
    """The durations of one stage: for each of the last seconds, how many values fell into each bucket."""

    def __init__(self, kept_s: int) -> None:
        self._kept_s = kept_s
        # The second, the buckets, and their counts: the latest has all buckets, the others only filled ones.
        self._seconds: deque[tuple[int, np.ndarray | slice, np.ndarray]] = deque()

    def add(self, values_ns: Sequence[int], second: int) -> None:
        if not self._seconds or self._seconds[-1][0] < second:
            self._begin(second)
        counts = self._seconds[-1][-1]
        counts += np.bincount(_buckets_of(values_ns), minlength=_BUCKETS)

    def _begin(self, second: int) -> None:
        if self._seconds:
            before, _, counts = self._seconds.pop()
            used = np.flatnonzero(counts)
            self._seconds.append((before, used.astype(np.uint16), counts[used].astype(np.uint32)))
        self._seconds.append((second, slice(None), np.zeros(_BUCKETS, np.int64)))
        while self._seconds[0][0] <= second - self._kept_s:
            self._seconds.popleft()

    def percentiles(self, seconds: range) -> StagePercentiles:
        total = np.zeros(_BUCKETS, np.int64)
        for second, buckets, counts in self._seconds:
            if second in seconds:
                total[buckets] += counts
        ranks = np.cumsum(total)
        if not ranks[-1]:
            return StagePercentiles(None, None, None)
        wanted = [max(1, -(-int(ranks[-1]) * percent // 100)) for percent in (50, 95, 99)]
        return StagePercentiles(*(round(float(ms), 4) for ms in _MIDDLES_MS[np.searchsorted(ranks, wanted)]))


class MinuteCounts(Generic[_Name]):
    """Counts over the last minute, and in each period of the last five, by name.

    `now_s` is a monotonic clock. What is older than `kept_s` may be forgotten.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic, kept_s: int = _HISTORY_S) -> None:
        self._now_s, self._started_s, self._kept_s = now_s, now_s(), kept_s
        self._seconds: deque[tuple[int, Counter[_Name]]] = deque()

    def add(self, name: _Name, amount: int, second: int) -> None:
        """Count in that second of the clock; seconds before the latest count as the latest."""
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, Counter()))
            while self._seconds[0][0] <= second - self._kept_s:
                self._seconds.popleft()
        self._seconds[-1][1][name] += amount

    def total(self) -> Counter[_Name]:
        """Over the last minute; names without counts are left out."""
        oldest = int(self._now_s()) - WINDOW_S
        return sum((counts for second, counts in self._seconds if second > oldest), Counter())

    def per_second(self) -> dict[_Name, float]:
        """Over the last minute or since the start, sorted by name; names without counts are left out."""
        total, now_s = self.total(), self._now_s()
        # At least a second, so that one request is not a rate of thousands.
        span_s = max(1.0, now_s - max(self._started_s, int(now_s) - WINDOW_S + 1))
        return {name: total[name] / span_s for name in sorted(total)}

    def by_period(self) -> defaultdict[int, Counter[_Name]]:
        """The count in each period, by its number."""
        found: defaultdict[int, Counter[_Name]] = defaultdict(Counter)
        for second, counts in self._seconds:
            found[second // PERIOD_S].update(counts)
        return found

    def history(self, span: PeriodSpan) -> dict[_Name, list[float]]:
        """The rate per second in each of these periods, sorted by name."""
        by_period = self.by_period()
        periods = [(by_period[number], seconds) for number, seconds in zip(span.numbers, span.seconds, strict=True)]
        names = sorted({name for counts, _ in periods for name in counts})
        return {name: [counts[name] / seconds for counts, seconds in periods] for name in names}


class LastMinute:
    """Used on one event loop. `now_s` is a monotonic clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s, self._started_s = now_s, now_s()
        self.batches = MinuteCounts[int](now_s)  # by their samples
        self._requests, self._spent_ns = MinuteCounts[str](now_s, WINDOW_S), MinuteCounts[str](now_s, WINDOW_S)
        self._times = {stage: _StageTimes(_HISTORY_S if stage == "total" else WINDOW_S) for stage in STAGES}

    def record(self, stage: str, each_ns: Sequence[int], second: int, requests: Sequence[int] | None = None) -> None:
        """Record the ends of a stage in this second of the clock, which never decreases.

        `requests` is for how many requests each of them counts in the mean; None means one.
        """
        self._times[stage].add(each_ns, second)
        spent_ns = sum(each_ns) if requests is None else sum(map(mul, each_ns, requests))
        self._spent_ns.add(stage, spent_ns, second)
        self._requests.add(stage, len(each_ns) if requests is None else sum(requests), second)

    def per_second(self) -> tuple[float, float]:
        """Requests and samples per second, over the last minute or since the start."""
        samples_per_s = sum(size * rate for size, rate in self.batches.per_second().items())
        return self._requests.per_second().get("queue", 0.0), samples_per_s

    def stages(self) -> dict[str, StagePercentiles]:
        return {stage: self.percentiles(stage) for stage in STAGES}

    def percentiles(self, stage: str) -> StagePercentiles:
        now = int(self._now_s())
        return self._times[stage].percentiles(range(now - WINDOW_S + 1, now + 1))

    def means_ms(self) -> dict[str, float | None]:
        """The mean time of a request in each stage, and of a call; batches count for each of their requests."""
        spent_ns, requests = self._spent_ns.total(), self._requests.total()
        return {s: round(spent_ns[s] / requests[s] / 1e6, 4) if requests[s] else None for s in STAGES}

    def batch_sizes(self) -> dict[int, int]:
        """How many batches of each size ran in the last minute."""
        return dict(sorted(self.batches.total().items()))

    def span(self) -> PeriodSpan:
        """The last five minutes, as far as they were counted."""
        return PeriodSpan.of(self._started_s, self._now_s())

    def history(self, span: PeriodSpan) -> list[Period]:
        """The figures of these periods."""
        batches, total = self.batches.by_period(), self._times["total"]
        seconds = {number: range(number * PERIOD_S, (number + 1) * PERIOD_S) for number in span.numbers}
        return [Period(batches[number], total.percentiles(seconds[number])) for number in span.numbers]


@dataclass(slots=True)
class Duration:
    """How often something happened, and how long it took altogether."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class ComputeStatistics:
    """What an engine did, per batch or per request."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def add(self, times: Sequence[StageTimes], counts: Sequence[int]) -> None:
        """Add these times, each as often as its count says."""
        copy_in_ns, compute_ns, copy_out_ns, _ = zip(*times, strict=True)
        self.compute_input.add(sum(map(mul, copy_in_ns, counts)), sum(counts))
        self.compute_infer.add(sum(map(mul, compute_ns, counts)), sum(counts))
        self.compute_output.add(sum(map(mul, copy_out_ns, counts)), sum(counts))


@dataclass(slots=True, eq=False)
class BatchRecord:
    """`samples` were wanted, `padded` were computed on the device. `queued_ns` has the wait of each request.

    `total_ns` is the sum of all their durations from arrival to `ended_ns`, when their answers were there, on the clock
    of `time.monotonic_ns`.
    """

    device: str
    samples: int
    padded: int
    times: StageTimes
    queued_ns: list[int]
    total_ns: int
    ended_ns: int


def stages_of(batches: Sequence[BatchRecord]) -> dict[str, list[int]]:
    """The durations of each stage: once per batch, and `queue` once per request."""
    return {
        "queue": [ns for one in batches for ns in one.queued_ns],
        "copy_in": [one.times.copy_in_ns for one in batches],
        "compute": [one.times.compute_ns for one in batches],
        "copy_out": [one.times.copy_out_ns for one in batches],
    }


class ModelStatistics:
    """All counters of one version of one model."""

    def __init__(self) -> None:
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute = ComputeStatistics()  # of a batch, for each of its requests
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.failures_by_reason = dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0)
        self.by_batch_size = defaultdict[int, ComputeStatistics](ComputeStatistics)  # once per batch
        self.last_minute = LastMinute()
        self.calls, self.refusals = MinuteCounts[str](), MinuteCounts[str]()  # by outcome; refused ones by reason

    def record_batches(self, batches: Sequence[BatchRecord], second: int) -> None:
        """Count batches in this second of the monotonic clock. Stages of the last minute are recorded separately."""
        requests = [len(one.queued_ns) for one in batches]
        self.execution_count += len(batches)
        self.inference_count += sum([one.samples for one in batches])
        self.success.add(sum([one.total_ns for one in batches]), sum(requests))
        self.queue.add(sum([sum(one.queued_ns) for one in batches]), sum(requests))
        self.compute.add([one.times for one in batches], requests)
        by_size: defaultdict[int, list[StageTimes]] = defaultdict(list)
        for one in batches:
            by_size[one.samples].append(one.times)
        for size, times in by_size.items():
            self.by_batch_size[size].add(times, [1] * len(times))
            self.last_minute.batches.add(size, len(times), second)
        ago_ns = time.monotonic_ns() - max([one.ended_ns for one in batches])
        self.last_inference_ms = max(self.last_inference_ms, (time.time_ns() - ago_ns) // 1_000_000)

    def record_failures(self, reason: str, each_ns: Sequence[int]) -> None:
        """Count requests without an answer, after this time; `reason` is one of `failures_by_reason`."""
        self.failures_by_reason[reason] += len(each_ns)
        self.fail.add(sum(each_ns), len(each_ns))


class Observed(Protocol):
    """One version, from its first request to its last."""

    key: ModelKey

    @property
    def statistics(self) -> ModelStatistics:
        """The statistics, with everything that has happened until now."""
