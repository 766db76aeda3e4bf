"""Compressed bodies, both ways: gzip, and deflate, which in HTTP is zlib's format.

A request is inflated into the slab in a thread, a piece at a time, and stops at the size that a body may
have, whatever it would grow to. An answer is compressed only for a client that asks for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

from convoy.app.calls.call import Call
from convoy.app.calls.options import BodyLimits
from convoy.app.calls.refusals import no_room
from convoy.app.http.body import too_large
from convoy.app.http.replies import Reply
from convoy.app.pictures.decoder import Decoder, DecodeWork
from convoy.app.scheduling.slab import Slot
from convoy.models.errors import BodyTooLarge, InvalidRequest, Overloaded, UnsupportedCompression

_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
_KNOWN_AS = {"gzip": "gzip", "deflate": "deflate, which in HTTP is zlib's format"}
_READ_BYTES = 64 << 10
_PIECE_BYTES = 256 << 10


def request_encoding(headers: Mapping[bytes, bytes]) -> bytes | None:
    """How the request's body is compressed, None for not at all. Raises UnsupportedCompression."""
    named = headers.get(b"content-encoding", b"identity")
    encoding = named.strip().lower()
    if encoding == b"identity":
        return None
    if encoding not in _WINDOW_BITS:
        raise UnsupportedCompression(
            f"Unsupported compression type {named[:40].decode('latin-1')!r}; use gzip or deflate, or send it as it is"
        )
    return encoding


async def inflate(body: Slot, encoding: bytes, call: Call, decoder: Decoder, limits: BodyLimits) -> Slot:
    """The body as it was before it was compressed. Raises InvalidRequest, BodyTooLarge or Overloaded."""
    inflater = _Inflater(body.view, encoding)
    # Most tensors shrink less than this; a better guess would only save copies.
    guessed = min(limits.max_bytes, max(_READ_BYTES, 4 * body.view.nbytes))
    slot = _reserve_up_to(call, guessed, min(limits.max_bytes, max(_READ_BYTES, body.view.nbytes)))
    filled = 0
    while True:
        work = DecodeWork("inflate", len(slot.view), (body, slot))
        filled = (await decoder.run(call, work, inflater.fill, slot.view, filled)).result
        if inflater.is_finished:
            call.release(body)
            slot.view = slot.view[:filled]
            return slot
        if filled >= limits.max_bytes:
            raise too_large(filled + 1, limits)
        slot = _grow(call, slot, filled, filled + 1, limits)


def _grow(call: Call, slot: Slot, filled: int, needed: int, limits: BodyLimits) -> Slot:
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
        larger = _reserve_up_to(call, twice, needed)
    except BodyTooLarge:
        if not call.may_ever_hold(needed - slot.extent_bytes):
            raise
        raise no_room(
            needed, call.core.slab
        ) from None  # it would fit where it lies, but for what others have there now
    larger.view[:filled] = slot.view[:filled]
    call.release(slot)
    return larger


def _reserve_up_to(call: Call, wanted: int, needed: int) -> Slot:
    """A slot of the bytes that are wanted, or at least of those that are needed. Raises Overloaded."""
    try:
        return call.reserve(wanted)
    except (Overloaded, BodyTooLarge):
        return call.reserve(needed)


class _Inflater:
    """Takes compressed bytes and gives plain ones, as many at a time as there is room for."""

    def __init__(self, data: memoryview, encoding: bytes) -> None:
        self._data, self._read = data, 0
        self._name = encoding.decode()
        self._stream = zlib.decompressobj(_WINDOW_BITS[encoding])
        self._input = b""
        self._carried = b""  # one byte that did not fit; it tells a full body from a finished one

    @property
    def is_finished(self) -> bool:
        return self._stream.eof and not self._carried

    def fill(self, view: memoryview, start: int) -> int:
        """Write on from `start` until the view is full or the body ends; where that is. Raises InvalidRequest."""
        end = start + len(self._carried)
        view[start:end] = self._carried
        self._carried = b""
        while end < len(view) and not self._stream.eof:
            piece = self._next(min(_PIECE_BYTES, len(view) - end))
            view[end : end + len(piece)] = piece
            end += len(piece)
        if not self._stream.eof:
            self._carried = self._next(1)
        if self._stream.eof and (self._stream.unused_data or self._read < len(self._data)):
            raise InvalidRequest(f"there is more behind the end of the {self._name} body; send one stream")
        return end

    def _next(self, most: int) -> bytes:
        """At least one byte, unless the stream ends here."""
        while not self._stream.eof:
            if not self._input:
                self._input = bytes(self._data[self._read : self._read + _READ_BYTES])
                self._read += len(self._input)
            is_last = not self._input
            try:
                piece = self._stream.decompress(self._input, most)
            except zlib.error as error:
                raise InvalidRequest(f"the body is not {_KNOWN_AS[self._name]}: {error}") from error
            self._input = self._stream.unconsumed_tail
            if piece:
                return piece
            if is_last and not self._stream.eof:
                raise InvalidRequest(f"the {self._name} body is cut off")
        return b""


def response_encoding(accepted: bytes) -> bytes | None:
    """The compression that an Accept-Encoding header prefers to none; None for none.

    The highest q wins; among equals the one that comes first. A header that says nothing of identity takes
    it as the last resort.
    """
    best, best_q, identity_q = None, 0.0, 0.0
    for entry in accepted.lower().split(b","):
        name, _, parameter = entry.partition(b";")
        name, q = name.strip(), quality(parameter)
        if name == b"identity":
            identity_q = q
        elif name in _WINDOW_BITS and q > best_q:
            best, best_q = name, q
    return best if best_q >= identity_q else None


def reply_encoding(headers: Mapping[bytes, bytes], reply: Reply) -> bytes | None:
    """How to compress the reply to a request with these headers; None for not at all."""
    accepted = headers.get(b"accept-encoding")
    # A shorter reply costs more to compress than to send: it is less than a packet.
    if accepted is None or reply.status != 200 or reply.length < 1024 or reply.content_type == "image/png":
        return None
    return response_encoding(accepted)


def compress(reply: Reply, encoding: bytes) -> Reply:
    """The same reply with a compressed body, or as it is where that would not be smaller."""
    # The fastest level is what a server can afford.
    stream = zlib.compressobj(1, wbits=_WINDOW_BITS[encoding])
    pieces = (*(stream.compress(piece) for piece in reply.pieces), stream.flush())
    body = b"".join(pieces)
    if len(body) >= sum(len(piece) for piece in reply.pieces):
        return reply
    return replace(reply, pieces=(body,), headers=(*reply.headers, (b"content-encoding", encoding)))


def quality(parameter: bytes) -> float:
    """How much an encoding or a type is wanted, from 0 to 1; 0 for a weight that cannot be read."""
    name, _, value = parameter.partition(b"=")
    if not name.strip():
        return 1.0
    try:
        q = float(value)
    except ValueError:
        return 0.0
    return q if name.strip() == b"q" and 0 <= q <= 1 else 0.0
