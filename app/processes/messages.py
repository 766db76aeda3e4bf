"""What an edge and the core say to each other. Plain data; tensors stay in the memory that both have mapped.

    edge -> core    Hello, Submit, Cancel, Left, UpdateApplied, Report
    core -> edge    Welcome, CatalogUpdate, Ended, Refused, Released

An edge lends the core the memory of a request with `Submit`. It is the edge's again with an `Ended` that is an
answer, with `Refused`, and with `Released` in every other case: told only when no engine can touch it any more.
They are named tuples, which are made several times as fast as frozen dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from convoy.app.batch import StageTimes
from convoy.app.scheduling.request import ModelKey, Outcome, Request, Shape
from convoy.app.submission.listing import Listing
from convoy.models.spec import ModelSpec

PROTOCOL_VERSION = 1
# Of a request's fields: on the wire the extents are in the place of the slots.
SLOTS_AT = Request._fields.index("slots")


class Extent(NamedTuple):
    """`nbytes` from `offset` of the shared memory."""

    offset: int
    nbytes: int


class Hello(NamedTuple):
    """The first words of an edge: what it speaks, which part of the memory is its, and its process's number."""

    version: int
    part: int
    incarnation: int


class Submit(NamedTuple):
    """A request, and the memory that it lends: `extents` are where its slots lie. Their names stay with the edge."""

    request: Request
    extents: tuple[Extent, ...]


class Cancel(NamedTuple):
    """Nobody waits for this answer any more; `reason` is one of the statistics' failures."""

    id: int
    reason: str


class Left(NamedTuple):
    """No request at this edge needs a version any more that has left the update."""

    key: ModelKey


class UpdateApplied(NamedTuple):
    """The update of this number is what requests find now."""

    number: int


@dataclass(slots=True)
class Report:
    """What an edge has counted since its last report: nanoseconds by stage and by how a call ended.

    `used_bytes` is what its requests hold now, `rejected` how many it turned away for want of memory.
    """

    stages: dict[tuple[ModelKey, str], list[int]] = field(default_factory=dict)
    calls: dict[tuple[ModelKey | None, str, str], list[int]] = field(default_factory=dict)
    rejected: int = 0
    used_bytes: int = 0


class Lent(NamedTuple):
    """A request of this part of the memory that an engine may still touch."""

    id: int
    extents: tuple[Extent, ...]


class Welcome(NamedTuple):
    """The core's answer to Hello: what it still uses of the edge's part, of this edge or of one before it."""

    version: int
    lent: tuple[Lent, ...]


class ServedVersion(NamedTuple):
    """One version that is served, as far as an edge must know it."""

    key: ModelKey
    spec: ModelSpec
    text_only: bool


class CatalogUpdate(NamedTuple):
    """All that is served, and what is known of the other versions; updates are numbered.

    `is_complete`: what is not on it is not there, because the initial load has ended.
    `pages_locked`: a device reads the shared memory by itself, so its pages must stay where they are.
    """

    number: int
    served: tuple[ServedVersion, ...]
    others: tuple[Listing, ...]
    is_complete: bool
    pages_locked: bool


class AnswerAt(NamedTuple):
    """One output: in the place that the request had for it, or `apart`, where its size was not known before."""

    shape: Shape
    nbytes: int
    apart: bytes | None


class Ended(NamedTuple):
    """How a request ended; the fields are those of `scheduling.request.Done`."""

    id: int
    outcome: Outcome
    answers: tuple[AnswerAt, ...] = ()
    times: StageTimes | None = None
    queue_ns: int = 0
    batch_samples: int = 0
    reason: str = ""


class Refused(NamedTuple):
    """A request that was not let in: the error's class, words, and when to try again; its memory is free."""

    id: int
    error: str
    message: str
    reason: str
    retry_after_s: float


class Released(NamedTuple):
    """No engine can touch the request's memory any more."""

    id: int


Message = Hello | Submit | Cancel | Left | UpdateApplied | Report | Welcome | CatalogUpdate | Ended | Refused | Released
