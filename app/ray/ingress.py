"""Convoy's application as Ray calls it: under a prefix, behind a middleware that has ids of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.app.ray.ways import Ways


class Ingress:
    """Wraps the application. `on_end` runs when Ray has waited for open requests and ends the replica."""

    def __init__(self, app: ASGIApp, ways: Ways, on_end: Callable[[], Awaitable[None]]) -> None:
        self._app, self._ways, self._on_end = app, ways, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] == "http":
            self._ways.by_asgi += 1
            self._ways.prefix = scope.get("root_path", "").rstrip("/")
            send = _without_second_id(scope, send)
        await self._app(_inside(scope), receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """The core was started before, where a failure can be told in words."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._on_end()
        await send({"type": "lifespan.shutdown.complete"})


def _inside(scope: Scope) -> Scope:
    """What the application is asked for, without the prefix under which Ray serves it."""
    root, path = scope.get("root_path", "").rstrip("/"), scope.get("path", "")
    if not root or not path.startswith(root):
        return scope
    rest = path[len(root) :] or "/"
    # Starlette takes a root off a path that begins with it, which this one may do by itself.
    return {**scope, "path": rest, "root_path": "" if rest.startswith(root) else root}


def _without_second_id(scope: Scope, send: Send) -> Send:
    """Ray gives every request an id, and adds it to the answer; ours is the same, and once is enough."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)

    async def visible(message: Message) -> None:
        if given is not None and message["type"] == "http.response.start":
            message["headers"] = [one for one in message["headers"] if one != (b"x-request-id", given)]
        await send(message)

    return visible
