"""HTTP replies: how a body is sent, an error is written, and a reply is compressed.

A reply is compressed only for a client that asks for it, with gzip or deflate, which in HTTP is zlib's format.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import orjson
from starlette.responses import Response
from starlette.types import Send

from convoy.app.telemetry.outcomes import ANSWERED, CallEnd, ending_of
from convoy.models.errors import MethodNotAllowed, RequestError, Unauthorized, UnsupportedCompression

# zlib's window bits for each compression.
WINDOW_BITS = {b"gzip": 31, b"deflate": 15}


@dataclass(slots=True, eq=False)
class Reply:
    """A status, a body in pieces, additional headers, and the outcome of a call with this reply."""

    status: int
    pieces: tuple[bytes | memoryview, ...]
    content_type: str = "application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    ending: CallEnd = ANSWERED

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return sum(map(len, self.pieces))


async def send_reply(send: Send, reply: Reply, on_copied: Callable[[], None] = lambda: None) -> None:
    """Send the whole reply. Return when the client has read it, apart from what the transport still buffers.

    The pieces may be views: each is copied. `on_copied` is called when a long reply is copied and not sent yet.
    """
    length = reply.length
    headers = [(b"content-type", reply.content_type.encode()), (b"content-length", b"%d" % length), *reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    # Small pieces are cheaper to join than to send one by one.
    if length <= 64 << 10:
        await send({"type": "http.response.body", "body": b"".join(reply.pieces)})
        return
    for piece in reply.pieces:
        await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
    on_copied()
    # A server waits for its client before it takes another chunk, not after one.
    await send({"type": "http.response.body", "body": b""})


def error_reply(error: RequestError) -> Reply:
    """`{"error": ..., "code": ...}` with the error's status and headers."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_after_s is not None:
        headers = ((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()),)
    if isinstance(error, UnsupportedCompression):
        headers = ((b"accept-encoding", b"gzip, deflate"),)
    if isinstance(error, Unauthorized):
        headers = ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, MethodNotAllowed):
        headers = ((b"allow", error.allow.encode()),)
    return Reply(error.http_status, (error_body(error),), headers=headers, ending=ending_of(error))


def error_body(error: RequestError) -> bytes:
    # A message may contain the client's bytes, which need not be text.
    return orjson.dumps({"error": str(error).encode("utf-8", "replace").decode(), "code": error.code})


def json_response(document: object) -> Response:
    """A document for Starlette, from the routes that do not infer."""
    return Response(orjson.dumps(document), media_type="application/json")


def reply_encoding(headers: Mapping[bytes, bytes], reply: Reply) -> bytes | None:
    """How to compress the reply to a request with these headers; None for not at all.

    The highest q of Accept-Encoding wins; among equals, the first. A header that does not mention identity accepts it
    as the last resort.
    """
    accepted = headers.get(b"accept-encoding")
    # A shorter reply costs more to compress than to send: it is less than a packet.
    if accepted is None or reply.status != 200 or reply.length < 1024 or reply.content_type == "image/png":
        return None
    best, best_q, identity_q = None, 0.0, 0.0
    for entry in accepted.lower().split(b","):
        name, _, parameter = entry.partition(b";")
        name, q = name.strip(), quality(parameter)
        if name == b"identity":
            identity_q = q
        elif name in WINDOW_BITS and q > best_q:
            best, best_q = name, q
    return best if best_q >= identity_q else None


def compress(reply: Reply, encoding: bytes) -> Reply:
    """The reply with a compressed body, or unchanged if that would not be smaller."""
    # The fastest level is what a server can afford.
    stream = zlib.compressobj(1, wbits=WINDOW_BITS[encoding])
    pieces = (*(stream.compress(piece) for piece in reply.pieces), stream.flush())
    body = b"".join(pieces)
    if len(body) >= sum(len(piece) for piece in reply.pieces):
        return reply
    return replace(reply, pieces=(body,), headers=(*reply.headers, (b"content-encoding", encoding)))


def quality(parameter: bytes) -> float:
    """The weight of an encoding or a type, from 0 to 1; 0 if it cannot be parsed."""
    name, _, value = parameter.partition(b"=")
    if not name.strip():
        return 1.0
    try:
        q = float(value)
    except ValueError:
        return 0.0
    return q if name.strip() == b"q" and 0 <= q <= 1 else 0.0
