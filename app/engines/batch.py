"""What became of a batch, in words that the scheduler and the engines share. Plain data.

Neither of the two knows the other; `app/lifecycle/model_lifecycle.py` makes parts for an engine of requests.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol


class Answer(Protocol):
    """One output: its whole shape and its bytes, inside the request's slot or, if its size was unknown, apart."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> memoryview: ...


class StageTimes(NamedTuple):
    """Nanoseconds that a batch spent in each stage of its engine.

    `waited_ns`: between copying in and computing, for the batch before it on the same device; that belongs to no stage
    of its own.
    """

    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int
    waited_ns: int = 0

    @property
    def total_ns(self) -> int:
        return self.copy_in_ns + self.compute_ns + self.copy_out_ns


class BatchTrace(NamedTuple):
    """The span of a batch: its `traceparent`, as W3C writes it, and when it began, CLOCK_MONOTONIC nanoseconds."""

    traceparent: str
    started_ns: int


class BatchResult(NamedTuple):
    """By request, in the batch's order, an answer for each output that it wanted; and where the time went."""

    answers: tuple[tuple[Answer, ...], ...]
    times: StageTimes


class FailureScope(Enum):
    """How far a failure reaches: what else will fail for the same reason."""

    BATCH = "batch"  # some request in it may be to blame: the others are worth another try
    MEMORY = "memory"  # the device had no memory for it: a smaller batch may fit
    ENGINE = "engine"  # this engine runs nothing any more and must be replaced
    DEVICE = "device"  # nor does any other engine of this process on the same device


class EngineFailure(Exception):
    """The engine could not run this batch, and how far that reaches."""

    def __init__(self, message: str, scope: FailureScope = FailureScope.BATCH) -> None:
        super().__init__(message)
        self.scope = scope
