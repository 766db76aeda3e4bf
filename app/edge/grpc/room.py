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
        self._reading: dict[asyncio.Timeout, float] = {}  # and when each began
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
        for reading, began_s in self._reading.items():
            self._hurry(reading, began_s)
        self._waiting.append(turn)
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

    def begins(self, reading: asyncio.Timeout) -> None:
        """A message comes, which has the patience of this. It has less while others wait."""
        began_s = self._reading[reading] = asyncio.get_running_loop().time()
        if self._waiting:
            self._hurry(reading, began_s)

    def ends(self, reading: asyncio.Timeout) -> None:
        """It has come, or will not."""
        del self._reading[reading]

    def _hurry(self, reading: asyncio.Timeout, began_s: float) -> None:
        if not reading.expired():  # one that has may not be moved, and ends in a moment
            reading.reschedule(began_s + min(HURRIED_S, self.patience_s))

    def full(self) -> Overloaded:
        return no_room(self._max_bytes, self._slab)

    def _has_room(self) -> bool:
        left_bytes = self._slab.capacity_bytes - self._slab.used_bytes
        return self._taken < _LEAST_AT_ONCE or (self._taken + 1) * self._max_bytes <= left_bytes


class Turn:
    """One call's place in the room."""

    __slots__ = ("_is_held", "_nbytes", "_room")

    def __init__(self, room: MessageRoom) -> None:
        self._room, self._is_held, self._nbytes = room, False, 0

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
        try:
            async with asyncio.timeout(room.patience_s) as reading:
                room.begins(reading)
                try:
                    data = await context.read()
                finally:
                    room.ends(reading)
        except TimeoutError:
            took_s = time.monotonic() - began_s
            raise RequestTimeout(f"the message did not arrive within {took_s:.0f} s; send it faster") from None
        if isinstance(data, bytes):
            self._nbytes = len(data)
            return data
        await asyncio.sleep(_CANCELLED_WITHIN_S)
        raise InvalidRequest("the call has no message")

    def end(self) -> None:
        """The message is in memory no longer. Harmless a second time."""
        if self._is_held:
            self._is_held = False
            self._room.give_back(self._nbytes)

    def passed(self, nbytes: int) -> None:
        """The same for a stream's message of so many bytes, which had no room of its own."""
        self._room.passed(nbytes)
