"""What happened to a model's requests: counters since the start, and a picture of the last minute.

The counters are those of the protocol's statistics extension, whose readers difference them, so they only
ever grow. The rolling picture is for people. Both are updated once per batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from app.scheduling.request import Done, StageTimes

WINDOW_S = 60
# Percentiles of the last minute are taken from at most so many of its latest requests.
_MOST_LATENCIES = 4096
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


class Rolling:
    """Requests per second and stage latencies of the last minute."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._started_s = now_s()
        self._seconds: deque[tuple[int, int, int]] = deque()  # (second, requests, samples)
        self._latencies: dict[str, deque[tuple[float, int]]] = {
            stage: deque(maxlen=_MOST_LATENCIES) for stage in STAGES
        }
        self._batches: deque[tuple[float, int]] = deque(maxlen=_MOST_LATENCIES)

    def record_batch(self, requests: int, samples: int) -> None:
        second = int(self._now_s())
        if self._seconds and self._seconds[-1][0] == second:
            _, before, before_samples = self._seconds.pop()
            requests, total_samples = requests + before, samples + before_samples
        else:
            total_samples = samples
        self._seconds.append((second, requests, total_samples))
        while self._seconds[0][0] <= second - WINDOW_S:
            self._seconds.popleft()
        self._batches.append((self._now_s(), samples))

    def record_stage(self, stage: str, ns: int) -> None:
        self._latencies[stage].append((self._now_s(), ns))

    def per_second(self) -> tuple[float, float]:
        """Requests and samples per second, over the last minute or since the start."""
        now_s = self._now_s()
        span_s = max(1.0, min(float(WINDOW_S), now_s - self._started_s))
        recent = [entry for entry in self._seconds if entry[0] > now_s - WINDOW_S]
        return sum(entry[1] for entry in recent) / span_s, sum(entry[2] for entry in recent) / span_s

    def percentiles(self, stage: str) -> StagePercentiles:
        oldest_s = self._now_s() - WINDOW_S
        values = [ns / 1e6 for at_s, ns in self._latencies[stage] if at_s >= oldest_s]
        if not values:
            return StagePercentiles(None, None, None)
        p50, p95, p99 = (round(float(value), 4) for value in np.percentile(values, [50, 95, 99]))
        return StagePercentiles(p50, p95, p99)

    def batch_sizes(self) -> dict[int, int]:
        """How many batches of each size ran in the last minute."""
        oldest_s = self._now_s() - WINDOW_S
        counts: dict[int, int] = {}
        for at_s, samples in self._batches:
            if at_s >= oldest_s:
                counts[samples] = counts.get(samples, 0) + 1
        return dict(sorted(counts.items()))


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

    def record_batch(self, done: list[Done], samples: int, times: StageTimes, now_ns: int) -> None:
        """One batch that ran; `done` are its requests. Must come before any of them is answered."""
        self.execution_count += 1
        self.inference_count += samples
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.rolling.record_batch(len(done), samples)
        for one in done:
            self.success.add(now_ns - one.request.arrival_ns)
            self.queue.add(one.queue_ns)
            self.rolling.record_stage("queue", one.queue_ns)
        for duration, ns in zip(self._stages(), _stage_ns(times), strict=True):
            duration.add(ns * len(done), len(done))
        for stage, ns in zip(("copy_in", "compute", "copy_out"), _stage_ns(times), strict=True):
            self.rolling.record_stage(stage, ns)
        by_size = self.by_batch_size.setdefault(samples, BatchSizeStatistics())
        by_size.compute_input.add(times.copy_in_ns)
        by_size.compute_infer.add(times.compute_ns)
        by_size.compute_output.add(times.copy_out_ns)

    def record_failure(self, reason: str, ns: int) -> None:
        """One request that was not answered; `reason` is one of `failures_by_reason`."""
        self.fail.add(ns)
        self.failures_by_reason[reason] += 1

    def _stages(self) -> tuple[Duration, Duration, Duration]:
        return self.compute_input, self.compute_infer, self.compute_output


def _stage_ns(times: StageTimes) -> tuple[int, int, int]:
    return times.copy_in_ns, times.compute_ns, times.copy_out_ns
