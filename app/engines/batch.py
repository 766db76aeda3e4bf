"""The result of a batch, in terms that the scheduler and the engines share. Plain data.

Neither knows the other; `app/lifecycle/model_lifecycle.py` makes an engine's parts from requests.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol


class Answer(Protocol):
    """One output: its whole shape and its bytes, in the request's slot or, if its size was unknown, in memory of its
    own.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> memoryview: ...


class StageTimes(NamedTuple):
    """Nanoseconds that a batch spent in each stage of its engine.

    `waited_ns` is the wait for the previous batch on the device, between copying in and computing.
    """

    copy_in_ns: int
    compute_ns: int
    copy_out_ns: int
    waited_ns: int = 0

    @property
    def total_ns(self) -> int:
        return self.copy_in_ns + self.compute_ns + self.copy_out_ns


class BatchTrace(NamedTuple):
    """The span of a batch: its W3C `traceparent`, and its start in CLOCK_MONOTONIC nanoseconds."""

    traceparent: str
    started_ns: int


class BatchResult(NamedTuple):
    """For each request of the batch, in order, an answer per wanted output; and the time of each stage."""

    answers: tuple[tuple[Answer, ...], ...]
    times: StageTimes


class FailureScope(Enum):
    """How far a failure reaches: what else will fail for the same reason."""

    BATCH = "batch"  # one request may be to blame: retry the others
    MEMORY = "memory"  # the device had no memory for it: a smaller batch may fit
    ENGINE = "engine"  # this engine runs nothing any more and must be replaced
    DEVICE = "device"  # nor does any other engine of this process on the same device


class EngineFailure(Exception):
    """The engine could not run this batch. `scope` says how far the failure reaches."""

    def __init__(self, message: str, scope: FailureScope = FailureScope.BATCH) -> None:
        super().__init__(message)
        self.scope = scope
