"""What goes back over HTTP: one way to send a body, one way to say that something is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from starlette.responses import Response
from starlette.types import Send

from convoy.app.telemetry.outcomes import ANSWERED, FAILED, CallEnd, ending_of
from convoy.models.errors import RequestError, UnsupportedCompression

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True, eq=False)
class Reply:
    """A status, a body in pieces, headers beside type and length, and how a call ends that is answered so."""

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
    """`{"error": ...}` with the error's own status, and when to try again."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_after_s is not None:
        headers = ((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()),)
    if isinstance(error, UnsupportedCompression):
        headers = ((b"accept-encoding", b"gzip, deflate"),)
    return Reply(error.http_status, (error_body(str(error)),), headers=headers, ending=ending_of(error))


def internal_error(own_id: bytes) -> Reply:
    """The answer to an unexpected error in the request of this id."""
    return Reply(500, (error_body(f"internal error; the log has it under request {own_id.decode()}"),), ending=FAILED)


def error_body(message: str) -> bytes:
    # A client's own bytes may stand in the message, and they need not be text.
    return orjson.dumps({"error": message.encode("utf-8", "replace").decode()})


def json_response(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A document for Starlette, from the routes that do not infer."""
    return Response(orjson.dumps(document), status, headers, "application/json")


def as_response(reply: Reply) -> Response:
    """The reply for Starlette, which wants a response object of its own."""
    headers = {name.decode(): value.decode() for name, value in reply.headers}
    return Response(b"".join(reply.pieces), reply.status, headers, reply.content_type)
