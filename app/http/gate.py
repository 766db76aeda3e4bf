"""The gate that every HTTP call passes, and what the routes that infer have in common.

On the way in, the gate sets the request id, checks the API key, and calls a hot route before FastAPI sees the request.
On the way out, it adds the id, answers errors, ends the call and writes the access log. It is plain ASGI, because
Starlette's `BaseHTTPMiddleware` hides that a client has left.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import ClassVar
from urllib.parse import parse_qsl

from starlette.datastructures import Headers as StarletteHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.app.calls.access import ASKS, SHUT_DOWN, TELLS, AccessLog, ServeOptions, in_line, report_header
from convoy.app.calls.call import Call
from convoy.app.core import Core
from convoy.app.http.body import BodyReader, UploadRoom, declared_length, request_encoding
from convoy.app.http.replies import (
    Reply,
    compress,
    error_body,
    error_reply,
    reply_encoding,
    send_reply,
)
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.decoder import Decoder
from convoy.app.pictures.predictor import check_timeout_ms
from convoy.app.scheduling.slab import Slot
from convoy.app.server.logs import request_id
from convoy.app.telemetry.outcomes import CANCELLED, ClientGone, ending_of
from convoy.app.telemetry.tracing import Tracing
from convoy.models.errors import Draining, InvalidRequest, RequestError

_log = logging.getLogger("convoy")
# Probes have no key, and browsers that open a page send none: the page itself, which has a field for the key and no
# secrets, and the documentation, which does not say what is served.
_NO_KEY_NEEDED = re.compile(
    r"/|/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready|/docs(/[^/]+)?|/openapi\.json"
)
# The admin token is a key to these only.
_ADMIN = re.compile(r"/v2/repository/models/[^/]+/(load|unload)")


def needs_key(path: str) -> bool:
    """Whether a call to this path needs an API key, if there are any."""
    return not _NO_KEY_NEEDED.fullmatch(path)


def takes_admin_token(path: str) -> bool:
    """Whether a call to this path may use the admin token instead."""
    return _ADMIN.fullmatch(path) is not None


# A model and a version, as in the path of a route that infers.
NamedVersion = tuple[str, str | None]


class RequestContext:
    """One request: its head, id, key and trace, and the call of a route that infers.

    `line` is its name in the log. `path` is without the application's root. `status` is 0 until a response begins,
    `code` is that of the error in the response, `key_name` is empty without a key, `ending` is how the call ends.
    """

    def __init__(self, scope: Scope, path: str, names: NamedVersion, call: Call | None, access_log: AccessLog) -> None:
        self.line = f"{scope['method']} {scope['path']}"
        self.path, self.names, self.call, self.ending = path, names, call, CANCELLED
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        raw_query = scope["query_string"].decode("latin-1")
        self.query = dict(parse_qsl(raw_query, keep_blank_values=True)) if raw_query else {}
        self.id = access_log.request_id(self.headers.get(b"x-request-id"))
        self.trace = self.headers.get(b"traceparent")
        self.started_ns = time.monotonic_ns()
        self.status = 0
        self.code = ""
        self.key_name = ""

    def answer_headers(self, status: int, core: Core) -> list[tuple[bytes, bytes]]:
        """The additional headers of every response with this status."""
        self.status = status
        headers = [(b"x-request-id", self.id)]
        span = None if self.call is None else self.call.span
        if span is not None:
            span.status, self.trace = status, span.traceparent.encode()
        if self.trace is not None:
            headers.append((b"traceparent", self.trace))
        if span is not None and span.tracestate:
            headers.append((b"tracestate", span.tracestate.encode()))
        load_format = self.headers.get(ASKS.encode())
        report = None if load_format is None else report_header(load_format, core.current_load())
        if report is not None:
            headers.append((TELLS.encode(), report))
        if core.leaving:
            # The client's next request then goes elsewhere, and not into a closing connection.
            headers.append((b"connection", b"close"))
        return headers


class HotRoute(ABC):
    """A route that infers. Subclasses turn a body into a reply; everything else is here."""

    protocol: ClassVar[str]
    paths: ClassVar[tuple[str, str]]  # without a version, and with one
    pattern: ClassVar[re.Pattern[str]]  # of both

    def __init__(self, core: Core, options: ServeOptions, decoder: Decoder, room: UploadRoom) -> None:
        self.core, self.options, self.decoder, self._room = core, options, decoder, room

    @abstractmethod
    async def answer(self, call: Call, request: RequestContext, served: Served, body: Slot) -> Reply:
        """The reply to a body that has been read. Raises RequestError or ClientGone."""

    def admit(self, served: Served) -> None:  # noqa: B027 - most routes take every model
        """Refuse a model that this route cannot serve, before the body is read. Raises RequestError."""

    async def reply(self, call: Call, request: RequestContext, receive: Receive) -> Reply:
        """Find the model, set the deadline, read the body and answer it. Raises RequestError or ClientGone."""
        if self.core.tracing is not None:
            self._trace(self.core.tracing, call, request)
        call.begin()
        headers, limits = request.headers, self.options.body
        served = call.find(*request.names)
        self.admit(served)
        call.limit(self._timeout_ms(request, served))
        encoding = request_encoding(headers)
        reader = BodyReader(call, declared_length(headers), limits, self._room)
        body = await reader.read(receive)
        call.until_client_leaves = partial(_until_client_leaves, receive)
        if encoding is not None:
            body = await reader.inflate(body, encoding, self.decoder)
        reply = await self.answer(call, request, served, body)
        wanted = reply_encoding(headers, reply)
        return reply if wanted is None else await self.decoder.run_owed(compress, reply, wanted)

    def _trace(self, tracing: Tracing, call: Call, request: RequestContext) -> None:
        """Give the call a span, if it is sampled. A failure here never fails the call."""
        try:
            given = {name: request.headers.get(name.encode()) for name in ("traceparent", "tracestate")}
            parent = {name: value.decode("latin-1") for name, value in given.items() if value is not None}
            route = self.paths[request.names[1] is not None]
            attributes = {"http.request.method": "POST", "http.route": route}
            attributes |= {"url.path": request.path, "url.scheme": "http"}
            call.span = tracing.begin("http", f"POST {route}", attributes, parent, call.arrival_ns)
        except Exception:
            _log.exception("a request has no span")

    def _timeout_ms(self, request: RequestContext, served: Served) -> float | None:
        """The client's timeout from the query, or the default; None means no limit. Raises InvalidRequest."""
        asked = request.query.get("timeout_ms")
        if asked is None:
            return self.options.timeout_ms(served.key.model)
        try:
            timeout_ms = float(asked)
        except ValueError:
            timeout_ms = -1.0
        return check_timeout_ms(timeout_ms, asked)


async def _until_client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Cors(CORSMiddleware):
    """CORS for these origins, with an error that says what to change."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        # The response headers that a page may read.
        exposed = (
            "X-Request-Id",
            "traceparent",
            "Server-Timing",
            "Retry-After",
            "Inference-Header-Content-Length",
            TELLS,
        )
        super().__init__(app, origins, allow_methods=("*",), allow_headers=("*",), expose_headers=exposed)

    def preflight_response(self, request_headers: StarletteHeaders) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        error = InvalidRequest(f"{bytes(response.body).decode()}; the server's --cors-origins has those that may ask")
        own = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return Response(error_body(error), error.http_status, own, "application/json")


class HotRoutes:
    """The routes that infer, and their decoder. All take POST."""

    def __init__(self, decoder: Decoder, routes: Sequence[HotRoute]) -> None:
        self.decoder, self._routes = decoder, routes

    def find(self, path: str) -> tuple[HotRoute, NamedVersion] | None:
        """The route of a path, and the version in it. The route itself refuses an empty version."""
        for route in self._routes:
            if (found := route.pattern.fullmatch(path)) is not None:
                return route, (found["model"], found["version"])
        return None

    def close(self) -> None:
        self.decoder.close()


class Gate:
    """In front of the hot routes and the framework's application, which has all the rest.

    It adds CORS if the options name origins, which may change while the server runs.
    """

    def __init__(self, hot: HotRoutes, app: ASGIApp, core: Core, options: ServeOptions) -> None:
        self._hot, self._app, self._core, self._options = hot, app, core, options
        self._access_log = AccessLog(options)
        self._behind_cors = lru_cache(maxsize=1)(partial(_Cors, self._serve))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._options.cors_origins:
            await self._behind_cors(self._options.cors_origins)(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, root = scope["path"], scope.get("root_path", "")
        if root and path.startswith(f"{root}/"):
            path = path[len(root) :]
        found = self._hot.find(path) if scope["method"] == "POST" else None
        route, names = found or (None, ("", None))
        call = None if route is None else Call(self._core, route.protocol)
        request = RequestContext(scope, path, names, call, self._access_log)
        request_id.set(request.id.decode())

        async def visible(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = request.answer_headers(message["status"], self._core)
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        try:
            self._check_key(request)
            if route is None or call is None:
                await self._app(scope, receive, visible)
            else:
                reply = await route.reply(call, request, receive)
                call.settle()
                request.ending = reply.ending
                await send_reply(visible, reply, call.discard_pages)
        except (asyncio.CancelledError, Exception) as raised:
            error = self._error_reply(request, raised)
            if call is not None:
                call.settle()
            if error is not None and request.status == 0:
                await send_reply(visible, error)
        finally:
            if call is not None:
                call.end(request.ending)
            self._log(request, scope)

    def _check_key(self, request: RequestContext) -> None:
        """Raises Unauthorized."""
        request.key_name = self._access_log.keys.check(
            request.headers.get(b"authorization"),
            is_open=lambda: not needs_key(request.path),
            takes_admin_token=lambda: takes_admin_token(request.path),
        )

    def _error_reply(self, request: RequestContext, raised: BaseException) -> Reply | None:
        """The response to a request in which this was raised; None if its client has left."""
        cause = raised if request.call is None else request.call.cause_of(raised)
        try:
            request.ending = ending_of(cause)
            if isinstance(cause, ClientGone | ClientDisconnect):
                return None
            if isinstance(cause, asyncio.CancelledError):
                # Only the end of the process cancels, when the time to drain is over.
                cause = Draining(SHUT_DOWN)
            elif not isinstance(cause, RequestError):
                _log.error("%s failed; this is a bug", in_line(request.line), exc_info=cause)
                cause = RequestError(f"internal error; the log has it under request {request.id.decode()}")
            request.code = cause.code
            return error_reply(cause)
        finally:
            del cause, raised  # avoid a reference cycle with this frame

    def _log(self, request: RequestContext, scope: Scope) -> None:
        self._access_log.log(
            (scope.get("client") or ("-", 0))[0],
            request.line,
            str(request.status or "left"),  # the client closed the connection before there was a response
            (time.monotonic_ns() - request.started_ns) / 1e6,
            is_error=request.status >= 400 or request.status == 0,
            trace=request.trace,
            key_name=request.key_name,
            code=request.code,
            facts=None if request.call is None else request.call.facts,
        )
