"""The records that pass between the protocols, the scheduler and the engines.

They are plain data: integers, strings and tuples. None holds a future, an array or a callback.
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
    """One version of one model. Each has a queue.

    A version that is loaded again gets the next `generation` and a new queue; the old queue is drained.
    """

    model: str
    version: int
    generation: int = 0


# Names one use of some memory of the slab. Numbers count up and are never reused, so a stale reference is detected.
SlotRef = NewType("SlotRef", int)


class TensorRef(NamedTuple):
    """Bytes in the slab: `nbytes` from `offset` inside a slot."""

    slot: SlotRef
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Request:
    """An inference request.

    `shapes` are the inputs' shapes without the batch dimension, or whole if the model has none. Requests with equal
    shapes can share a batch. `slots` are all slots that the request holds, each once. `outputs` has the memory for each
    wanted output, or None if its size is not known before the run. `priority` is the client's: 1 is the most urgent; 0
    and unknown levels mean the model's default. `trace` is the `traceparent` of the call's span, or None if it is not
    sampled. Times are CLOCK_MONOTONIC nanoseconds: the answer must be there by `deadline_ns`, and the run must begin by
    `latest_start_ns`.
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
        """The time after which waiting is pointless, or None."""
        return earliest_ns(self.deadline_ns, self.latest_start_ns)


def earliest_ns(first_ns: int | None, other_ns: int | None) -> int | None:
    """The earlier of two times, each of which may be None."""
    if first_ns is None or other_ns is None:
        return other_ns if first_ns is None else first_ns
    return min(first_ns, other_ns)


class Outcome(Enum):
    """How a request left the scheduler."""

    ANSWERED = "answered"
    EXPIRED = "expired"  # the deadline or latest start passed while the request waited
    HOPELESS = "hopeless"  # dropped: it could not be in time any more, and others waited
    MODEL_FAILED = "model_failed"  # the engine fails on this request
    NO_MEMORY = "no_memory"  # the device ran out of memory, even for half of the batch
    ENGINE_LOST = "engine_lost"  # the engine hung or died
    STOPPED = "stopped"  # the model was unloaded or the server stopped


@dataclass(slots=True, eq=False)
class Done:
    """How a request ended: `answers` and `times` if it was answered, otherwise `reason`.

    `batch` is the span of its batch if a request in that batch is traced.
    """

    request: Request
    outcome: Outcome
    answers: tuple[Answer, ...] = ()
    times: StageTimes | None = None
    queue_ns: int = 0
    batch_samples: int = 0
    reason: str = ""
    batch: BatchTrace | None = None
