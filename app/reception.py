"""Who is owed an answer: calls that have begun, and whether new ones may.

The same for a core and for an edge process: each waits, at its end, for the calls that it has let in itself.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from models.errors import Unavailable


class Reception:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.leaving = False  # said to be not ready, but still serving
        self.draining = False  # taking no new calls
        self.open_calls = 0
        self._no_call_is_open = asyncio.Event()
        self._no_call_is_open.set()

    def begin_call(self) -> None:
        """From here to `end_call` a client waits, and `drain` waits for it. Raises Unavailable when draining.

        A call begins before its body is read: a client that was still sending when the end was announced
        is as much owed an answer as one that waits in the queue.
        """
        if self.draining:
            raise Unavailable("the server is shutting down; send the request to another one")
        self.open_calls += 1
        self._no_call_is_open.clear()

    def end_call(self) -> None:
        """The client has its answer, or has gone."""
        self.open_calls -= 1
        if not self.open_calls:
            self._no_call_is_open.set()

    async def drain(self, timeout_s: float) -> bool:
        """Take no new call; whether every call that had begun ended within the time."""
        self.leaving = self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._no_call_is_open.wait(), timeout_s)
        return self.open_calls == 0
