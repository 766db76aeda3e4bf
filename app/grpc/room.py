"""How many messages may be in memory on their way to the slab: gRPC does not tell how large one is before it has come.

So each counts as large as one may be while it is read, and with its own bytes from then until its tensors are in the
slab. What is not read yet stays with its client, but for the 64 KiB a call that HTTP/2 lets it send ahead. The messages
of streams, which come when they like, are not counted here: of each stream one is on its way.

Connections share the room. One that has some of it leaves a part for those that have none, and where it is short, what
comes next is of the connection that has least: a client that begins many messages and ends none holds up only itself.
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

# How long a client that has room may take to send while others wait. Alone it may send as slowly as over HTTP.
HURRIED_S = 10.0
# The same for a connection's messages but one, while another connection waits that has no room at all.
CROWDING_S = 2.0


class MessageRoom:
    """What the slab has left, in bytes that are being read. Nothing of it is taken from the slab.

    `max_bytes` is what a message counts whose length is not known yet. A connection is whatever tells one from others.
    """

    def __init__(self, slab: Slab, limits: BodyLimits) -> None:
        self.slab, self.max_bytes = slab, limits.max_bytes
        self.patience_s = limits.seconds_for(limits.max_bytes)
        self._taken_bytes = 0
        self._held: Counter[str] = Counter()  # messages, by connection; one that has none is not there
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by connection, in the order of their first
        self._reading: dict[Turn, float] = {}  # and when each began, which is their order
        self._watch: asyncio.TimerHandle | None = None  # one timer for all of them
        self._untrimmed_bytes = 0

    def take_at_once(self, connection: str) -> bool:
        """Room for one message, unless there is none or the connection's others wait for it already."""
        if connection in self._waiting or not self._has_room(connection):
            return False
        self._hold(connection)
        return True

    async def take(self, connection: str) -> None:
        """Wait for room for one message where there is none at once, behind those of the connection that wait."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(connection, deque()).append(turn)
        self._look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._wait_no_more(connection, turn)
            else:  # it came at the same moment
                self.give_back(connection, self.max_bytes)
            raise

    def is_read(self, nbytes: int) -> None:
        """A message has come and is `nbytes` long. The rest of its room is for others."""
        self._taken_bytes += nbytes - self.max_bytes
        self._serve()

    def give_back(self, connection: str, counted_bytes: int) -> None:
        """A message of the connection is in memory no longer; `counted_bytes` is what it counts now."""
        self._taken_bytes -= counted_bytes
        self._held[connection] -= 1
        if not self._held[connection]:
            del self._held[connection]
        self._serve()
        if self._waiting:
            self._look()  # giving up one may not have been enough

    def _hold(self, connection: str) -> None:
        self._taken_bytes += self.max_bytes
        self._held[connection] += 1

    def _serve(self) -> None:
        """Give room to waiting messages: first to the connection that has least, and among those to the oldest."""
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
                self._waiting[connection] = turns  # behind the others that have as much

    def passed(self, nbytes: int) -> None:
        """Messages of `nbytes` were read, and are in memory no longer."""
        self._untrimmed_bytes += nbytes
        # The library reads in small pieces, and the C library keeps them when they are freed.
        if self._untrimmed_bytes > 16 << 20:
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
        crowding_s = min(CROWDING_S, patience_s)
        held = self._held.copy()
        for reading in self._reading:
            held[reading.connection] -= reading.is_given_up
        # One message each is enough for those that have nothing.
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
        """Whether one more message of the connection has room, beside what is kept for those that have none."""
        left_bytes = self.slab.capacity_bytes - self.slab.used_bytes
        has_some = self._held[connection] > 0
        # A fourth of the room, and room for one message at least, is for connections that have none.
        kept_bytes = max(self.max_bytes, left_bytes // 4) if has_some else 0
        # However full the slab is: most messages are small, and one client that sends slowly must not hold up others.
        is_among_least = not has_some and self._held.total() < 2
        return is_among_least or self._taken_bytes + self.max_bytes + kept_bytes <= left_bytes


class Turn:
    """One call's place in the room; `connection` is the one that its message comes by."""

    __slots__ = ("_counted_bytes", "_is_held", "_limit", "_nbytes", "_room", "connection", "is_given_up")

    def __init__(self, room: MessageRoom, connection: str) -> None:
        self._room, self.connection, self._is_held = room, connection, False
        self._nbytes, self._counted_bytes = 0, room.max_bytes
        self.is_given_up = False

    async def read(self, context: Any) -> bytes:
        """The call's message, for which there is room until `end`.

        Raises Overloaded, RequestTimeout, and InvalidRequest where none comes.
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
            async with asyncio.timeout(None) as self._limit:  # the room's one timer is for all
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
        # A cancelled call looks like one without a message for a moment.
        await asyncio.sleep(0.1)
        raise InvalidRequest("the call has no message")

    def give_up(self) -> None:
        """Its client has had its time: end the reading that has begun."""
        self.is_given_up = True
        self._limit.reschedule(0.0)

    def end(self) -> None:
        """The message is in memory no longer. Harmless a second time."""
        if self._is_held:
            self._is_held = False
            self._room.give_back(self.connection, self._counted_bytes)
            self._room.passed(self._nbytes)

    def passed(self, nbytes: int) -> None:
        """The same for a stream's message of `nbytes`, which had no room of its own."""
        self._room.passed(nbytes)
