"""Leads the hot routes past the framework.

The framework's middlewares and its router cost about a third of what a small request costs, and do
nothing for these routes: errors and ids are handled by the routes themselves and by the gate. Everything
else, a wrong verb on these paths included, goes the usual way, where the same routes are mounted.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class Shortcut:
    """In front of the framework's application."""

    def __init__(self, app: ASGIApp, infer: ASGIApp, predictions: ASGIApp) -> None:
        self._app, self._infer, self._predictions = app, infer, predictions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            match scope["path"].split("/"):
                case ["", "v2", "models", model, "infer"] if model:
                    scope["path_params"] = {"model": model}
                    return await self._infer(scope, receive, send)
                case ["", "v2", "models", model, "versions", version, "infer"] if model:
                    scope["path_params"] = {"model": model, "version": version}
                    return await self._infer(scope, receive, send)
                case ["", "predictions", model] if model:
                    scope["path_params"] = {"model": model}
                    return await self._predictions(scope, receive, send)
                case ["", "predictions", model, version] if model:
                    scope["path_params"] = {"model": model, "version": version}
                    return await self._predictions(scope, receive, send)
        return await self._app(scope, receive, send)
