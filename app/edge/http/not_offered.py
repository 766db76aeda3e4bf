"""Routes of extensions that this server does not offer: a 501 in the protocol's form, and why."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response

from convoy.app.edge.http.error_docs import ERRORS
from convoy.models.errors import Unsupported

_WHY = {
    "/v2/trace/setting": "the server does not support tracing; /stats and the Server-Timing header tell the stages",
    "/v2/models/{model}/trace/setting": "the server does not support tracing; see /stats and Server-Timing",
    "/v2/models/{model}/versions/{version}/trace/setting": (
        "the server does not support tracing; see /stats and Server-Timing"
    ),
    "/v2/logging": "the server does not support dynamic logging; start it with --log-level or --access-log",
}


def not_offered_routes() -> APIRouter:
    router = APIRouter(tags=["not offered"], responses=ERRORS)
    for path, why in _WHY.items():
        router.add_api_route(path, _refusal(why), methods=["GET"], summary="Not offered")
        router.add_api_route(path, _refusal(why), methods=["POST"], summary="Not offered")
    return router


def _refusal(why: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise Unsupported(why)

    return refuse
