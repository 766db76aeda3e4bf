"""What every HTTP call passes, on the way in and on the way out.

In: a request id, the API key. Out: the id, the access log, and `{"error": ...}` for whatever nobody
foresaw. A bare ASGI wrapper, because Starlette's `BaseHTTPMiddleware` hides that a client has left.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from itertools import count

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.core import Core
from app.edge.calls import EdgeOptions
from app.edge.replies import Reply, error_body, error_reply, send_reply
from app.logs import request_id
from models.errors import Unauthorized, Unavailable

_log = logging.getLogger("convoy.access")
_errors = logging.getLogger("convoy")
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# Probes come from machines that have no key.
_NO_KEY_NEEDED = re.compile(r"/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")


class Gate:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, core: Core, options: EdgeOptions) -> None:
        self._app = app
        self._core = core
        self._options = options
        self._expected_key = None if options.api_key is None else b"Bearer " + options.api_key.encode()
        self._process = secrets.token_hex(4)
        self._numbers = count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        own_id = self._id_of(headers)
        request_id.set(own_id.decode())
        passage = _Passage(send, own_id, headers.get(b"traceparent"), self._core)
        started_ns = time.monotonic_ns()
        try:
            if self._is_allowed(scope["path"], headers):
                await self._app(scope, receive, passage.send)
            else:
                error = Unauthorized("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
                await send_reply(passage.send, error_reply(error))
        except asyncio.CancelledError:
            # Only the end of the process cancels, when the time to drain is over.
            await self._answer(passage, error_reply(Unavailable("the server shut down before it could answer")))
        except Exception:
            _errors.exception("%s %s failed; this is a bug", scope["method"], scope["path"])
            body = error_body(f"internal error; the log has it under request {own_id.decode()}")
            await self._answer(passage, Reply(500, (body,)))
        finally:
            self._log(scope, passage, (time.monotonic_ns() - started_ns) / 1e6)

    async def _answer(self, passage: _Passage, reply: Reply) -> None:
        if passage.status == 0:
            await send_reply(passage.send, reply)

    def _id_of(self, headers: dict[bytes, bytes]) -> bytes:
        given = headers.get(b"x-request-id")
        if given is not None and _ID.fullmatch(given):
            return given
        return f"{self._process}-{next(self._numbers)}".encode()

    def _is_allowed(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if self._expected_key is None or _NO_KEY_NEEDED.fullmatch(path):
            return True
        return hmac.compare_digest(headers.get(b"authorization", b""), self._expected_key)

    def _log(self, scope: Scope, passage: _Passage, took_ms: float) -> None:
        wanted = self._options.access_log
        noteworthy = passage.status >= 400 or passage.status == 0 or took_ms > self._options.slow_request_ms
        if wanted == "off" or (wanted == "errors" and not noteworthy):
            return
        client = scope.get("client") or ("-", 0)
        trace = f" trace {passage.traceparent.decode('latin-1')}" if passage.traceparent else ""
        status = passage.status or "left"  # the client closed the connection before there was an answer
        _log.info("%s %s %s %s %.1f ms%s", client[0], scope["method"], scope["path"], status, took_ms, trace)


class _Passage:
    """One call's way out: adds the headers that every answer has, and remembers the status."""

    def __init__(self, send: Send, own_id: bytes, traceparent: bytes | None, core: Core) -> None:
        self._send = send
        self._own_id = own_id
        self.traceparent = traceparent
        self._core = core
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._own_id)]
            if self.traceparent is not None:
                message["headers"].append((b"traceparent", self.traceparent))
            if self._core.leaving:
                # The client's next request then goes elsewhere, and not into a closing connection.
                message["headers"].append((b"connection", b"close"))
        await self._send(message)
