"""Whether pages of other origins may read answers: Starlette's rule, in front of everything, as the options say now.

A browser's question beforehand (preflight) has no key, so it is answered before the gate. Without `--cors-origins`
there is nothing here but one look at the options, and a request without `Origin` keeps the direct way in any case.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from convoy.app.edge.http.replies import json_response
from convoy.app.edge.options import EdgeOptions
from convoy.app.edge.orca import TELLS

# What a page may read of an answer beside its body.
_EXPOSED = ("X-Request-Id", "traceparent", "Server-Timing", "Retry-After", "Inference-Header-Content-Length", TELLS)


class _Cors(CORSMiddleware):
    """For the origins of one moment."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(app, origins, allow_methods=("*",), allow_headers=("*",), expose_headers=_EXPOSED)

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        error = f"{bytes(response.body).decode()}; the server's --cors-origins has those that may ask"
        own = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return json_response({"error": error}, response.status_code, own)


class Cors:
    """Wraps the gate."""

    def __init__(self, app: ASGIApp, options: EdgeOptions) -> None:
        self._app, self._options = app, options
        self._origins: tuple[str, ...] = ()
        self._guarded: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = self._options.cors_origins
        if origins != self._origins:
            self._origins = origins
            self._guarded = _Cors(self._app, origins) if origins else self._app
        await self._guarded(scope, receive, send)
