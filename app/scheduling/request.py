"""The records that travel between the wires, the scheduler and the engines.

All of them are plain data: integers, strings and tuples. None holds a future, an array or a callback.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

from convoy.app.engines.batch import Answer, BatchTrace, StageTimes

Shape = tuple[int, ...]

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000


class ModelKey(NamedTuple):
    """One version of one model: the owner of a queue.

    A version that is loaded again is a new owner, of the next `generation`; the old one's queue runs dry.
    """

    model: str
    version: int
    generation: int = 0


# One use of some memory of the slab. It counts up, so none is ever mistaken for an earlier or a later one.
SlotRef = NewType("SlotRef", int)


class TensorRef(NamedTuple):
    """Bytes in the slab: `nbytes` from `offset` inside a slot."""

    slot: SlotRef
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Request:
    """What one client wants from one model.

    `shapes` are the inputs' shapes without the batch dimension (whole where the model has none): requests
    with equal shapes can share a batch. `slots` are all that the request holds, each once. `outputs` has room
    for each wanted output, None where its size is not known before the run. `priority` is as the client said it: 1 is
    the most urgent, 0 or a level that the model does not have its default. `trace` is the `traceparent` of its call's
    span, None where that is not sampled. Times are CLOCK_MONOTONIC nanoseconds: the answer is worthless after
    `deadline_ns`, the run must begin before `latest_start_ns`.
    """

    id: int
    key: ModelKey
    samples: int
    shapes: tuple[Shape, ...]
    slots: tuple[SlotRef, ...]
    inputs: tuple[TensorRef, ...]
    wanted: tuple[int, ...]
    outputs: tuple[TensorRef | None, ...]
    arrival_ns: int
    priority: int = 0
    deadline_ns: int | None = None
    latest_start_ns: int | None = None
    trace: str | None = None

    @property
    def expiry_ns(self) -> int | None:
        """When waiting any longer is pointless, whatever the engines do."""
        return earliest_ns(self.deadline_ns, self.latest_start_ns)


def earliest_ns(first_ns: int | None, other_ns: int | None) -> int | None:
    """The first of two times, each of which may be none."""
    if first_ns is None or other_ns is None:
        return other_ns if first_ns is None else first_ns
    return min(first_ns, other_ns)


class Outcome(Enum):
    """How a request left the scheduler."""

    ANSWERED = "answered"
    EXPIRED = "expired"  # its deadline or latest start passed while it waited
    HOPELESS = "hopeless"  # it could no longer be in time, and others waited behind it
    MODEL_FAILED = "model_failed"  # the engine fails on this request alone
    NO_MEMORY = "no_memory"  # the device had none for its batch, nor for half of it
    ENGINE_LOST = "engine_lost"  # its engine hung or died; whether it would have run is not known
    STOPPED = "stopped"  # the model was unloaded or the server stopped


@dataclass(slots=True, eq=False)
class Done:
    """How a request ended. `answers` and `times` are there when it was answered, `reason` when it was not.

    `batch` is the span of the batch that it ended with, where a request in that was traced.
    """

    request: Request
    outcome: Outcome
    answers: tuple[Answer, ...] = ()
    times: StageTimes | None = None
    queue_ns: int = 0
    batch_samples: int = 0
    reason: str = ""
    batch: BatchTrace | None = None
