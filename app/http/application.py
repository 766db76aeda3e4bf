"""The FastAPI application over a core.

FastAPI is the application, its documentation and its rarely called routes. The two routes that infer are
bare ASGI endpoints mounted in it, because FastAPI's own handling costs twice what the rest of a small
request costs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.app.calls.access import Authenticator
from convoy.app.calls.load_report import TELLS
from convoy.app.calls.options import ServeOptions
from convoy.app.core import Core
from convoy.app.http.browsers import OwnPages
from convoy.app.http.docs_routes import docs_routes
from convoy.app.http.gate import Gate, HotRoutes
from convoy.app.http.openapi import document_routes
from convoy.app.http.replies import Reply, as_response, error_body, error_reply, json_response
from convoy.app.http.repository import repository_routes, shared_memory_routes
from convoy.app.http.routes import control_routes, not_offered_routes
from convoy.app.http.torchserve import torchserve_routes
from convoy.app.version import VERSION
from convoy.models.errors import RequestError


class HeadAsGet:
    """In front of an application that knows GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


# What a page may read of an answer beside its body.
_EXPOSED = ("X-Request-Id", "traceparent", "Server-Timing", "Retry-After", "Inference-Header-Content-Length", TELLS)


class _Cors(CORSMiddleware):
    """CORS for these origins, with an error that says what to change."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(app, origins, allow_methods=("*",), allow_headers=("*",), expose_headers=_EXPOSED)

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        error = f"{bytes(response.body).decode()}; the server's --cors-origins has those that may ask"
        own = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return json_response({"error": error}, response.status_code, own)


def with_cors(app: ASGIApp, options: ServeOptions) -> ASGIApp:
    """The application behind CORS, where `options.cors_origins` has any; they may change while the server runs."""
    behind = lru_cache(maxsize=1)(partial(_Cors, app))

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        origins = options.cors_origins
        await (behind(origins) if origins else app)(scope, receive, send)

    return guarded


def create_app(core: Core, options: ServeOptions, routes: HotRoutes | None = None) -> FastAPI:
    """The application; its lifespan starts and stops the core. `routes` are those that infer, where others use them."""
    hot = routes or HotRoutes(core, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await core.start()
        yield
        hot.close()
        await core.stop()

    class Application(FastAPI):
        """FastAPI behind CORS and the gate, which come before its own middlewares."""

        def build_middleware_stack(self) -> ASGIApp:
            stack = super().build_middleware_stack()
            # It would answer unexpected errors in plain text and without an id, before the gate sees them.
            assert isinstance(stack, ServerErrorMiddleware)
            return with_cors(Gate(hot, HeadAsGet(stack.app), core, options), options)

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or self.middleware_stack is None:
                await super().__call__(scope, receive, send)
                return
            # The framework's own way here looks into the environment for every request.
            scope["app"] = self
            await self.middleware_stack(scope, receive, send)

    app = Application(
        title="Convoy",
        version=VERSION,
        summary="Serves CNNs, batched and verified.",
        lifespan=lifespan,
        docs_url=None,  # it would come from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a page that is not there is a 404 with words, not an empty 307
    )
    # First in the list, because routes are tried in order.
    app.router.routes[:0] = [Route(path, route, methods=["POST"]) for path, route in hot.by_path.items()]
    # The last one has `/v2/models/{model}`, so those that go on from there come before it.
    own_pages, limits = OwnPages(options), options.body
    regions = shared_memory_routes(core, own_pages, limits)
    for router in (docs_routes(), not_offered_routes(), regions, torchserve_routes(core)):
        app.include_router(router)
    app.include_router(repository_routes(core, Authenticator(options), own_pages, limits))
    app.include_router(control_routes(core, options))
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    document_routes(app, hot.by_path, options)
    return app


async def _request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return as_response(error_reply(error))


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # The protocol's words, whatever the framework says.
    phrase = HTTPStatus(error.status_code).phrase
    headers = tuple((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items())
    return as_response(Reply(error.status_code, (error_body(phrase),), headers=headers))


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return as_response(Reply(400, (error_body(f"{where}: {first['msg']}"),)))
