"""What every HTTP call passes, on the way in and on the way out.

In: a request id, the API key. Out: the id, the access log, and `{"error": ...}` for whatever nobody
foresaw. A bare ASGI wrapper, because Starlette's `BaseHTTPMiddleware` hides that a client has left.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.app.edge.entry import KEY_IS_WRONG, SHUT_DOWN, Entry
from convoy.app.edge.http.direct import direct_line
from convoy.app.edge.http.replies import Headers, Reply, error_reply, internal_error, send_reply
from convoy.app.edge.options import EdgeOptions
from convoy.app.host.logs import request_id
from convoy.app.submission.inference import InferenceCore
from convoy.models.errors import Unauthorized, Unavailable

_errors = logging.getLogger("convoy")
# Probes come from machines that have no key.
_NO_KEY_NEEDED = re.compile(r"/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")
# The admin token is a key to these, and to nothing else.
_ADMIN = re.compile(r"/v2/repository/models/[^/]+/(load|unload)")


class Gate:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, core: InferenceCore, options: EdgeOptions) -> None:
        self._app = app
        self._core = core
        self._entry = Entry(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        own_id = self._entry.request_id(headers.get(b"x-request-id"))
        request_id.set(own_id.decode())
        passage = _Passage(send, own_id, headers.get(b"traceparent"), self._core)
        line = direct_line(scope)
        if line is not None:
            line.decorate = passage.headers
        started_ns = time.monotonic_ns()
        try:
            if self._is_allowed(scope["path"], headers):
                await self._app(scope, receive, passage.send)
            else:
                error = Unauthorized(KEY_IS_WRONG)
                await send_reply(passage.send, error_reply(error))
        except asyncio.CancelledError:
            # Only the end of the process cancels, when the time to drain is over.
            await self._answer(passage, error_reply(Unavailable(SHUT_DOWN)))
        except Exception:
            _errors.exception("%s %s failed; this is a bug", scope["method"], scope["path"])
            await self._answer(passage, internal_error(own_id))
        finally:
            self._log(scope, passage, (time.monotonic_ns() - started_ns) / 1e6)
            if line is not None:
                line.hang_up()

    async def _answer(self, passage: _Passage, reply: Reply) -> None:
        if passage.status == 0:
            await send_reply(passage.send, reply)

    def _is_allowed(self, path: str, headers: dict[bytes, bytes]) -> bool:
        keys, given = self._entry.keys, headers.get(b"authorization")
        if keys.is_key(given) or _NO_KEY_NEEDED.fullmatch(path):
            return True
        return keys.is_admin_token(given) and _ADMIN.fullmatch(path) is not None

    def _log(self, scope: Scope, passage: _Passage, took_ms: float) -> None:
        client = scope.get("client") or ("-", 0)
        status = str(passage.status or "left")  # the client closed the connection before there was an answer
        is_error = passage.status >= 400 or passage.status == 0
        call = f"{scope['method']} {scope['path']}"
        self._entry.log(client[0], call, status, took_ms, is_error=is_error, trace=passage.traceparent)


class _Passage:
    """One call's way out: adds the headers that every answer has, and remembers the status."""

    def __init__(self, send: Send, own_id: bytes, traceparent: bytes | None, core: InferenceCore) -> None:
        self._send = send
        self._own_id = own_id
        self.traceparent = traceparent
        self._core = core
        self.status = 0

    def headers(self, status: int) -> Headers:
        """What every answer of this call says beside its own, now that it goes out with this status."""
        self.status = status
        headers = [(b"x-request-id", self._own_id)]
        if self.traceparent is not None:
            headers.append((b"traceparent", self.traceparent))
        if self._core.leaving:
            # The client's next request then goes elsewhere, and not into a closing connection.
            headers.append((b"connection", b"close"))
        return headers

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *self.headers(message["status"])]
        await self._send(message)
