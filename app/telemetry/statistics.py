"""What happened to a model's requests since the start, and beside it the last minute.

The counters are those of the protocol's statistics extension, whose readers difference them, so they only
ever grow.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Protocol

from convoy.app.engines.batch import StageTimes
from convoy.app.scheduling.request import ModelKey
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
class ComputeStatistics:
    """What an engine did, for each batch or for each request."""

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
    """`samples` were wanted, `padded` were computed on the device. `queued_ns` has how long each request waited.

    `total_ns` is the sum over all of them since they arrived, until `ended_ns`, when their answers were there, on the
    clock of `time.monotonic_ns`.
    """

    device: str
    samples: int
    padded: int
    times: StageTimes
    queued_ns: list[int]
    total_ns: int
    ended_ns: int


def stages_of(batches: Sequence[BatchRecord]) -> dict[str, list[int]]:
    """How long each stage took: once for each batch, and `queue` once for each request."""
    return {
        "queue": [ns for one in batches for ns in one.queued_ns],
        "copy_in": [one.times.copy_in_ns for one in batches],
        "compute": [one.times.compute_ns for one in batches],
        "copy_out": [one.times.copy_out_ns for one in batches],
    }


class ModelStatistics:
    """Everything counted for one version of one model."""

    def __init__(self) -> None:
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute = ComputeStatistics()  # of a batch for each of its requests
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.failures_by_reason = dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0)
        self.by_batch_size = defaultdict[int, ComputeStatistics](ComputeStatistics)  # once a batch
        self.last_minute = LastMinute()
        self.calls, self.refusals = MinuteCounts[str](), MinuteCounts[str]()  # by outcome; those refused by reason

    def record_batches(self, batches: Sequence[BatchRecord], second: int) -> None:
        """Some that ran, in this second of the monotonic clock; their stages in the last minute are recorded apart."""
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
        """Some requests that were not answered, after this long; `reason` is one of `failures_by_reason`."""
        self.failures_by_reason[reason] += len(each_ns)
        self.fail.add(sum(each_ns), len(each_ns))


class Observed(Protocol):
    """One version, from its first request to its last."""

    key: ModelKey

    @property
    def statistics(self) -> ModelStatistics:
        """With all that has happened until now."""
