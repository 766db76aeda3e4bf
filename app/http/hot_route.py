"""The routes that infer, as raw ASGI callables: find the model, read the body, answer, count how it ended."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, NamedTuple
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from convoy.app.calls.call import CALL_IN_SCOPE, Call
from convoy.app.calls.options import ServeOptions
from convoy.app.core import Core
from convoy.app.http.body import BodyReader, UploadRoom, declared_length
from convoy.app.http.compression import compress, inflate, reply_encoding, request_encoding
from convoy.app.http.replies import Reply, error_reply, send_reply
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.decoder import Decoder
from convoy.app.pictures.predictor import check_timeout_ms
from convoy.app.scheduling.slab import Slot
from convoy.app.telemetry.outcomes import FAILED, ClientGone, ending_of
from convoy.app.telemetry.tracing import Tracing
from convoy.models.errors import RequestError

_log = logging.getLogger("convoy")
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class HttpHead(NamedTuple):
    """What a request says before its body."""

    headers: dict[bytes, bytes]
    query: Mapping[str, str]


def parsed_query(raw: bytes) -> Mapping[str, str]:
    """What a target says behind its `?`: of each name the last value."""
    return dict(parse_qsl(raw.decode("latin-1"), keep_blank_values=True)) if raw else {}


class HotRoute(ABC):
    """Subclasses turn a body into a reply; everything around that is here."""

    protocol: ClassVar[str]
    paths: ClassVar[tuple[str, ...]]  # without a version, and with one

    def __init__(self, core: Core, options: ServeOptions, decoder: Decoder, room: UploadRoom) -> None:
        self.core, self.options, self.decoder, self._room = core, options, decoder, room

    @abstractmethod
    async def answer(self, call: Call, head: HttpHead, served: Served, body: Slot) -> Reply:
        """The reply to a body that has been read. Raises RequestError or ClientGone."""

    def admit(self, served: Served) -> None:  # noqa: B027 - most routes take every model
        """Refuse a model that this route cannot serve, before the body is read. Raises RequestError."""

    def _trace(self, tracing: Tracing, call: Call, path: str, head: HttpHead, names: Mapping[str, str]) -> None:
        """Give the call a span, if it is sampled. A failure here never fails the call."""
        try:
            headers = head.headers
            parent = {name.decode(): headers[name].decode("latin-1") for name in _TRACE_HEADERS if name in headers}
            route = self.paths[len(names) - 1]
            attributes = {"http.request.method": "POST", "http.route": route, "url.path": path, "url.scheme": "http"}
            call.span = tracing.begin("http", f"POST {route}", attributes, parent, call.arrival_ns)
        except Exception:
            _log.exception("a request has no span")

    async def _reply(self, call: Call, head: HttpHead, names: Mapping[str, str], receive: Receive) -> Reply:
        """Admit the call, read its body and answer it. Raises RequestError or ClientGone."""
        call.begin()
        served, limits = call.find(names["model"], names.get("version")), self.options.body
        self.admit(served)
        call.limit(self._timeout_ms(head, served))
        encoding = request_encoding(head.headers)
        body = await BodyReader(call, declared_length(head.headers, limits), limits, self._room).read(receive)
        call.until_client_leaves = partial(_until_client_leaves, receive)
        if encoding is not None:
            body = await inflate(body, encoding, call, self.decoder, limits)
        reply = await self.answer(call, head, served, body)
        wanted = reply_encoding(head.headers, reply)
        return reply if wanted is None else await self.decoder.run_owed(compress, reply, wanted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, from its head to its last byte."""
        call, names = Call(self.core, self.protocol), scope["path_params"]
        head = HttpHead(dict(scope["headers"]), parsed_query(scope["query_string"]))
        ending = FAILED
        if self.core.tracing is not None:
            self._trace(self.core.tracing, call, scope["path"], head, names)
        scope[CALL_IN_SCOPE] = call
        try:
            reply = await self._reply(call, head, names, receive)
            call.settle()
            ending = reply.ending
            await send_reply(send, reply, call.discard_pages)
        except BaseException as raised:
            ending = ending_of(raised)
            error = _error_reply(call, raised)
            call.settle()
            if error is not None:
                ending = error.ending
                await send_reply(send, error)
        finally:
            call.end(ending)

    def _timeout_ms(self, head: HttpHead, served: Served) -> float | None:
        """The client's time from the query, else the default; None: no limit. Raises InvalidRequest."""
        asked = head.query.get("timeout_ms")
        if asked is None:
            return self.options.timeout_ms(served.key.model)
        try:
            timeout_ms = float(asked)
        except ValueError:
            timeout_ms = -1.0
        return check_timeout_ms(timeout_ms, asked)


def _error_reply(call: Call, raised: BaseException) -> Reply | None:
    """The error reply for what was raised in a call; None if the client has left.

    Raises a bug, or the cancellation at the end of the process, again: the gate answers those.
    """
    cause = call.cause_of(raised)
    try:
        if isinstance(cause, RequestError):
            return error_reply(cause)
        if isinstance(cause, ClientGone):
            return None
        raise raised
    finally:
        del cause  # it would hold this frame, and this frame it


async def _until_client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
