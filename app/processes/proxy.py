"""Leads a request to the core's application, and its answer back, whole and as it comes.

For the routes that are not worth an edge's own: metrics, metadata, health, documentation. Without a core it
says so. The gate in front has checked the key, made the request's id and will log the answer; the core's own
gate checks the key again, because the headers are passed on as they are.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

import h11
import orjson
from starlette.types import Receive, Scope, Send

from convoy.app.edge.http.hot_routes import protocol_of
from convoy.app.edge.http.page import page_reply
from convoy.app.edge.http.replies import Headers, Reply, error_reply, send_reply
from convoy.app.edge.oip.call import Call
from convoy.app.host.logs import request_id
from convoy.app.outcomes import Refusal
from convoy.app.processes.remote_core import CORE_IS_AWAY, RemoteCore
from convoy.models.errors import Unavailable

_log = logging.getLogger("convoy")
_CHUNK_BYTES = 64 << 10
# Of one connection and not of the request; and those that the gate here adds to every answer.
_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"expect", b"te", b"trailer"})
_GATES = frozenset({b"x-request-id", b"traceparent"})


class Proxy:
    """A bare ASGI application in front of the one that listens at `address`."""

    def __init__(self, core: RemoteCore, address: Path) -> None:
        self._core, self._address = core, str(address)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._core.is_present:
            await self._answer_alone(scope, send)
            return
        try:
            reader, writer = await asyncio.open_unix_connection(self._address)
        except OSError:
            await self._answer_alone(scope, send)
            return
        upstream = _Upstream(reader, writer, scope["method"])
        pump = asyncio.ensure_future(_send_request(upstream, scope, receive))
        try:
            if not await _send_answer(upstream, send):
                await self._answer_alone(scope, send)
        finally:
            pump.cancel()
            writer.transport.abort()

    async def _answer_alone(self, scope: Scope, send: Send) -> None:
        """The process runs, and that is all that can be said; the page says it to people.

        A call that a core never heard of is counted here.
        """
        if scope["method"] in ("GET", "HEAD") and scope["path"] == "/":
            await send_reply(send, page_reply())
            return
        if scope["path"] == "/v2/health/live":
            await send_reply(send, Reply(200, (orjson.dumps({"live": True}),)))
            return
        reply = error_reply(Unavailable(CORE_IS_AWAY, reason=Refusal.CORE_AWAY))
        if (protocol := protocol_of(scope)) is not None:
            Call(self._core, protocol).end(reply.ending)
        await send_reply(send, reply)


class _Upstream:
    """One connection to the core, for one request.

    The request is written as it came, because the core is to judge it and not a library on the way to it; h11 reads
    the answer, and hears of the request what it needs for that.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self._http.send(h11.Request(method=method, target="/", headers=[("host", "convoy")]))
        self.is_abandoned = False  # the client has gone before its request was whole

    async def send(self, *pieces: bytes) -> None:
        self._writer.writelines(pieces)
        await self._writer.drain()

    def abandon(self) -> None:
        self.is_abandoned = True
        self._writer.transport.abort()

    async def next_event(self) -> h11.Response | h11.Data | h11.EndOfMessage:
        """What the core says next. Raises OSError or h11's ProtocolError where it breaks off."""
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_CHUNK_BYTES))
            elif isinstance(event, h11.Response | h11.Data | h11.EndOfMessage):
                return event
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError("the core ended the connection")


async def _send_request(upstream: _Upstream, scope: Scope, receive: Receive) -> None:
    """To its end, or until the core has answered without it."""
    is_chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    with suppress(OSError):
        await upstream.send(_head(scope, is_chunked=is_chunked))
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                upstream.abandon()
                return
            if body := message.get("body"):
                await upstream.send(*((b"%x\r\n" % len(body), body, b"\r\n") if is_chunked else (body,)))
            if not message.get("more_body", False):
                if is_chunked:
                    await upstream.send(b"0\r\n\r\n")
                return


def _head(scope: Scope, *, is_chunked: bool) -> bytes:
    left_out = _HOP | _GATES | ({b"content-length"} if is_chunked else set())
    headers: Headers = [(name, value) for name, value in scope["headers"] if name not in left_out]
    # No `connection: close`: the core would close on what it has not read, and with that on its own answer.
    headers.append((b"x-request-id", request_id.get().encode()))
    headers += [(name, value) for name, value in scope["headers"] if name == b"traceparent"]
    if not any(name == b"host" for name, _ in headers):
        headers.append((b"host", b"convoy"))  # HTTP/1.0 clients send none
    if is_chunked:
        headers.append((b"transfer-encoding", b"chunked"))
    query: bytes = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    lines = [b"%b %b HTTP/1.1\r\n" % (scope["method"].encode(), target)]
    lines += [b"%b: %b\r\n" % (name, value) for name, value in headers]
    return b"".join((*lines, b"\r\n"))


async def _send_answer(upstream: _Upstream, send: Send) -> bool:
    """Whether somebody has an answer, or nobody is there to have one."""
    has_begun = False
    try:
        while True:
            match await upstream.next_event():
                case h11.Response() as response:
                    kept = [(name, value) for name, value in response.headers if name not in _HOP | _GATES]
                    await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
                    has_begun = True
                case h11.Data() as data:
                    await send({"type": "http.response.body", "body": bytes(data.data), "more_body": True})
                case _:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return True
    except (OSError, h11.ProtocolError) as error:
        if has_begun:
            _log.warning("an answer of the core broke off: %s", error)
        return has_begun or upstream.is_abandoned
