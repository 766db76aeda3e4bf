"""How many messages may be in memory on their way to the slab: gRPC tells nobody how large one is before it is there.

So each counts as large as one may be, from before it is read until its tensors are in the slab. What is not read yet
stays with its client, but for the 64 KiB a call that HTTP/2 lets it send ahead. The messages of streams, which come
when they like, are not counted here: of each stream one is on its way.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from convoy.app.edge.options import BodyLimits
from convoy.app.host.runtime import give_freed_memory_back
from convoy.app.scheduling.slab import Slab
from convoy.app.submission.refusals import no_room
from convoy.models.errors import InvalidRequest, Overloaded, RequestTimeout

# However full the slab is: most messages are small, and one client that sends slowly holds up nobody.
_LEAST_AT_ONCE = 2
# While others wait for room, a client that has it has so long to send. Alone it may send as slowly as over HTTP.
HURRIED_S = 10.0
# The library reads in small pieces, and the C library keeps them when they are freed.
_TRIM_EVERY_BYTES = 16 << 20
# A call that was cancelled looks like one without a message for so long.
_CANCELLED_WITHIN_S = 0.1


class MessageRoom:
    """What the slab has left, in messages of the largest size that is taken. Nothing of it is taken from the slab."""

    def __init__(self, slab: Slab, limits: BodyLimits) -> None:
        self._slab, self._max_bytes = slab, limits.max_bytes
        self.patience_s = limits.seconds_for(limits.max_bytes)
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._reading: dict[Turn, float] = {}  # and when each began, which is their order
        self._watch: asyncio.TimerHandle | None = None  # one timer for all of them
        self._untrimmed_bytes = 0

    def take_at_once(self) -> bool:
        """Room for one message, unless there is none or others wait for it already."""
        is_taken = not self._waiting and self._has_room()
        self._taken += is_taken
        return is_taken

    async def take(self) -> None:
        """Room for one message, after those who wait already."""
        if self.take_at_once():
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                if turn in self._waiting:
                    self._waiting.remove(turn)
            else:  # it came at the same moment
                self.give_back(0)
            raise

    def give_back(self, nbytes: int) -> None:
        """The message, which had so many bytes, is in memory no longer."""
        self._taken -= 1
        while self._waiting and self._has_room():
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
        self.passed(nbytes)

    def passed(self, nbytes: int) -> None:
        """So many bytes were read, and are in memory no longer."""
        self._untrimmed_bytes += nbytes
        if self._untrimmed_bytes > _TRIM_EVERY_BYTES:
            self._untrimmed_bytes = 0
            give_freed_memory_back()

    def begins(self, reading: Turn) -> None:
        """A message comes. Its client has the room's patience, and less while others wait."""
        loop = asyncio.get_running_loop()
        self._reading[reading] = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(self._patience_now_s, self._look)

    def ends(self, reading: Turn) -> None:
        """It has come, or will not."""
        del self._reading[reading]

    @property
    def _patience_now_s(self) -> float:
        return min(HURRIED_S, self.patience_s) if self._waiting else self.patience_s

    def _look(self) -> None:
        """Give up those whose time has passed, and look again when that of the next one has."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        loop = asyncio.get_running_loop()
        now_s, patience_s = loop.time(), self._patience_now_s
        for reading, began_s in self._reading.items():
            left_s = began_s + patience_s - now_s
            if left_s > 0:
                self._watch = loop.call_later(left_s, self._look)
                return
            reading.give_up()

    def full(self) -> Overloaded:
        return no_room(self._max_bytes, self._slab)

    def _has_room(self) -> bool:
        left_bytes = self._slab.capacity_bytes - self._slab.used_bytes
        return self._taken < _LEAST_AT_ONCE or (self._taken + 1) * self._max_bytes <= left_bytes


class Turn:
    """One call's place in the room."""

    __slots__ = ("_is_given_up", "_is_held", "_nbytes", "_reader", "_room")

    def __init__(self, room: MessageRoom) -> None:
        self._room, self._is_held, self._nbytes = room, False, 0
        self._reader: asyncio.Task[Any] | None = None
        self._is_given_up = False

    async def read(self, context: Any) -> bytes:
        """The call's message, for which there is room until `end`.

        Raises Overloaded, RequestTimeout, and InvalidRequest where none comes.
        """
        room = self._room
        if not room.take_at_once():
            try:
                async with asyncio.timeout(room.patience_s):
                    await room.take()
            except TimeoutError:
                raise room.full() from None
        self._is_held = True
        began_s = time.monotonic()
        # As with `asyncio.timeout`, but with one timer for all; the library's `read` lets a cancellation through.
        reader = self._reader = asyncio.current_task()
        assert reader is not None
        cancelled_before = reader.cancelling()
        room.begins(self)
        try:
            data = await context.read()
        except asyncio.CancelledError:
            if not self._is_given_up or reader.uncancel() > cancelled_before:
                raise
            took_s = time.monotonic() - began_s
            raise RequestTimeout(f"the message did not arrive within {took_s:.0f} s; send it faster") from None
        finally:
            room.ends(self)
            self._reader = None
        if isinstance(data, bytes):
            self._nbytes = len(data)
            return data
        await asyncio.sleep(_CANCELLED_WITHIN_S)
        raise InvalidRequest("the call has no message")

    def give_up(self) -> None:
        """Its client has had its time."""
        if self._reader is not None and not self._is_given_up:
            self._is_given_up = True
            self._reader.cancel()

    def end(self) -> None:
        """The message is in memory no longer. Harmless a second time."""
        if self._is_held:
            self._is_held = False
            self._room.give_back(self._nbytes)

    def passed(self, nbytes: int) -> None:
        """The same for a stream's message of so many bytes, which had no room of its own."""
        self._room.passed(nbytes)
