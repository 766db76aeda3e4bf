"""A request's body, read into the slab.

The slot is reserved before the first byte is read, from the declared length where there is one, so bytes
in flight are admitted and never only counted. A body without a declared length starts small and moves to
a slot of twice the size when it is full. A client that sends too slowly is given up on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import Receive

from convoy.app.edge.oip.exchange import ClientGone, Exchange
from convoy.app.edge.options import BodyLimits
from convoy.app.scheduling.slab import Slot
from convoy.models.errors import BodyTooLarge, InvalidRequest, RequestTimeout

_FIRST_SLOT_BYTES = 64 << 10
# A time limit that passes while there are bytes to read is looked at again so much later.
LOOK_AGAIN_S = 0.1


class Body(NamedTuple):
    """The whole body: the first `nbytes` of the slot."""

    slot: Slot
    nbytes: int

    @property
    def view(self) -> memoryview:
        return self.slot.view[: self.nbytes]


def declared_length(headers: dict[bytes, bytes], limits: BodyLimits) -> int | None:
    """Content-Length, or None for a chunked body. Raises InvalidRequest or BodyTooLarge."""
    raw = headers.get(b"content-length")
    if raw is None:
        return None
    if not raw.isdigit() or len(raw) > 18:
        raise InvalidRequest(f"Content-Length must be a whole number of bytes, got {raw[:40].decode('latin-1')!r}")
    if int(raw) > limits.max_bytes:
        raise too_large(int(raw), limits)
    return int(raw)


async def read_body(
    receive: Receive,
    exchange: Exchange,
    declared: int | None,
    limits: BodyLimits,
    is_here: Callable[[], bool] = lambda: False,
) -> Body:
    """Read to the end. Raises BodyTooLarge, Overloaded, RequestTimeout or ClientGone.

    `is_here` tells whether more of it has come that nobody has read yet, as after a time in which the process stood
    still; then the client is not too slow.
    """
    patience_s = limits.seconds_for(limits.max_bytes if declared is None else declared)
    slot = exchange.reserve(_FIRST_SLOT_BYTES if declared is None else declared)
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    try:
        async with asyncio.timeout(None) as limit:

            def look() -> None:
                nonlocal timer
                if is_here():
                    timer = loop.call_later(LOOK_AGAIN_S, look)
                else:
                    limit.reschedule(loop.time())

            timer = loop.call_later(patience_s, look)
            try:
                return await _fill(receive, exchange, slot, limits)
            finally:
                timer.cancel()
    except TimeoutError as error:
        raise RequestTimeout(f"the body did not arrive within {patience_s:.0f} s; send it faster") from error


async def _fill(receive: Receive, exchange: Exchange, slot: Slot, limits: BodyLimits) -> Body:
    filled = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        end = filled + len(chunk)
        if end > limits.max_bytes:
            raise too_large(end, limits)
        if end > len(slot.view):
            slot = grow(exchange, slot, filled, end, limits)
        slot.view[filled:end] = chunk
        filled = end
        if not message.get("more_body", False):
            return Body(slot, filled)


def grow(exchange: Exchange, slot: Slot, filled: int, needed: int, limits: BodyLimits) -> Slot:
    """A slot of twice the size, or of what is needed, with the same first bytes. Raises Overloaded."""
    larger = exchange.reserve(min(limits.max_bytes, max(needed, 2 * len(slot.view))))
    larger.view[:filled] = slot.view[:filled]
    exchange.release(slot)
    return larger


def too_large(nbytes: int, limits: BodyLimits) -> BodyTooLarge:
    """The error for a body of so many bytes."""
    return BodyTooLarge(
        f"the body of {nbytes} bytes exceeds the maximum allowed input size of {limits.max_bytes} bytes; "
        "use --max-body-mb to increase the limit"
    )
