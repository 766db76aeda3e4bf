"""The table of open calls, and the one ticker that ends those whose deadline has passed.

Knows no protocols and no models.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Protocol

from convoy.app.telemetry.outcomes import Refusal
from convoy.models.errors import Draining

# The precision of deadlines. Calls that take longer are also watched for clients that leave.
TICK_S = 0.01
# After the process was paused, all deadlines seem to have passed although data has arrived: it gets another tick.
_STOPPED_NS = 1_000_000_000


class OpenCall(Protocol):
    """A call, from its headers to the end of its answer."""

    def tick(self, now_ns: int) -> None:
        """Check deadlines at `now_ns` (CLOCK_MONOTONIC). Called every `TICK_S`."""


class OpenCalls:
    """The only table of open calls. Used on one event loop."""

    def __init__(self) -> None:
        self.draining = False  # no new calls
        self._calls: dict[OpenCall, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_ns = 0
        self._last_has_ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, call: OpenCall) -> None:
        """Open a call; `drain` waits for its end. Raises Draining when the server shuts down.

        A call begins before its body is read, so a client that is still sending when the shutdown begins gets its
        answer.
        """
        if self.draining:
            raise Draining("the server is shutting down; send the request to another server", reason=Refusal.DRAINING)
        self._calls[call] = None
        if self._timer is None:
            self._tick_soon()

    def end(self, call: OpenCall) -> None:
        """Close a call: the client has its answer or has left."""
        del self._calls[call]
        if self.draining and not self._calls:
            self._last_has_ended.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for open ones. Returns whether all ended in time."""
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
