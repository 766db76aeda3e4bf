"""The routes that infer: one row each, for the framework, for the shortcut past it and for an edge process alike.

The framework's middlewares and its router cost about a third of what a small request costs, and do nothing for these
routes: errors and ids are handled by the routes themselves and by the gate. Everything else, a wrong verb on these
paths included, goes the usual way, where the same routes are mounted.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from convoy.app.edge.decode_pool import DecodePool
from convoy.app.edge.http.calls import HotRoute
from convoy.app.edge.http.express import Express
from convoy.app.edge.http.infer import InferRoute
from convoy.app.edge.http.predictions import PredictionsRoute
from convoy.app.edge.options import EdgeOptions
from convoy.app.submission.inference import InferenceCore


def hot_routes(
    core: InferenceCore, options: EdgeOptions, pool: DecodePool, express: Express | None
) -> dict[str, HotRoute]:
    """By path; what stands in braces are its parameters. All are asked with POST."""
    infer, predictions = InferRoute(core, options, pool, express), PredictionsRoute(core, options, pool)
    return {
        "/predictions/{model}": predictions,
        "/predictions/{model}/{version}": predictions,
        "/v2/models/{model}/infer": infer,
        "/v2/models/{model}/versions/{version}/infer": infer,
    }


class Shortcut:
    """In front of the framework's application, to which goes what none of `routes` is for."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._routes = [(path.split("/"), route) for path, route in routes.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            words = scope["path"].split("/")
            for template, route in self._routes:
                if len(template) == len(words) and (found := _matched(template, words)):
                    scope["path_params"] = found
                    return await route(scope, receive, send)
        return await self._app(scope, receive, send)


def _matched(template: list[str], words: list[str]) -> dict[str, str]:
    """The parameters, where the path has the template's form. The route itself refuses a version that is nothing."""
    found: dict[str, str] = {}
    for wanted, word in zip(template, words, strict=True):
        if wanted[:1] == "{" and (word or found):
            found[wanted[1:-1]] = word
        elif wanted != word:
            return {}
    return found
