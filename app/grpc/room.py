"""Bounds the memory of gRPC messages on their way to the slab. gRPC does not tell the size of a message in advance.

So a message counts as the largest possible one while it is read, and with its own size until its tensors are in the
slab. What is not read stays with the client, except for the 64 KiB per call that HTTP/2 allows. Messages of streams are
not counted here; each stream has one on its way.

Connections share the room. A part is kept for connections that have none, and when room is short, the next message
comes from the connection that has the least. A client that begins many messages and ends none delays only itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from typing import Any

from convoy.app.calls.access import BodyLimits
from convoy.app.calls.refusals import no_room
from convoy.app.scheduling.slab import Slab
from convoy.app.server.runtime import give_freed_memory_back
from convoy.models.errors import InvalidRequest, RequestTimeout

# How long a client with room may take to send while others wait. If none wait, the HTTP limits apply.
HURRIED_S = 10.0
# The same for all but one message of a connection, while a connection without any room waits.
CROWDING_S = 2.0


class MessageRoom:
    """The room for messages that are being read, in bytes. Nothing of it is reserved in the slab.

    `max_bytes` is what a message of unknown length counts. A connection is any hashable key.
    """

    def __init__(self, slab: Slab, limits: BodyLimits) -> None:
        self.slab, self.max_bytes = slab, limits.max_bytes
        self.patience_s = limits.seconds_for(limits.max_bytes)
        self._taken_bytes = 0
        self._held: Counter[str] = Counter()  # messages per connection, only for connections that have some
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by connection, in the order of their first
        self._reading: dict[Turn, float] = {}  # and when each began, which is their order
        self._watch: asyncio.TimerHandle | None = None  # one timer for all of them
        self._untrimmed_bytes = 0

    def take_at_once(self, connection: str) -> bool:
        """Take room for one message, unless there is none or other messages of the connection wait."""
        if connection in self._waiting or not self._has_room(connection):
            return False
        self._hold(connection)
        return True

    async def take(self, connection: str) -> None:
        """Wait for room for one message, behind the others of the connection."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(connection, deque()).append(turn)
        self._look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._wait_no_more(connection, turn)
            else:  # granted at the same moment
                self.give_back(connection, self.max_bytes)
            raise

    def is_read(self, nbytes: int) -> None:
        """Record that a message of `nbytes` was read, which frees the rest of its room."""
        self._taken_bytes += nbytes - self.max_bytes
        self._serve()

    def give_back(self, connection: str, counted_bytes: int) -> None:
        """Release the room of a message, `counted_bytes` at this time."""
        self._taken_bytes -= counted_bytes
        self._held[connection] -= 1
        if not self._held[connection]:
            del self._held[connection]
        self._serve()
        if self._waiting:
            self._look()  # giving up one may not be enough

    def _hold(self, connection: str) -> None:
        self._taken_bytes += self.max_bytes
        self._held[connection] += 1

    def _serve(self) -> None:
        """Give room to waiting messages: first to the connection with the least, then to the oldest message."""
        while self._waiting:
            connection = min(self._waiting, key=lambda one: self._held[one])
            if not self._has_room(connection):
                return
            turn = self._waiting[connection][0]
            self._wait_no_more(connection, turn)
            if not turn.done():
                self._hold(connection)
                turn.set_result(None)

    def _wait_no_more(self, connection: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(connection, deque())
        if turn in turns:
            turns.remove(turn)
            del self._waiting[connection]
            if turns:
                self._waiting[connection] = turns  # behind the others with as many

    def passed(self, nbytes: int) -> None:
        """Record that messages of `nbytes` were read and released."""
        self._untrimmed_bytes += nbytes
        # The library allocates small pieces, which the C allocator keeps after they are freed.
        if self._untrimmed_bytes > 16 << 20:
            self._untrimmed_bytes = 0
            give_freed_memory_back()

    def begins(self, reading: Turn) -> None:
        """Record that a message is being read. Its client may take the usual time, and less while others wait."""
        loop = asyncio.get_running_loop()
        self._reading[reading] = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(self._patience_now_s, self._look)

    def ends(self, reading: Turn) -> None:
        """Record that the message has arrived or will not."""
        del self._reading[reading]

    @property
    def _patience_now_s(self) -> float:
        return min(HURRIED_S, self.patience_s) if self._waiting else self.patience_s

    def _look(self) -> None:
        """Give up messages whose time has passed, and set the timer for the next one."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        loop = asyncio.get_running_loop()
        now_s, patience_s = loop.time(), self._patience_now_s
        crowding_s = min(CROWDING_S, patience_s)
        held = self._held.copy()
        for reading in self._reading:
            held[reading.connection] -= reading.is_given_up
        # One message each is enough for those without room.
        crowded = sum(not held[one] for one in self._waiting) - sum(one.is_given_up for one in self._reading)
        next_s = math.inf
        for reading, began_s in self._reading.items():
            if reading.is_given_up:
                continue
            is_crowding = crowded > 0 and held[reading.connection] > 1
            left_s = began_s + (crowding_s if is_crowding else patience_s) - now_s
            if left_s > 0:
                next_s = min(next_s, left_s)
                continue
            reading.give_up()
            held[reading.connection] -= 1
            crowded -= 1
        if next_s < math.inf:
            self._watch = loop.call_later(next_s, self._look)

    def _has_room(self, connection: str) -> bool:
        """Whether there is room for one more message of the connection, beside the part kept for others."""
        left_bytes = self.slab.capacity_bytes - self.slab.used_bytes
        has_some = self._held[connection] > 0
        # A fourth of the room, and at least one message, is for connections that have none.
        kept_bytes = max(self.max_bytes, left_bytes // 4) if has_some else 0
        # This holds however full the slab is: most messages are small, and a slow client must not block others.
        is_among_least = not has_some and self._held.total() < 2
        return is_among_least or self._taken_bytes + self.max_bytes + kept_bytes <= left_bytes


class Turn:
    """One call's place in the room. `connection` is the connection that its message arrives on."""

    __slots__ = ("_counted_bytes", "_is_held", "_limit", "_nbytes", "_room", "connection", "is_given_up")

    def __init__(self, room: MessageRoom, connection: str) -> None:
        self._room, self.connection, self._is_held = room, connection, False
        self._nbytes, self._counted_bytes = 0, room.max_bytes
        self.is_given_up = False

    async def read(self, context: Any) -> bytes:
        """Read the call's message, whose room is held until `end`.

        Raises Overloaded, RequestTimeout, and InvalidRequest if no message comes.
        """
        room = self._room
        if not room.take_at_once(self.connection):
            try:
                async with asyncio.timeout(room.patience_s):
                    await room.take(self.connection)
            except TimeoutError:
                raise no_room(room.max_bytes, room.slab) from None
        self._is_held = True
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(None) as self._limit:  # the room has one timer for all
                room.begins(self)
                try:
                    data = await context.read()
                finally:
                    room.ends(self)
        except TimeoutError:
            took_s = time.monotonic() - began_s
            raise RequestTimeout(f"the message did not arrive within {took_s:.0f} s; send it faster") from None
        if isinstance(data, bytes):
            self._nbytes = self._counted_bytes = len(data)
            room.is_read(self._nbytes)
            return data
        # A cancelled call briefly looks like one without a message.
        await asyncio.sleep(0.1)
        raise InvalidRequest("the call has no message")

    def give_up(self) -> None:
        """Cancel the reading because the client took too long."""
        self.is_given_up = True
        self._limit.reschedule(0.0)

    def end(self) -> None:
        """Release the message's room. Can be called twice."""
        if self._is_held:
            self._is_held = False
            self._room.give_back(self.connection, self._counted_bytes)
            self._room.passed(self._nbytes)

    def passed(self, nbytes: int) -> None:
        """Record a released stream message of `nbytes`, which had no room of its own."""
        self._room.passed(nbytes)
