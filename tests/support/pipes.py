"""Both ends of a connection in this process: what one writes, the other receives, in pieces if wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Pipe(asyncio.Transport):
    """One end's way to the other. Pieces are as long as `cuts` says, and the rest of a write comes as a whole."""

    def __init__(self, receiver: asyncio.Protocol, cuts: Iterable[int] = ()) -> None:
        super().__init__()
        self.written = bytearray()
        self.back: Pipe | None = None
        self._receiver, self._cuts = receiver, iter(cuts)
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data
        asyncio.get_running_loop().call_soon(self._deliver, bytes(data))

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        for way in (self, self.back):
            if way is not None and not way._closing:
                way._closing = True
                asyncio.get_running_loop().call_soon(way._receiver.connection_lost, None)

    def _deliver(self, data: bytes) -> None:
        while data and not self._closing:
            size = next(self._cuts, len(data))
            self._receiver.data_received(data[:size])
            data = data[size:]


def join(one: asyncio.Protocol, other: asyncio.Protocol, cuts: Iterable[int] = ()) -> tuple[Pipe, Pipe]:
    """Connect two protocols; gives the way from each to the other. What the first says is cut."""
    there, back = Pipe(other, cuts), Pipe(one)
    there.back, back.back = back, there
    one.connection_made(there)
    other.connection_made(back)
    return there, back
