"""What happened to a model's requests since the start, and beside it the last minute.

The counters are those of the protocol's statistics extension, whose readers difference them, so they only
ever grow. They are updated once per batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from convoy.app.batch import StageTimes
from convoy.app.telemetry.last_minute import LastMinute, MinuteCounts


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
        self.last_minute = LastMinute()
        self.calls, self.refusals = MinuteCounts(), MinuteCounts()  # by outcome; those refused by reason

    def record_batch(self, samples: int, times: StageTimes, total_ns: int, queued_ns: Sequence[int]) -> None:
        """One batch that ran. Must come before any of its requests is answered.

        `queued_ns` has how long each request waited, `total_ns` is the sum over all of them since they arrived.
        """
        requests = len(queued_ns)
        self.execution_count += 1
        self.inference_count += samples
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.last_minute.record_batch(samples, times, queued_ns)
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
