"""The direct way inside a replica: Ray's HTTP server, with connections that know Convoy's hot routes.

Behind Ray's HAProxy a replica has an HTTP server of its own, uvicorn with the protocol that it takes for "auto". That
is where our connections are put. They need the core on their own event loop, which `RAY_SERVE_THROUGHPUT_OPTIMIZED=1`
brings; otherwise Ray runs the core on another loop than the connections, and these stay what they are without us.

What takes the direct way is seen by Convoy's metrics and not by Ray's, and obeys Convoy's time-outs and limits.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from convoy.app.edge.http.connection import ConnectionLimits, GuardedProtocol
from convoy.app.edge.http.direct import DirectWay, Memory
from convoy.app.ray.ways import Ways

_log = logging.getLogger("convoy")
# A header by which a client tells Ray how long it waits; only Ray heeds it.
_RAYS_TIMEOUT = b"x-request-timeout-seconds"


class RouteHere:
    """Under which prefix Ray serves the application, learnt from each request that comes by ASGI; None: not known yet.

    Ray tells it nobody else, and may change it while a replica lives.
    """

    prefix: bytes | None = None


class ReplicaProtocol(GuardedProtocol):
    """One connection of a replica."""

    ways: ClassVar[Ways]
    here: ClassVar[RouteHere]

    def shutdown(self) -> None:
        # Ray ends its server while requests run, and waits for them; a host of ours has waited before.
        HttpToolsProtocol.shutdown(self)

    def _goes_direct(self) -> bool:
        prefix = self.here.prefix
        if prefix is None or self.config.root_path or any(name == _RAYS_TIMEOUT for name, _ in self.headers):
            return False
        whole = self.url
        if not whole.startswith(prefix + b"/"):
            return False
        self.url = whole[len(prefix) :]
        if super()._goes_direct():
            self.ways.direct += 1
            return True
        self.url = whole
        return False

    def _repeats(self, memory: Memory, data: bytes) -> bool:
        is_repeated = super()._repeats(memory, data)
        self.ways.direct += is_repeated
        return is_repeated


def take_connections(way: DirectWay, limits: ConnectionLimits, ways: Ways, here: RouteHere) -> None:
    """From now on connections of this process are ours, where they are on the event loop that calls this."""
    more = {"limits": limits, "way": way, "ways": ways, "here": here}
    kind: Any = type("ReplicaProtocol", (ReplicaProtocol,), more)
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


_TAKEN = "requests that infer take the direct way past Ray's ASGI"
_ON_ANOTHER_LOOP = (
    "requests go by ASGI, some three times slower: Ray runs the models on another event loop than the connections; "
    "set RAY_SERVE_THROUGHPUT_OPTIMIZED=1 on every node"
)
