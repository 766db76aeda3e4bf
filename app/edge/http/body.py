"""A request's body, read into the slab.

The slot is reserved before the first byte is read, from the declared length where there is one, so bytes
in flight are admitted and never only counted. A body without a declared length starts small and grows
where it lies, or moves to a slot of twice the size. A client that sends too slowly is given up on.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from starlette.types import Receive

from convoy.app.edge.oip.call import Call, ClientGone
from convoy.app.edge.options import BodyLimits
from convoy.app.scheduling.slab import Slot
from convoy.app.submission.refusals import no_room
from convoy.models.errors import BodyTooLarge, InvalidRequest, Overloaded, RequestTimeout

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


class BodyReader:
    """A body on its way into the slab, piece by piece; `declared` bytes, None: nobody has said how many.

    Raises Overloaded where there is no room for it.
    """

    __slots__ = ("_call", "_declared", "_limits", "_slot", "filled_bytes")

    def __init__(self, call: Call, declared: int | None, limits: BodyLimits) -> None:
        self._call, self._limits, self._declared, self.filled_bytes = call, limits, declared or 0, 0
        self._slot = call.reserve(_FIRST_SLOT_BYTES if declared is None else declared)

    @property
    def patience_s(self) -> float:
        """So long after its beginning there must be more of it: what is only announced earns no time."""
        return self._limits.seconds_for(self.filled_bytes)

    @property
    def awaited_bytes(self) -> int:
        """Of those that are declared."""
        return max(0, self._declared - self.filled_bytes)

    def feed(self, piece: bytes) -> None:
        """The next piece. Raises BodyTooLarge or Overloaded."""
        end = self.filled_bytes + len(piece)
        if end > len(self._slot.view):
            if end > self._limits.max_bytes:
                raise too_large(end, self._limits)
            self._slot = grow(self._call, self._slot, self.filled_bytes, end, self._limits)
        self._slot.view[self.filled_bytes : end] = piece
        self.filled_bytes = end

    def body(self) -> Body:
        """All that has come; the room that it did not need is given back."""
        self._call.core.slab.trim(self._slot, self.filled_bytes)
        return Body(self._slot, self.filled_bytes)

    def too_slow(self) -> RequestTimeout:
        return too_slow(self.patience_s)


async def read_body(receive: Receive, reader: BodyReader) -> Body:
    """Read to the end. Raises BodyTooLarge, Overloaded, RequestTimeout or ClientGone."""
    begun_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(begun_s + reader.patience_s) as limit:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                reader.feed(message.get("body", b""))
                if not message.get("more_body", False):
                    return reader.body()
                limit.reschedule(begun_s + reader.patience_s)
    except TimeoutError as error:
        raise reader.too_slow() from error


def grow(call: Call, slot: Slot, filled: int, needed: int, limits: BodyLimits) -> Slot:
    """A slot of up to twice the size, and at least of what is needed, with the same first bytes. Raises Overloaded.

    It stays where it is if there is room behind it; else for a moment the body needs room twice.
    """
    twice = wanted = min(limits.max_bytes, max(needed, 2 * len(slot.view)))
    while not call.core.slab.extend(slot, wanted):
        if wanted == needed:
            break
        wanted = needed + (wanted - needed) // 2  # a byte at a time would take for ever
    else:
        return slot
    try:
        larger = reserve_up_to(call, twice, needed)
    except BodyTooLarge:
        if not call.may_ever_hold(needed - slot.extent_bytes):
            raise
        raise no_room(
            needed, call.core.slab
        ) from None  # it would fit where it lies, but for what others have there now
    larger.view[:filled] = slot.view[:filled]
    call.release(slot)
    return larger


def reserve_up_to(call: Call, wanted: int, needed: int) -> Slot:
    """A slot of the bytes that are wanted, or at least of those that are needed. Raises Overloaded."""
    try:
        return call.reserve(wanted)
    except (Overloaded, BodyTooLarge):
        return call.reserve(needed)


def too_slow(patience_s: float) -> RequestTimeout:
    """The error for a body of which nothing more came for so long after its beginning."""
    return RequestTimeout(f"the body did not arrive within {patience_s:.0f} s; send it faster")


def too_large(nbytes: int, limits: BodyLimits) -> BodyTooLarge:
    """The error for a body of so many bytes."""
    return BodyTooLarge(
        f"the body of {nbytes} bytes exceeds the maximum allowed input size of {limits.max_bytes} bytes; "
        "use --max-body-mb to increase the limit"
    )
