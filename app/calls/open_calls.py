"""The calls that are owed an answer, and the one clock that ends those whose time is over.

Knows neither wires nor models. What it does to a call is up to the call.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Protocol

from convoy.app.telemetry.outcomes import Refusal
from convoy.models.errors import Unavailable

# Deadlines are kept to this precision, and calls that take longer are watched for clients that leave.
TICK_S = 0.01
# A process that was stopped finds all times passed, and what has arrived meanwhile still unread: it gets another tick.
_STOPPED_NS = 1_000_000_000


class OpenCall(Protocol):
    """A call from its headers to the end of its answer."""

    def tick(self, now_ns: int) -> None:
        """Look at the clock, CLOCK_MONOTONIC nanoseconds. Called every `TICK_S`."""


class OpenCalls:
    """The only table of open calls. Belongs to one event loop."""

    def __init__(self) -> None:
        self.draining = False  # no call may begin any more
        self._calls: dict[OpenCall, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_ns = 0
        self._last_has_ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, call: OpenCall) -> None:
        """From here to `end` a client waits, and `drain` waits for it. Raises Unavailable when draining.

        A call begins before its body is read: a client that was still sending when the shutdown began gets its answer
        like one that waits in the queue.
        """
        if self.draining:
            raise Unavailable(
                "the server is shutting down; send the request to another server", reason=Refusal.DRAINING
            )
        self._calls[call] = None
        if self._timer is None:
            self._tick_soon()

    def end(self, call: OpenCall) -> None:
        """The client has its answer, or has gone."""
        del self._calls[call]
        if self.draining and not self._calls:
            self._last_has_ended.set()

    async def drain(self, timeout_s: float) -> bool:
        """Let no call begin any more. Returns whether all that had begun ended within the time."""
        self.draining = True
        if self._calls:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._last_has_ended.wait(), timeout_s)
        return not self._calls

    def _tick_soon(self) -> None:
        self._ticked_ns = time.monotonic_ns()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now_ns, self._timer = time.monotonic_ns(), None
        if now_ns - self._ticked_ns < _STOPPED_NS:
            for call in [*self._calls]:
                call.tick(now_ns)
        if self._calls:
            self._tick_soon()
