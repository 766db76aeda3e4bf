"""Connections of a replica: hot paths go straight to Convoy's application, all others through Ray's.

Behind Ray's HAProxy, each replica runs its own uvicorn with the protocol class that uvicorn selects for "auto".
Convoy's protocol is put there. It needs the core on the same event loop, which `RAY_SERVE_THROUGHPUT_OPTIMIZED=1`
provides; otherwise Ray runs the core on another loop, and connections stay as Ray makes them.

Convoy's metrics count requests on hot paths; Ray's do not. Convoy's timeouts and limits apply to them.
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
# A header in which clients tell Ray their timeout; only Ray reads it.
_RAYS_TIMEOUT = b"x-request-timeout-seconds"


class Ways(Collector):
    """Request counters of one replica; each loop writes its own, and any thread may read them.

    `replica` is Ray's name of the replica: behind one address, each scrape may reach another. `prefix` is the route
    prefix of the application, learnt from each ASGI request and None until the first; Ray may change it while a replica
    runs.
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
    """Convoy's application, and which requests bypass Ray's."""

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
        # Ray ends its server while requests run and then waits for them; in `convoy serve` that wait comes first.
        HttpToolsProtocol.shutdown(self)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        inside = self.hot.scope_inside(cycle.scope)
        if inside is not None:
            self.hot.ways.direct += 1
            cycle.scope, app = inside, self.hot.app
        super()._start_asgi_task(cycle, app)


def take_connections(protocol: type[GuardedProtocol], hot: HotPaths) -> None:
    """From now on use Convoy's protocol for connections on the event loop that calls this."""
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
        """The lifespan. The core was started before, where a failure can be reported."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._on_end()
        await send({"type": "lifespan.shutdown.complete"})


def _inside(scope: Scope) -> Scope:
    """Remove the prefix under which Ray serves the application from the path."""
    root, path = scope.get("root_path", "").rstrip("/"), scope.get("path", "")
    if not root or not path.startswith(root):
        return scope
    rest = path[len(root) :] or "/"
    # Starlette strips the root path if the path begins with it, which it may do by coincidence.
    return {**scope, "path": rest, "root_path": "" if rest.startswith(root) else root}


def _without_second_id(scope: Scope, send: Send) -> Send:
    """Ray adds its request id to every answer; Convoy's is the same, and once is enough."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)

    async def visible(message: Message) -> None:
        if given is not None and message["type"] == "http.response.start":
            message["headers"] = [one for one in message["headers"] if one != (b"x-request-id", given)]
        await send(message)

    return visible
