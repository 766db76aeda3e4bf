"""The routes that infer: one row each, for the shortcut past the framework and for the framework itself.

The framework's middlewares and its router cost about a third of what a small request costs, and do nothing for these
routes: the routes themselves and the gate handle errors and ids. Everything else, a wrong verb on these paths included,
goes the usual way, where the same routes are mounted.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from convoy.app.calls.options import EdgeOptions
from convoy.app.core import Core
from convoy.app.http.body import UploadRoom
from convoy.app.http.hot_route import HotRoute
from convoy.app.http.infer import InferRoute
from convoy.app.http.predictions import PredictionsRoute
from convoy.app.pictures.decoder import Decoder

_PATHS: dict[type[HotRoute], tuple[str, ...]] = {
    PredictionsRoute: ("/predictions/{model}", "/predictions/{model}/{version}"),
    InferRoute: ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"),
}
_PROTOCOLS = [(path.split("/"), kind.protocol) for kind, paths in _PATHS.items() for path in paths]


def protocol_of(scope: Scope) -> str | None:
    """The metrics' name for calls of this kind, wherever they are answered; None where they do not infer."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    words = scope["path"].split("/")
    return next((name for path, name in _PROTOCOLS if len(path) == len(words) and _matched(path, words)), None)


class HotRoutes:
    """By path; what stands in braces are its parameters. All are asked with POST."""

    def __init__(self, core: Core, options: EdgeOptions) -> None:
        self.decoder = Decoder(options.decode_threads, options.max_decoding)
        core.waiting_to_decode = lambda: self.decoder.waiting
        room = UploadRoom(core.slab)
        made = {kind: kind(core, options, self.decoder, room) for kind in _PATHS}
        for kind, route in made.items():
            route.paths = _PATHS[kind]
        self.by_path = {path: route for kind, route in made.items() for path in _PATHS[kind]}
        self._templates = [(path.split("/"), route) for path, route in self.by_path.items()]

    def find(self, path: str) -> tuple[HotRoute, dict[str, str]] | None:
        """The route of a path, and the parameters in it."""
        words = path.split("/")
        for template, route in self._templates:
            if len(template) == len(words) and (found := _matched(template, words)):
                return route, found
        return None

    def close(self) -> None:
        self.decoder.close()


class Shortcut:
    """In front of the framework's application, to which goes what is for none of the routes."""

    def __init__(self, app: ASGIApp, routes: HotRoutes) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            found = self._routes.find(scope["path"])
            if found is not None:
                route, scope["path_params"] = found
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
