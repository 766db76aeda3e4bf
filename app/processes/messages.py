"""What an edge and the core say to each other. Plain data; tensors stay in the memory that both have mapped.

    edge -> core    Hello, Submit, Cancel, Left, UpdateApplied, Report
    core -> edge    Welcome, CatalogUpdate, OptionsTold, LoadTold, Ended, Refused, Released

An edge lends the core the memory of a request with `Submit`. It is the edge's again with an `Ended` that is an
answer, with `Refused`, and with `Released` in every other case: told only when no engine can touch it any more.
On the wire a message is a list, of its name and its fields. It is read by the annotations here and in the records that
they name.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct, field

from convoy.app.batch import BatchTrace, StageTimes
from convoy.app.outcomes import CallEnd
from convoy.app.scheduling.request import ModelKey, Outcome, Shape, TensorPlace
from convoy.app.submission.listing import Listing
from convoy.app.submission.load import CoreLoad
from convoy.app.tracing.spans import Exemplar
from convoy.models.spec import ModelSpec

PROTOCOL_VERSION = 4


class _Said(Struct, array_like=True, tag=True):
    """A message, in the form that goes over the wire."""


class Extent(NamedTuple):
    """`nbytes` from `offset` of the shared memory."""

    offset: int
    nbytes: int


class Hello(_Said):
    """The first words of an edge: what it speaks, which part of the memory is its, and which process it is."""

    version: int
    part: int
    incarnation: int
    pid: int


class Submit(_Said):
    """A request, and the memory that it lends: `extents` are where its slots lie, whose names stay with the edge.

    The other fields are those of `scheduling.request.Request`.
    """

    id: int
    key: ModelKey
    samples: int
    shapes: tuple[Shape, ...]
    extents: tuple[Extent, ...]
    inputs: tuple[TensorPlace, ...]
    wanted: tuple[int, ...]
    outputs: tuple[TensorPlace | None, ...]
    arrival_ns: int
    priority: int
    deadline_ns: int | None
    latest_start_ns: int | None
    trace: str | None


class Cancel(_Said):
    """Nobody waits for this answer any more; `reason` is one of the statistics' failures."""

    id: int
    reason: str


class Left(_Said):
    """No request at this edge needs a version any more that has left the update."""

    key: ModelKey


class UpdateApplied(_Said):
    """The update of this number is what requests find now."""

    number: int


class Report(_Said):
    """What an edge has counted since its last report: nanoseconds by stage, by how a call ended, and by why a request
    failed that the core never had.

    `turned_away` is what it refused, by reason, that was no call; `exemplars` are those calls that have a span. Now:
    `used_bytes` is what its requests hold, `open_calls` how many clients wait, `open_by_version` for what, and
    `waiting_to_decode` how much of theirs no decoder has begun.
    """

    stages: dict[tuple[ModelKey, str], list[int]] = field(default_factory=dict)
    calls: dict[tuple[ModelKey | None, str, CallEnd], list[int]] = field(default_factory=dict)
    failed: dict[tuple[ModelKey, str], list[int]] = field(default_factory=dict)
    turned_away: dict[str, int] = field(default_factory=dict)
    exemplars: list[Exemplar] = field(default_factory=list)
    used_bytes: int = 0
    open_calls: int = 0
    open_by_version: dict[ModelKey, int] = field(default_factory=dict)
    waiting_to_decode: int = 0


class Lent(NamedTuple):
    """A request of this part of the memory that an engine may still touch."""

    id: int
    extents: tuple[Extent, ...]


class Welcome(_Said):
    """The core's answer to Hello: what it still uses of the edge's part, of this edge or of one before it."""

    version: int
    lent: tuple[Lent, ...]


class ServedVersion(NamedTuple):
    """One version that is served, as far as an edge must know it."""

    key: ModelKey
    spec: ModelSpec
    text_only: bool
    engines: int


class CatalogUpdate(_Said):
    """All that is served, and what is known of the other versions; updates are numbered.

    `is_complete`: what is not on it is not there, because the initial load has ended.
    `pages_locked`: a device reads the shared memory by itself, so its pages must stay where they are.
    """

    number: int
    served: tuple[ServedVersion, ...]
    others: tuple[Listing, ...]
    is_complete: bool
    pages_locked: bool


class OptionsTold(_Said):
    """What clients are held to now: `options` is the JSON of `EdgeOptions`, of which an edge takes what may change."""

    options: str
    log_level: str


class LoadTold(_Said):
    """How loaded the core is; said twice a second."""

    load: CoreLoad


class AnswerAt(NamedTuple):
    """One output: in the place that the request had for it, or `apart`, where its size was not known before."""

    shape: Shape
    nbytes: int
    apart: memoryview | None


class Ended(_Said):
    """How a request ended; the fields are those of `scheduling.request.Done`."""

    id: int
    outcome: Outcome
    answers: tuple[AnswerAt, ...] = ()
    times: StageTimes | None = None
    queue_ns: int = 0
    batch_samples: int = 0
    reason: str = ""
    batch: BatchTrace | None = None


class Refused(_Said):
    """A request that was not let in: the error's class, words, and when to try again; its memory is free."""

    id: int
    error: str
    message: str
    reason: str
    retry_after_s: float


class Released(_Said):
    """No engine can touch the request's memory any more."""

    id: int


Message = (
    Hello
    | Submit
    | Cancel
    | Left
    | UpdateApplied
    | Report
    | Welcome
    | CatalogUpdate
    | OptionsTold
    | LoadTold
    | Ended
    | Refused
    | Released
)
