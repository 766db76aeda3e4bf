"""What the routes that infer know of a core: the core itself, or in an edge process a `RemoteCore` that speaks to it.

Knows no engine, no scheduler and no process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from convoy.app.outcomes import CallEnd
from convoy.app.scheduling.request import Done, ModelKey, Request, Spent
from convoy.app.scheduling.slab import Slab, Slot
from convoy.app.submission.load import CoreLoad
from convoy.app.submission.shared_memory import SharedMemory
from convoy.app.tracing.spans import Exemplar, RequestTracing
from convoy.models.errors import RequestError
from convoy.models.spec import ModelSpec

Found = TypeVar("Found", covariant=True)


class Finder(Protocol[Found]):
    """Whatever knows which versions are served."""

    edition: int  # another number whenever something else is found than before

    def find(self, name: str, version: int | None) -> Found:
        """The version asked for, or the highest that is loaded. Raises NotFound or Unavailable."""


class ServedLike(Protocol):
    """One version that is served, as a request finds it."""

    key: ModelKey

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def text_only(self) -> bool:
        """Whether strings must be UTF-8."""

    @property
    def engines(self) -> int:
        """How many are at work for it."""

    def enter(self) -> None:
        """A request has found this version, and holds it until `leave`."""

    def leave(self) -> None: ...


class InferenceCore(Protocol):
    """Takes requests and says how each ended. All of it is used from one event loop."""

    slab: Slab
    open_calls: int  # in this process
    shared_memory: SharedMemory
    leaving: bool  # said to be not ready any more
    tracing: RequestTracing | None  # None: no call has a span

    @property
    def catalog(self) -> Finder[ServedLike]: ...

    def begin_call(self) -> None:
        """From here to `end_call` a client waits. Raises Unavailable."""

    def end_call(self) -> None: ...

    def watch_decoding(self, waiting: Callable[[], int]) -> None:
        """This many wait for the decoders of this process, whenever that is asked."""

    def reserve(self, nbytes: int) -> Slot:
        """Memory for a body or a tensor. Raises Overloaded."""

    def next_request_id(self) -> int: ...

    def submit(self, request: Request) -> asyncio.Future[Done]:
        """Queue the request; the future holds how it ended, answered or not.

        Raises RequestError when it is not taken; then its slots stay the caller's. A core that is elsewhere
        says so later, through the future, and has taken the slots back by then.
        """

    def take(self, request: Request, on_end: Callable[[Done | RequestError], None]) -> None:
        """The same for who waits with a callback: called once, unless the request is cancelled before.

        With an error where a core that is elsewhere did not take it.
        """

    def cancel(self, request: Request, reason: str) -> None:
        """Nobody waits any more. `reason` is one of the statistics' failures. Harmless after the end."""

    def stage_took(self, key: ModelKey, stage: str, ns: int) -> None:
        """A stage of one request that runs at the edge has ended: `decode_wait`, `decode` or `encode`."""

    def request_failed(self, key: ModelKey, reason: str, ns: int) -> None:
        """A request that was never given to `take` has no answer, after so long. `reason` as in `cancel`."""

    def call_ended(self, key: ModelKey | None, protocol: str, ending: CallEnd, ns: int) -> None:
        """A call has its answer, or nobody waits for one. `key` is None where no model was found."""

    def call_answered(self, key: ModelKey, protocol: str, spent: Spent) -> None:
        """Both at once, for a call that ended well."""

    def exemplify(self, exemplar: Exemplar) -> None:
        """A call that was counted has a span, which the histograms may name."""

    def current_load(self) -> CoreLoad:
        """Over the last seconds, of the whole server."""

    def turned_away(self, reason: str) -> None:
        """Something was refused that is no call, or part of one: a connection, a file among others."""
