"""The gate that every HTTP call passes, and the routes that infer, which it calls before FastAPI sees the request.

On the way in it sets the request id and checks the API key. On the way out it adds the id, writes the access log, and
answers unexpected errors. It is plain ASGI, because Starlette's `BaseHTTPMiddleware` hides that a client has left.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.app.calls.access import SHUT_DOWN, AccessLog, in_line
from convoy.app.calls.call import CALL_IN_SCOPE, Call
from convoy.app.calls.load_report import ASKS, TELLS, report_header
from convoy.app.calls.options import ServeOptions
from convoy.app.core import Core
from convoy.app.http.body import UploadRoom
from convoy.app.http.hot_route import HotRoute
from convoy.app.http.infer import InferRoute
from convoy.app.http.predictions import PredictionsRoute
from convoy.app.http.replies import Headers, Reply, error_reply, internal_error, send_reply
from convoy.app.pictures.decoder import Decoder
from convoy.app.server.logs import request_id
from convoy.app.telemetry.tracing import RequestSpan
from convoy.models.errors import Unauthorized, Unavailable

_errors = logging.getLogger("convoy")
_ASKS_LOAD, _TELLS_LOAD = ASKS.encode(), TELLS.encode()
# Probes come from machines that have no key, and pages are opened by browsers, which send none: the page itself, which
# has nothing to hide and a field for the key, and those of the documentation, which say nothing of what is served.
_NO_KEY_NEEDED = re.compile(
    r"/|/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready|/docs(/[^/]+)?|/openapi\.json"
)
# The admin token is a key to these, and to nothing else.
_ADMIN = re.compile(r"/v2/repository/models/[^/]+/(load|unload)")


def needs_key(path: str) -> bool:
    """Whether a call there needs an API key, where there are any."""
    return not _NO_KEY_NEEDED.fullmatch(path)


def takes_admin_token(path: str) -> bool:
    """Whether a call there may come with the admin token instead."""
    return _ADMIN.fullmatch(path) is not None


class RequestContext:
    """One call at the gate: its id and key, the headers that every answer gets, its line in the log."""

    __slots__ = ("_access_log", "_core", "key_name", "load_format", "own_id", "span", "started_ns", "status", "trace")

    def __init__(self, access_log: AccessLog, core: Core, headers: Mapping[bytes, bytes]) -> None:
        self._access_log, self._core = access_log, core
        self.own_id = access_log.request_id(headers.get(b"x-request-id"))
        self.trace = headers.get(b"traceparent")
        self.load_format = headers.get(_ASKS_LOAD)
        self.started_ns = time.monotonic_ns()
        self.status = 0  # no answer has begun
        self.key_name = ""  # of none, or not known yet
        self.span: RequestSpan | None = None

    def check_key(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises Unauthorized."""
        keys, given = self._access_log.keys, headers.get(b"authorization")
        self.key_name = keys.check(
            given, is_open=lambda: not needs_key(path), takes_admin_token=lambda: takes_admin_token(path)
        )

    def follow(self, span: RequestSpan) -> None:
        """From now on this is the trace that answers and the log name."""
        self.span, self.trace = span, span.traceparent.encode()

    def headers(self, status: int) -> Headers:
        """What every answer says beside its own, now that it goes out with this status."""
        self.status = status
        headers = [(b"x-request-id", self.own_id)]
        if self.trace is not None:
            headers.append((b"traceparent", self.trace))
        if self.span is not None:
            self.span.status = status
            if self.span.tracestate:
                headers.append((b"tracestate", self.span.tracestate.encode()))
        if self.load_format is not None:
            told = report_header(self.load_format, self._core.current_load())
            if told is not None:
                headers.append((_TELLS_LOAD, told))
        if self._core.leaving:
            # The client's next request then goes elsewhere, and not into a closing connection.
            headers.append((b"connection", b"close"))
        return headers

    def failed(self, call: str, error: BaseException) -> Reply:
        """The answer to a request that raised an unexpected error, which is logged."""
        _errors.error("%s failed; this is a bug", in_line(call), exc_info=error)
        return internal_error(self.own_id)

    def log(self, client: str, call: str, inference: Call | None) -> None:
        status = str(self.status or "left")  # the client closed the connection before there was an answer
        self._access_log.log(
            client,
            call,
            status,
            (time.monotonic_ns() - self.started_ns) / 1e6,
            is_error=self.status >= 400 or self.status == 0,
            trace=self.trace,
            key_name=self.key_name,
            facts=None if inference is None else inference.facts,
        )


class HotRoutes:
    """Found by one look at the path. All take POST."""

    def __init__(self, core: Core, options: ServeOptions) -> None:
        self.decoder = Decoder(options.decode_threads, options.max_decoding)
        core.waiting_to_decode = lambda: self.decoder.waiting
        room = UploadRoom(core.slab)
        self._predictions = PredictionsRoute(core, options, self.decoder, room)
        self._infer = InferRoute(core, options, self.decoder, room)
        self.by_path: dict[str, HotRoute] = {
            path: route for route in (self._predictions, self._infer) for path in route.paths
        }

    def find(self, path: str) -> tuple[HotRoute, dict[str, str]] | None:
        """The route of a path, and the parameters in it. The route itself refuses a version that is empty."""
        match path.split("/"):
            case ["", "predictions", model] if model:
                return self._predictions, {"model": model}
            case ["", "predictions", model, version] if model:
                return self._predictions, {"model": model, "version": version}
            case ["", "v2", "models", model, "infer"] if model:
                return self._infer, {"model": model}
            case ["", "v2", "models", model, "versions", version, "infer"] if model:
                return self._infer, {"model": model, "version": version}
        return None

    def close(self) -> None:
        self.decoder.close()


class Gate:
    """In front of the hot routes and of the framework's application, which has all the rest."""

    def __init__(self, hot: HotRoutes, app: ASGIApp, core: Core, options: ServeOptions) -> None:
        self._hot, self._app = hot, app
        self._core = core
        self._access_log = AccessLog(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, call = dict(scope["headers"]), f"{scope['method']} {scope['path']}"
        context = RequestContext(self._access_log, self._core, headers)
        request_id.set(context.own_id.decode())
        found = self._hot.find(scope["path"]) if scope["method"] == "POST" else None

        async def visible(message: Message) -> None:
            if message["type"] == "http.response.start":
                inference: Call | None = scope.get(CALL_IN_SCOPE)
                if inference is not None and inference.span is not None:
                    context.follow(inference.span)
                message["headers"] = [*message.get("headers", ()), *context.headers(message["status"])]
            await send(message)

        try:
            context.check_key(scope["path"], headers)
            if found is None:
                await self._app(scope, receive, visible)
            else:
                route, scope["path_params"] = found
                await route(scope, receive, visible)
        except Unauthorized as error:
            reply = error_reply(error)
            if found is not None:
                turned_away = Call(self._core, found[0].protocol)
                turned_away.arrival_ns = context.started_ns
                turned_away.end(reply.ending)
                scope[CALL_IN_SCOPE] = turned_away
            await send_reply(visible, reply)
        except asyncio.CancelledError:
            # Only the end of the process cancels, when the time to drain is over.
            if context.status == 0:
                await send_reply(visible, error_reply(Unavailable(SHUT_DOWN)))
        except ClientDisconnect:
            pass  # while its body arrived; the log says that it left
        except Exception as error:
            reply = context.failed(call, error)
            if context.status == 0:
                await send_reply(visible, reply)
        finally:
            # Taken out, because the scope stays as long as the connection, and with it would what the call has found.
            context.log((scope.get("client") or ("-", 0))[0], call, scope.pop(CALL_IN_SCOPE, None))
