"""What goes back over HTTP: one way to send a body, one way to say that something is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus

import orjson
from starlette.responses import Response
from starlette.types import Send

from convoy.app.outcomes import ANSWERED, FAILED, CallEnd, ending_of
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


def headers_of(reply: Reply) -> Headers:
    """All that the reply itself has to say."""
    return [*_form(reply.content_type, reply.length), *reply.headers]


def _form(content_type: str, length: int) -> Headers:
    return [(b"content-type", content_type.encode()), (b"content-length", b"%d" % length)]


_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus if status >= 200
}


def answer_head(reply: Reply) -> bytes:
    """The status line, type and length as they go over the wire; its other headers are left out."""
    return _answer_head(reply.status, reply.content_type, reply.length)


@lru_cache(1024)
def _answer_head(status: int, content_type: str, length: int) -> bytes:
    return b"".join((_STATUS_LINES[status], *lines_of(_form(content_type, length))))


def lines_of(headers: Headers) -> list[bytes]:
    """Headers as they go over the wire. Checks nothing."""
    return [b"%b: %b\r\n" % header for header in headers]


# Small pieces are cheaper to join than to send one by one.
_JOIN_BELOW_BYTES = 64 << 10


async def send_reply(send: Send, reply: Reply) -> None:
    """Send the whole reply. The pieces may be views: they are out of our hands when this returns."""
    await send({"type": "http.response.start", "status": reply.status, "headers": headers_of(reply)})
    bodies = reply.pieces if reply.length > _JOIN_BELOW_BYTES else (b"".join(reply.pieces),)
    last = len(bodies) - 1
    for index, body in enumerate(bodies):
        # The transport may keep what it is given; a slot is reused as soon as its call ends.
        await send({"type": "http.response.body", "body": bytes(body), "more_body": index < last})


def error_reply(error: RequestError) -> Reply:
    """`{"error": ...}` with the error's own status, and when to try again."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_after_s is not None:
        headers = ((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()),)
    if isinstance(error, UnsupportedCompression):
        headers = ((b"accept-encoding", b"gzip, deflate"),)
    return Reply(error.http_status, (error_body(str(error)),), headers=headers, ending=ending_of(error))


def internal_error(own_id: bytes) -> Reply:
    """For whatever nobody foresaw in the request of this id."""
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
