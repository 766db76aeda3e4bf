"""What happened to a model's requests: counters since the start, and a picture of the last minute.

The counters are those of the protocol's statistics extension, whose readers difference them, so they only
ever grow. The rolling picture is for people. Both are updated once per batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from convoy.app.batch import StageTimes

WINDOW_S = 60
# The last minute's picture is drawn from at most so many of its latest requests.
_MOST_KEPT = 4096
_MOST_UNORDERED = 256
STAGES = ("decode", "queue", "copy_in", "compute", "copy_out", "encode", "total")


@dataclass(slots=True)
class Duration:
    """How often something happened and how long it took altogether."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class BatchSizeStatistics:
    """Executions at one batch size; durations are counted once per execution."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(frozen=True, slots=True)
class StagePercentiles:
    """Milliseconds of one stage over the last minute's requests; None before there was one."""

    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


class _Recent:
    """The latest values and when they were measured. Kept as they come, and put in order some hundred at a time."""

    def __init__(self) -> None:
        self._at_s = np.empty(0, np.float64)
        self._values = np.empty(0, np.int64)
        self._new: list[tuple[float, Sequence[int]]] = []

    def add(self, at_s: float, values: Sequence[int]) -> None:
        self._new.append((at_s, values))
        if len(self._new) >= _MOST_UNORDERED:
            self._order()

    def since(self, oldest_s: float) -> np.ndarray:
        """The values, in no order."""
        self._order()
        return self._values[self._at_s >= oldest_s]

    def _order(self) -> None:
        if self._new:
            times = np.repeat([at_s for at_s, _ in self._new], [len(values) for _, values in self._new])
            values = np.fromiter(chain.from_iterable(values for _, values in self._new), np.int64, len(times))
            self._at_s = np.concatenate((self._at_s, times))[-_MOST_KEPT:]
            self._values = np.concatenate((self._values, values))[-_MOST_KEPT:]
            self._new = []


class Rolling:
    """Requests per second and stage latencies of the last minute."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._seconds: deque[tuple[int, int, int]] = deque()  # (second, requests, samples)
        self._latencies = {stage: _Recent() for stage in STAGES}
        self._batches = _Recent()

    def record_batch(self, samples: int, times: StageTimes, queued_ns: Sequence[int]) -> None:
        """One batch of so many requests, and what its stages took."""
        now_s, requests = time.monotonic(), len(queued_ns)
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            _, before, before_samples = self._seconds.pop()
            self._seconds.append((second, requests + before, samples + before_samples))
        else:
            self._seconds.append((second, requests, samples))
            while self._seconds[0][0] <= second - WINDOW_S:
                self._seconds.popleft()
        self._batches.add(now_s, (samples,))
        latencies = self._latencies
        latencies["queue"].add(now_s, queued_ns)
        latencies["copy_in"].add(now_s, (times.copy_in_ns,))
        latencies["compute"].add(now_s, (times.compute_ns,))
        latencies["copy_out"].add(now_s, (times.copy_out_ns,))

    def record_stage(self, stage: str, took_ns: Sequence[int]) -> None:
        self._latencies[stage].add(time.monotonic(), took_ns)

    def per_second(self) -> tuple[float, float]:
        """Requests and samples per second, over the last minute or since the start."""
        now_s = time.monotonic()
        span_s = max(1.0, min(float(WINDOW_S), now_s - self._started_s))
        recent = [entry for entry in self._seconds if entry[0] > now_s - WINDOW_S]
        return sum(entry[1] for entry in recent) / span_s, sum(entry[2] for entry in recent) / span_s

    def percentiles(self, stage: str) -> StagePercentiles:
        oldest_s = time.monotonic() - WINDOW_S
        values = self._latencies[stage].since(oldest_s)
        if not len(values):
            return StagePercentiles(None, None, None)
        p50, p95, p99 = (round(float(value) / 1e6, 4) for value in np.percentile(values, [50, 95, 99]))
        return StagePercentiles(p50, p95, p99)

    def batch_sizes(self) -> dict[int, int]:
        """How many batches of each size ran in the last minute."""
        sizes, times = np.unique(self._batches.since(time.monotonic() - WINDOW_S), return_counts=True)
        return {int(size): int(count) for size, count in zip(sizes, times, strict=True)}


class ModelStatistics:
    """Everything counted for one version of one model."""

    def __init__(self) -> None:
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.failures_by_reason = dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0)
        self.by_batch_size: dict[int, BatchSizeStatistics] = {}
        self.rolling = Rolling()

    def record_batch(self, samples: int, times: StageTimes, total_ns: int, queued_ns: Sequence[int]) -> None:
        """One batch that ran. Must come before any of its requests is answered.

        `queued_ns` has how long each request waited, `total_ns` is the sum over all of them since they arrived.
        """
        requests = len(queued_ns)
        self.execution_count += 1
        self.inference_count += samples
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.rolling.record_batch(samples, times, queued_ns)
        self.success.add(total_ns, requests)
        self.queue.add(sum(queued_ns), requests)
        self.compute_input.add(times.copy_in_ns * requests, requests)
        self.compute_infer.add(times.compute_ns * requests, requests)
        self.compute_output.add(times.copy_out_ns * requests, requests)
        by_size = self.by_batch_size.get(samples)
        if by_size is None:
            by_size = self.by_batch_size[samples] = BatchSizeStatistics()
        by_size.compute_input.add(times.copy_in_ns)
        by_size.compute_infer.add(times.compute_ns)
        by_size.compute_output.add(times.copy_out_ns)

    def record_failure(self, reason: str, ns: int) -> None:
        """One request that was not answered; `reason` is one of `failures_by_reason`."""
        self.fail.add(ns)
        self.failures_by_reason[reason] += 1
