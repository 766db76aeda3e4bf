"""What happened to a model's requests since the start, and beside it the last minute.

The counters are those of the protocol's statistics extension, whose readers difference them, so they only
ever grow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Protocol

from convoy.app.engines.base import EngineInfo, WarmShapes
from convoy.app.scheduling.request import ModelKey
from convoy.app.telemetry.last_minute import LastMinute, MinuteCounts
from convoy.app.telemetry.ran_batches import RanBatches, StageSums


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

    def add(self, sums: StageSums) -> None:
        self.compute_input.add(sums.copy_in_ns, sums.count)
        self.compute_infer.add(sums.compute_ns, sums.count)
        self.compute_output.add(sums.copy_out_ns, sums.count)


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
        self.by_batch_size: dict[int, ComputeStatistics] = {}  # once a batch
        self.last_minute = LastMinute()
        self.calls, self.refusals = MinuteCounts(), MinuteCounts()  # by outcome; those refused by reason

    def record_batches(self, ran: RanBatches, second: int) -> None:
        """Some that ran, in this second of the monotonic clock."""
        self.last_minute.record_batches(ran, second)
        ago_ns = time.monotonic_ns() - ran.ended_ns
        self.last_inference_ms = max(self.last_inference_ms, (time.time_ns() - ago_ns) // 1_000_000)
        requests = ran.for_requests.count
        self.execution_count += len(ran.samples)
        self.inference_count += sum(ran.samples)
        self.success.add(ran.total_ns, requests)
        self.queue.add(sum(ran.queued_ns), requests)
        self.compute.add(ran.for_requests)
        for size, sums in ran.by_size.items():
            self.by_batch_size.setdefault(size, ComputeStatistics()).add(sums)

    def record_failure(self, reason: str, ns: int) -> None:
        """One request that was not answered; `reason` is one of `failures_by_reason`."""
        self.fail.add(ns)
        self.failures_by_reason[reason] += 1


class ObservedEngine(Protocol):
    """An engine of a version. `reason` says why it serves, `platform` what it is in the protocol's words."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def shapes(self) -> WarmShapes | None: ...

    @property
    def reason(self) -> str: ...

    @property
    def platform(self) -> str: ...


class ObservedLoad(Protocol):
    """What loading a version brought; the fields are those of `LoadedModel`."""

    @property
    def engines(self) -> Sequence[ObservedEngine]: ...

    @property
    def skipped(self) -> tuple[str, ...]: ...

    @property
    def objections(self) -> tuple[str, ...]: ...

    @property
    def load_s(self) -> float: ...


class Observed(Protocol):
    """One version, from its first request to its last."""

    key: ModelKey

    @property
    def statistics(self) -> ModelStatistics:
        """With all that has happened until now."""

    @property
    def loaded(self) -> ObservedLoad: ...

    @property
    def listed(self) -> Iterable[ObservedEngine]:
        """The engines that new requests find."""


def shapes_of(engines: Iterable[ObservedEngine]) -> WarmShapes | None:
    """What these hold for free sizes together; None where the sizes are fixed."""
    held = [shapes for engine in engines if (shapes := engine.shapes) is not None]
    return reduce(add, held) if held else None
