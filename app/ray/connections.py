"""Connections of a replica: hot paths go to Convoy's application at once, all others through Ray's.

Behind Ray's HAProxy a replica has an HTTP server of its own, uvicorn with the protocol that it takes for "auto". That
is where our protocol is put. It needs the core on its own event loop, which `RAY_SERVE_THROUGHPUT_OPTIMIZED=1` brings;
otherwise Ray runs the core on another loop, and connections stay as Ray makes them.

Requests on hot paths are seen by Convoy's metrics and not by Ray's, and obey Convoy's time-outs and limits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import uvicorn.config
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from convoy.app.http.connection import GuardedProtocol
from convoy.app.http.gate import HotRoutes

_log = logging.getLogger("convoy")
# A header by which a client tells Ray how long it waits; only Ray heeds it.
_RAYS_TIMEOUT = b"x-request-timeout-seconds"


class Ways(Collector):
    """Counts of one replica; they belong to the loops that count, one each, and are read by any.

    `replica` is Ray's name of it: behind one address each look at the metrics may find another. `prefix` is the one
    under which Ray serves the application, learnt from each request that comes by ASGI and None until the first; Ray
    may change it while a replica lives.
    """

    def __init__(self, replica: str = "") -> None:
        self._replica = replica
        self.prefix: str | None = None
        self.direct = self.by_asgi = self.by_handle = 0

    def collect(self) -> Iterable[Metric]:
        text = "Requests to this Ray Serve replica by path: direct, asgi or handle"
        family = CounterMetricFamily("convoy_ray_requests", text, labels=("way",))
        for way, count in (("direct", self.direct), ("asgi", self.by_asgi), ("handle", self.by_handle)):
            family.add_metric((way,), count)
        own = GaugeMetricFamily("convoy_ray_replica", "Labels of this Ray Serve replica; always 1", labels=("replica",))
        own.add_metric((self._replica,), 1)
        return [family, own]


class HotPaths(NamedTuple):
    """Convoy's application, and which requests go to it without Ray's."""

    app: ASGIApp
    routes: HotRoutes
    ways: Ways

    def scope_inside(self, scope: Scope) -> Scope | None:
        """The request's scope without Ray's prefix; None if it is for Ray's application."""
        prefix, path = self.ways.prefix, scope["path"]
        if prefix is None or scope["root_path"] or scope["method"] != "POST" or not path.startswith(f"{prefix}/"):
            return None
        inside = path.removeprefix(prefix)
        if self.routes.find(inside) is None or any(name == _RAYS_TIMEOUT for name, _ in scope["headers"]):
            return None
        return {**scope, "path": inside}


class ReplicaConnection(GuardedProtocol):
    """One connection of a replica."""

    hot: ClassVar[HotPaths]

    def shutdown(self) -> None:
        # Ray ends its server while requests run, and waits for them; a host of ours has waited before.
        HttpToolsProtocol.shutdown(self)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        inside = self.hot.scope_inside(cycle.scope)
        if inside is not None:
            self.hot.ways.direct += 1
            cycle.scope, app = inside, self.hot.app
        super()._start_asgi_task(cycle, app)


def take_connections(protocol: type[GuardedProtocol], hot: HotPaths) -> None:
    """From now on connections of this process are ours, if they are on the event loop that calls this."""
    kind: Any = type("ReplicaProtocol", (ReplicaConnection, protocol), {"hot": hot})
    usual: Any = uvicorn.importer.import_from_string(uvicorn.config.HTTP_PROTOCOLS["auto"])
    home, has_told = asyncio.get_running_loop(), False

    def connect(*arguments: Any, **named: Any) -> asyncio.Protocol:
        nonlocal has_told
        is_home = asyncio.get_running_loop() is home
        if not has_told:
            has_told = True
            _log.info("%s", _TAKEN if is_home else _ON_ANOTHER_LOOP)
        connection: asyncio.Protocol = (kind if is_home else usual)(*arguments, **named)
        return connection

    # uvicorn asks for a class and calls whatever it is given.
    uvicorn.config.HTTP_PROTOCOLS["auto"] = connect  # type: ignore[assignment]


_TAKEN = "inference requests bypass Ray's application"
_ON_ANOTHER_LOOP = (
    "all requests pass through Ray's application, about three times slower: Ray runs the models on another event loop "
    "than the connections; set RAY_SERVE_THROUGHPUT_OPTIMIZED=1 on every node"
)


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
