"""The timestamps of calls and batches, from which spans are made. Knows no library.

A call that is not sampled has no span, so with tracing off all of this costs one comparison with None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from convoy.app.engines.batch import BatchResult, BatchTrace, EngineFailure, StageTimes
from convoy.app.scheduling.queues import Dispatch
from convoy.app.scheduling.request import Done, ModelKey
from convoy.app.telemetry.outcomes import CallEnd

TracedWire = Literal["http", "grpc"]


class SpanStage(NamedTuple):
    """One stage, from start to end; CLOCK_MONOTONIC nanoseconds."""

    name: str
    start_ns: int
    end_ns: int


class RequestSpan(ABC):
    """A sampled call's span, from its headers to its end.

    `traceparent` and `tracestate` are its own, in W3C format; `status` is that of the protocol, None until it is known.
    """

    def __init__(self, traceparent: str, tracestate: str) -> None:
        self.traceparent, self.tracestate = traceparent, tracestate
        self.status: int | None = None
        self.stages: list[SpanStage] = []
        self.batches: list[BatchTrace] = []

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        return self.traceparent[36:52]

    def decoded(self, now_ns: int, ns: int, wait_ns: int) -> None:
        """An input was decoded until `now_ns`, in `ns`, after waiting `wait_ns` for its turn."""
        began_ns = now_ns - ns
        if wait_ns:
            self.stages.append(SpanStage("decode_wait", began_ns - wait_ns, began_ns))
        self.stages.append(SpanStage("decode", began_ns, now_ns))

    def answered(self, done: Done) -> None:
        """One of its requests has its answer."""
        batch, times = done.batch, done.times
        if batch is None or times is None:
            return
        queued_ns = done.queue_ns - times.waited_ns  # its wait inside the engine is a stage of its own
        self.stages.append(SpanStage("queue", batch.started_ns - queued_ns, batch.started_ns))
        self.stages += batch_stages(batch.started_ns, times)
        self.batches.append(batch)

    def stages_ns(self) -> tuple[tuple[str, int], ...]:
        """The durations of its stages, the last of each, as in the histograms."""
        by_name = {stage.name: stage.end_ns - stage.start_ns for stage in self.stages}
        if (waited_ns := by_name.pop(_DEVICE_WAIT, 0)) and "queue" in by_name:
            by_name["queue"] += waited_ns
        return tuple(by_name.items())

    @abstractmethod
    def end(self, key: ModelKey | None, ending: CallEnd, answered_ns: int, ended_ns: int) -> None:
        """The answer has been sent, or its client does not wait any more. `key` is None if no model was found.

        `answered_ns` is 0 without an answer; times are CLOCK_MONOTONIC.
        """


class Tracing(Protocol):
    """Makes spans of calls and of batches, and sends them."""

    def begin(
        self, wire: TracedWire, name: str, attributes: Mapping[str, str], parent: Mapping[str, str], arrival_ns: int
    ) -> RequestSpan | None:
        """The span of a sampled call. `parent` has the client's `traceparent` and `tracestate`."""

    def batch_ended(
        self, dispatch: Dispatch, started_ns: int, ended_ns: int, result: BatchResult | EngineFailure
    ) -> BatchTrace | None:
        """The span of a batch with a traced request; None if it has none."""

    def close(self, within_s: float) -> None:
        """Send the spans that have ended, for at most `within_s`; blocks. Can be called twice."""


_DEVICE_WAIT = "device_wait"


def batch_stages(started_ns: int, times: StageTimes) -> list[SpanStage]:
    """The stages of a batch with this start, one after the other."""
    stages, at_ns = [], started_ns
    for name, ns in (
        ("copy_in", times.copy_in_ns),
        (_DEVICE_WAIT, times.waited_ns),
        ("compute", times.compute_ns),
        ("copy_out", times.copy_out_ns),
    ):
        if ns or name != _DEVICE_WAIT:
            stages.append(SpanStage(name, at_ns, at_ns + ns))
        at_ns += ns
    return stages
