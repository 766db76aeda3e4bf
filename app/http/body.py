"""Read a request's body into the slab and inflate it there.

A body counts as its bytes arrive, so an announced body takes no memory from others. Uploads in progress leave a part of
the memory to small and complete requests. If there is no memory, reading stops until there is, and the client gets a
429 if that takes too long. A client that sends too slowly gets a 408. A compressed body is inflated in a thread, piece
by piece, up to the size limit of bodies.
"""

from __future__ import annotations

import asyncio
import mmap
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import TypeVar

from starlette.types import Receive

from convoy.app.calls.access import BodyLimits
from convoy.app.calls.call import Call
from convoy.app.calls.refusals import no_room
from convoy.app.http.replies import WINDOW_BITS
from convoy.app.pictures.decoder import Decoder, DecodeWork
from convoy.app.scheduling.request import SECOND_NS
from convoy.app.scheduling.slab import Slab, Slot
from convoy.app.telemetry.outcomes import ClientGone
from convoy.models.errors import BodyTooLarge, InvalidRequest, Overloaded, RequestTimeout, UnsupportedCompression

Result = TypeVar("Result")
_SMALL_BYTES = 64 << 10
# Announced bodies may together exceed the memory; only what has arrived takes some.
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
# Whole pages.
_COPIED_AT_ONCE_BYTES = 1 << 20
# A compressed body is inflated in pieces that double in size: small bodies take little memory, long ones few steps.
_FIRST_PIECE_BYTES, _MOST_PIECE_BYTES = 256 << 10, 8 << 20


def declared_length(headers: Mapping[bytes, bytes]) -> int:
    """Content-Length; 0 for a chunked body. Raises InvalidRequest."""
    raw = headers.get(b"content-length", b"0")
    if not raw.isdigit() or len(raw) > 18:
        raise InvalidRequest(f"Content-Length must be a whole number of bytes, got {raw[:40].decode('latin-1')!r}")
    return int(raw)


class UploadRoom:
    """Shares a slab's memory among bodies that are still arriving. Used on one event loop.

    They are in their own memory, which the slab counts. Bodies above `_SMALL_BYTES`, except the oldest, leave a part
    free, so uploads never all wait for each other.
    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._uploads: dict[BodyReader, int] = {}  # above _SMALL_BYTES, the oldest first
        self._uploads_bytes = 0  # of all of them
        self._waiting: dict[asyncio.Future[None], None] = {}  # the one that has waited longest first
        self._is_waking = False

    def take(self, upload: BodyReader, held: int, more: int) -> bool:
        """Count `more` bytes of an upload. Returns False and counts nothing if there is no room now."""
        if held + more > _SMALL_BYTES:
            if upload not in self._uploads:
                self._uploads[upload] = held
                self._uploads_bytes += held
            is_oldest = next(iter(self._uploads)) is upload
            # The other half is for small and complete requests, and for the oldest upload, which never waits for the
            # others if its body fits into that half.
            if not is_oldest and self._uploads_bytes + more > self._slab.capacity_bytes // 2:
                return False
        if not self._slab.count_outside(more):
            return False
        if upload in self._uploads:
            self._uploads[upload] += more
            self._uploads_bytes += more
        return True

    def leave(self, upload: BodyReader, held: int) -> None:
        """Stop counting an upload that has failed or is in the slab, and wake those that wait."""
        self._uploads_bytes -= self._uploads.pop(upload, 0)
        self._slab.count_outside(-held)
        self._wake_soon()

    async def wait(self) -> None:
        """Return when there may be more room."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        self._slab.on_freed = self._wake_soon
        try:
            await future
        finally:
            self._waiting.pop(future, None)
            if not self._waiting:
                self._slab.on_freed = None

    def _wake_soon(self) -> None:
        if self._waiting and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        # The others keep their place behind them.
        for future in [*islice(self._waiting, 16)]:
            del self._waiting[future]
            if not future.done():
                future.set_result(None)


class BodyReader:
    """Reads a body of `declared` bytes into the slab; 0 for a chunked one."""

    def __init__(self, call: Call, declared: int, limits: BodyLimits, room: UploadRoom) -> None:
        """Raises BodyTooLarge."""
        self._call, self._declared, self._limits, self._room = call, declared, limits, room
        self._small = b""
        self._large: mmap.mmap | None = None  # above _SMALL_BYTES, memory is taken only for what has arrived
        self._held_bytes = 0
        self._stalled_ns = 0  # the time spent waiting for memory, which does not count against the client
        self._check_size(self._declared)

    async def read(self, receive: Receive) -> Slot:
        """Read to the end. Raises BodyTooLarge, Overloaded, RequestTimeout or ClientGone."""
        call, begun_ns = self._call, time.monotonic_ns()
        call.slow = self._too_slow
        try:
            while True:
                patience_s = self._limits.seconds_for(self._held_bytes)
                call.body_due_ns = begun_ns + self._stalled_ns + int(patience_s * SECOND_NS)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece, is_last = message.get("body", b""), not message.get("more_body", False)
                if self._held_bytes + len(piece) > self._declared:
                    self._check_size(self._held_bytes + len(piece))
                if is_last and not self._held_bytes:
                    return await self._attempted(partial(self._store, piece))
                await self._attempted(partial(self._add, piece))
                if is_last:
                    return await self._attempted(self._stored)
        finally:
            call.body_due_ns = None
            self._room.leave(self, self._held_bytes)

    async def inflate(self, body: Slot, encoding: bytes, decoder: Decoder) -> Slot:
        """Decompress the body that was read.

        Raises InvalidRequest, BodyTooLarge or Overloaded.
        """
        inflater, self._declared, since_ns = Inflater(body.view, encoding), 0, time.monotonic_ns()
        piece_bytes = _FIRST_PIECE_BYTES
        try:
            while not inflater.is_finished:
                # Each piece keeps the place of the first one, so that a busy decoder does not starve a long body.
                work = DecodeWork("inflate", min(piece_bytes, 4 * body.view.nbytes), (body,), since_ns=since_ns)
                most = min(piece_bytes, self._limits.max_bytes + 1 - self._held_bytes)
                piece = (await decoder.run(self._call, work, inflater.next, most)).result
                self._check_size(self._held_bytes + len(piece))
                await self._attempted(partial(self._add, piece))
                piece_bytes = min(2 * piece_bytes, _MOST_PIECE_BYTES)
            self._call.release(body)
            return await self._attempted(self._stored)
        finally:
            self._call.body_due_ns = None
            self._room.leave(self, self._held_bytes)

    def _add(self, piece: bytes) -> bool:
        if not self._room.take(self, self._held_bytes, len(piece)):
            return False
        end = self._held_bytes + len(piece)
        if self._large is None and max(end, self._declared) <= _SMALL_BYTES:
            self._small += piece
        else:
            if self._large is None:
                self._large = mmap.mmap(-1, max(end, self._declared or self._limits.max_bytes), flags=_PRIVATE)
                self._large[: self._held_bytes] = self._small
                self._small = b""
            self._large[self._held_bytes : end] = piece
        self._held_bytes = end
        return True

    def _store(self, whole: bytes) -> Slot | None:
        """Put the body into a slot if it came in one piece; None if there is no room now."""
        try:
            slot = self._call.reserve(len(whole))
        except Overloaded:
            return None
        slot.view[:] = whole
        return slot

    def _stored(self) -> Slot | None:
        """Put the body into a slot; None if there is no room now."""
        slab, nbytes = self._call.core.slab, self._held_bytes
        slab.count_outside(-nbytes)
        try:
            slot = self._call.reserve(nbytes)
        except Overloaded:
            slab.count_outside(nbytes)
            return None
        self._held_bytes = 0
        if self._large is None:
            slot.view[:], self._small = self._small, b""
            return slot
        for start in range(0, nbytes, _COPIED_AT_ONCE_BYTES):  # so that no byte is held twice
            end = min(nbytes, start + _COPIED_AT_ONCE_BYTES)
            slot.view[start:end] = self._large[start:end]
            self._large.madvise(mmap.MADV_DONTNEED, start, end - start)
        self._large.close()
        self._large = None
        return slot

    async def _attempted(self, attempt: Callable[[], Result | None]) -> Result:
        """Return what the attempt gives, now or when there is room.

        The client gets a 429 if that takes too long, or if its deadline passes meanwhile.
        """
        if result := attempt():
            return result
        call, began_ns = self._call, time.monotonic_ns()
        late, slow = call.late, call.slow
        call.late = call.slow = self._no_room
        call.body_due_ns = began_ns + int(self._limits.grace_s * SECOND_NS)
        while not (result := attempt()):
            await self._room.wait()
        call.late, call.slow, call.body_due_ns = late, slow, None
        self._stalled_ns += time.monotonic_ns() - began_ns
        return result

    def _check_size(self, nbytes: int) -> None:
        """Raise BodyTooLarge for a body above the limit, or larger than the slab."""
        if nbytes > self._limits.max_bytes:
            raise BodyTooLarge(
                f"the body of {nbytes} bytes exceeds the maximum allowed input size of {self._limits.max_bytes} bytes; "
                "use --max-body-mb to increase the limit"
            )
        if not self._call.may_ever_hold(nbytes):
            self._call.reserve(nbytes)  # raises with the reason

    def _no_room(self) -> Overloaded:
        return no_room(max(self._held_bytes, self._declared), self._call.core.slab)

    def _too_slow(self) -> RequestTimeout:
        return too_slow(self._limits.seconds_for(self._held_bytes))


def too_slow(patience_s: float) -> RequestTimeout:
    """The error for a body that is not complete within `patience_s`."""
    return RequestTimeout(f"the body did not arrive within {patience_s:.0f} s; send it faster")


_KNOWN_AS = {"gzip": "gzip", "deflate": "deflate, which in HTTP is zlib's format"}


def request_encoding(headers: Mapping[bytes, bytes]) -> bytes | None:
    """How the request's body is compressed; None if it is not. Raises UnsupportedCompression."""
    named = headers.get(b"content-encoding", b"identity")
    encoding = named.strip().lower()
    if encoding == b"identity":
        return None
    if encoding not in WINDOW_BITS:
        raise UnsupportedCompression(
            f"Unsupported compression type {named[:40].decode('latin-1')!r}; use gzip or deflate, or send it as it is"
        )
    return encoding


class Inflater:
    """Takes compressed bytes and returns plain ones, piece by piece."""

    def __init__(self, data: memoryview, encoding: bytes) -> None:
        self._data, self._read = data, 0
        self._name = encoding.decode()
        self._stream = zlib.decompressobj(WINDOW_BITS[encoding])
        self._input = b""

    @property
    def is_finished(self) -> bool:
        return self._stream.eof

    def next(self, most: int) -> bytes:
        """Up to `most` more bytes; fewer only at the end. Any thread may call it. Raises InvalidRequest."""
        plain = bytearray()
        while len(plain) < most and not self._stream.eof:
            if not self._input:
                self._input = bytes(self._data[self._read : self._read + _SMALL_BYTES])
                self._read += len(self._input)
            is_last = not self._input
            try:
                piece = self._stream.decompress(self._input, most - len(plain))
            except zlib.error as error:
                raise InvalidRequest(f"the body is not {_KNOWN_AS[self._name]}: {error}") from error
            self._input = self._stream.unconsumed_tail
            plain += piece
            if is_last and not piece and not self._stream.eof:
                raise InvalidRequest(f"the {self._name} body is cut off")
        if self._stream.eof and (self._stream.unused_data or self._read < len(self._data)):
            raise InvalidRequest(f"there is more behind the end of the {self._name} body; send one stream")
        return bytes(plain)
