"""Who is owed an answer: calls that have begun, whether new ones may, and who waits for a request's end.

The same for a core and for an edge process: each waits, at its end, for the calls that it has let in itself.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from convoy.app.outcomes import Refusal
from convoy.app.scheduling.request import Done, Outcome, Request
from convoy.app.scheduling.slab import Slab
from convoy.app.tracing.spans import RequestTracing
from convoy.models.errors import RequestError, Unavailable

OnEnd = Callable[[Done | RequestError], None]


class OpenCalls(ABC):
    """Belongs to one event loop."""

    slab: Slab

    def __init__(self) -> None:
        self.leaving = False  # said to be not ready, but still serving
        self.draining = False  # taking no new calls
        self.open_calls = 0
        self.waiting_to_decode: Callable[[], int] = lambda: 0
        self.tracing: RequestTracing | None = None
        self._last_has_ended = asyncio.Event()  # when it has been said that no new one may begin

    def begin_call(self) -> None:
        """From here to `end_call` a client waits, and `drain` waits for it. Raises Unavailable when draining.

        A call begins before its body is read: a client that was still sending when the end was announced
        is as much owed an answer as one that waits in the queue.
        """
        if self.draining:
            raise Unavailable("the server is shutting down; send the request to another one", reason=Refusal.DRAINING)
        self.open_calls += 1

    def end_call(self) -> None:
        """The client has its answer, or has gone."""
        self.open_calls -= 1
        if self.draining and not self.open_calls:
            self._last_has_ended.set()

    def watch_decoding(self, waiting: Callable[[], int]) -> None:
        """From now on `waiting_to_decode` tells what waits for the decoders of this process."""
        self.waiting_to_decode = waiting

    async def drain(self, timeout_s: float) -> bool:
        """Take no new call; whether every call that had begun ended within the time."""
        self.leaving = self.draining = True
        if self.open_calls:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._last_has_ended.wait(), timeout_s)
        return self.open_calls == 0

    @abstractmethod
    def take(self, request: Request, on_end: OnEnd) -> None:
        """Queue the request; `on_end` is called once, unless the request is cancelled before. Raises RequestError."""

    def submit(self, request: Request) -> asyncio.Future[Done]:
        """The same for who awaits: the future holds how it ended, answered or not, or why it was not taken.

        Raises RequestError when that is known at once; then its slots stay the caller's. `check` says whether a
        Done is an answer.
        """
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()

        def on_end(end: Done | RequestError) -> None:
            if future.done():
                # Whoever waited stopped waiting a moment ago, so nobody else gives the memory back.
                if isinstance(end, Done) and end.outcome is Outcome.ANSWERED:
                    self.slab.free(*request.slots)
            elif isinstance(end, Done):
                future.set_result(end)
            else:
                future.set_exception(end)

        self.take(request, on_end)
        return future
