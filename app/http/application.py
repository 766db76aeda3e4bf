"""The HTTP application of a core: the gate, the routes that infer, and FastAPI with all the others.

FastAPI serves and documents the rarely called routes. The gate calls the two routes that infer itself, because
FastAPI's handling costs twice as much as the rest of a small request.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from difflib import SequenceMatcher
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.app.calls.access import ServeOptions
from convoy.app.core import Core
from convoy.app.http.body import UploadRoom
from convoy.app.http.gate import Gate, HotRoutes
from convoy.app.http.infer import InferRoute
from convoy.app.http.openapi import document_routes
from convoy.app.http.pages import docs_routes
from convoy.app.http.predictions import PredictionsRoute
from convoy.app.http.repository import cuda_routes, repository_routes, shared_memory_routes
from convoy.app.http.routes import control_routes, not_offered_routes, torchserve_routes
from convoy.app.pictures.decoder import Decoder
from convoy.app.version import VERSION
from convoy.models.errors import InvalidRequest, MethodNotAllowed, UnknownRoute


def hot_routes(core: Core, options: ServeOptions) -> HotRoutes:
    """The routes that infer, with their own decoder."""
    decoder, room = Decoder(options.decode_threads, options.max_decoding), UploadRoom(core.slab)
    core.waiting_to_decode = lambda: decoder.waiting
    return HotRoutes(decoder, [kind(core, options, decoder, room) for kind in (PredictionsRoute, InferRoute)])


class _Framework:
    """FastAPI behind the gate. It answers HEAD as GET and leaves unexpected errors to the gate."""

    def __init__(self, app: FastAPI) -> None:
        stack = app.middleware_stack = app.build_middleware_stack()
        # FastAPI would answer unexpected errors in plain text and without an id, before the gate sees them.
        assert isinstance(stack, ServerErrorMiddleware)
        self._app, self._behind_errors = app, stack.app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # FastAPI's own code here reads the environment for every request.
        scope["app"] = self._app
        if scope["method"] != "HEAD":
            await self._behind_errors(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._behind_errors({**scope, "method": "GET"}, receive, without_body)


def create_app(core: Core, options: ServeOptions, routes: HotRoutes | None = None) -> ASGIApp:
    """Make the application; its lifespan starts and stops the core. `routes` are shared ones that infer."""
    hot = routes or hot_routes(core, options)
    return Gate(hot, _Framework(framework_app(core, options, hot)), core, options)


def framework_app(core: Core, options: ServeOptions, hot: HotRoutes) -> FastAPI:
    """The routes that do not infer, and the documentation of all."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await core.start()
        yield
        hot.close()
        await core.stop()

    app = FastAPI(
        title="Convoy",
        version=VERSION,
        summary="Serves CNNs with dynamic batching. The page at / shows the models and tries images.",
        lifespan=lifespan,
        docs_url=None,  # it would be loaded from another server
        redoc_url=None,
        redirect_slashes=False,  # an unknown path is a 404 with an error, not an empty 307
    )
    # The gate calls these routes itself. Here they are for other methods, which get a 405.
    for path in (*PredictionsRoute.paths, *InferRoute.paths):
        app.router.routes.append(Route(path, _never_called, methods=["POST"]))
    # The last one has `/v2/models/{model}`, so longer paths come before it.
    routes = [*app.router.routes]
    for router in (
        docs_routes(),
        not_offered_routes(),
        shared_memory_routes(core, options),
        cuda_routes(),
        torchserve_routes(core),
        repository_routes(core, options),
        control_routes(core, options),
    ):
        app.include_router(router)
        routes += router.routes if router.include_in_schema else []
    _add_error_handlers(app, routes)
    document_routes(app, options)
    return app


async def _never_called(_: Request) -> Response:
    raise AssertionError("the gate calls the routes that infer; this is a bug")


def _add_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answer the framework's own errors; the gate answers all others."""

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        root, method = request.scope.get("root_path", ""), request.method
        path = request.scope["path"].removeprefix(root)
        elsewhere = _ELSEWHERE.fullmatch(path)
        near = f"POST /predictions/{'/'.join(filter(None, elsewhere.groups()))}" if elsewhere else ""
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allow = (error.headers or {}).get("Allow", "")
            near = near or f"{allow} {path[:100]}"
            raise MethodNotAllowed(f"{method} is not allowed here; send {_below(root, near)}", allow=allow)
        near = near or _nearest_route(routes, method, path)
        hint = f"did you mean {_below(root, near)}?" if near else f"{root}/docs lists the routes"
        raise UnknownRoute(f"there is no route {method} {root}{path[:100]}; {hint}")

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{where}: {first['msg']}")


# The paths of predictions in TensorFlow Serving, KServe's first protocol and others.
_ELSEWHERE = re.compile(r"(?:/v1)?/models?/([^/:]{1,100})(?:/versions/([^/:]{1,100}))?[:/]predict(?:ions?)?")


def _below(root: str, route: str) -> str:
    method, _, path = route.partition(" ")
    return f"{method} {root}{path}"


def _nearest_route(routes: Sequence[BaseRoute], method: str, path: str) -> str:
    """The route that a client probably meant, with its names filled in; empty if none is similar.

    Compares the words of routes with as many parts. Routes that take this method are preferred.
    """
    asked, best, most = path.strip("/").split("/"), "", 0.6
    if len(path) > 200:  # which would take long to compare
        return best
    for route in routes:
        if not isinstance(route, Route) or not route.include_in_schema:
            continue
        own, given, methods = route.path.strip("/").split("/"), asked, route.methods or set()
        if len(own) == len(asked) + 1 and own[-1].startswith("{"):
            given = [*asked, own[-1]]
        pairs = [*zip(own, given, strict=False)]
        fixed = [(word, other.lower()) for word, other in pairs if not word.startswith("{")]
        words, others = ("/".join(pair[side] for pair in fixed) for side in (0, 1))
        likeness = SequenceMatcher(None, words, others).ratio()
        likeness += likeness > 0.6 and method in methods
        if len(own) == len(given) and likeness > most:
            filled = [other if word.startswith("{") else word for word, other in pairs]
            best, most = f"{'POST' if 'POST' in methods else 'GET'} /{'/'.join(filled)}", likeness
    return best
