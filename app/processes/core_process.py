"""The core's process: engines, queues, metrics, gRPC, and the application for all that edges do not answer.

Listens on two sockets that only the edges find: one for requests whose tensors lie in shared memory, one for
HTTP. Both are the supervisor's, so that edges reach the core that comes after this one at the same place.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import socket
from collections.abc import Callable
from dataclasses import replace

from convoy.app.core import Core
from convoy.app.edge.grpc.opening import grpc_host
from convoy.app.edge.http.application import create_app
from convoy.app.edge.http.connection import guarded_protocol
from convoy.app.edge.http.hot_routes import HotRoutes
from convoy.app.host import logs
from convoy.app.host.exits import end_for
from convoy.app.host.http_server import HttpServer
from convoy.app.host.runtime import collect_only_what_comes, give_large_allocations_back, run
from convoy.app.processes.control import SERVING, ControlLine, belong_to
from convoy.app.processes.edge_registry import EdgeRegistry
from convoy.app.processes.launch import decode_threads
from convoy.app.processes.messages import Extent
from convoy.app.processes.orders import NO_SOCKET, CoreOrders, own_orders
from convoy.app.reload import Reloading
from convoy.app.scheduling.slab import SharedPart
from convoy.app.settings import Settings
from convoy.app.tracing.starting import start_tracing

_log = logging.getLogger("convoy")
_LOOK_EVERY_S = 0.02


def main(make_core: Callable[..., Core] = Core) -> int:
    """The process, from its orders to its end; the exit code. `make_core` is called as `Core` is."""
    orders = own_orders(CoreOrders)
    belong_to(orders.parent_pid)
    settings = Settings.of_json(orders.fleet.settings)
    logs.configure(settings.log_level, settings.log_format)
    give_large_allocations_back()
    return run(_CoreProcess(orders, settings, make_core).run())


class _CoreProcess:
    """One core behind the edges."""

    def __init__(self, orders: CoreOrders, settings: Settings, make_core: Callable[..., Core]) -> None:
        self._orders, self._settings = orders, settings
        fleet = orders.fleet
        *edges, own = fleet.parts
        memory = mmap.mmap(fleet.memory_fd, 0)
        options = replace(settings.core_options(), shared_memory=SharedPart(memory, own.offset, own.nbytes))
        self._core = make_core(options, on_loaded=collect_only_what_comes, on_fatal=self._fatal)
        self._core.trace_with(start_tracing(is_wanted=settings.tracing))
        self._edges = EdgeRegistry(self._core, [Extent(part.offset, part.nbytes) for part in edges], orders.parent_pid)
        edge_options, limits = settings.edge_options(), settings.connection_limits()
        edge_options = replace(edge_options, decode_threads=decode_threads(edge_options, len(edges)))
        # The edges' gates log every call, with the address that it came from.
        quiet = replace(edge_options, access_log="off", cors_origins=(), is_behind_edges=True)
        hot = HotRoutes(self._core, quiet)
        app = create_app(self._core, quiet, hot)
        protocol = guarded_protocol(replace(limits, max_connections=1 << 20))
        self._http = HttpServer(app, protocol, on_started=self._open_registry)
        holder = None if fleet.grpc_fd == NO_SOCKET else socket.socket(fileno=fleet.grpc_fd)
        self._grpc = grpc_host(self._core, edge_options, hot.decoder, holder, max_calls=settings.max_connections)
        reloading = Reloading(settings, self._core, [edge_options, quiet], self._edges.tell_options)
        self._line = ControlLine(orders.control_fd, self._core, self._drain, self._http.stop, reloading.read_again)
        self._channel_server: asyncio.Server | None = None

    async def run(self) -> int:
        self._line.listen()
        telling = asyncio.ensure_future(self._tell_when_ready())
        exit_code = await self._grpc.serve_beside(self._http, [socket.socket(fileno=self._orders.http_fd)])
        telling.cancel()
        return exit_code

    async def _open_registry(self) -> None:
        listener = socket.socket(fileno=self._orders.channel_fd)
        # The loop does not keep it, and one that nobody keeps hears nobody after the next garbage collection.
        self._channel_server = await asyncio.get_running_loop().create_unix_server(self._edges.receive, sock=listener)

    async def _tell_when_ready(self) -> None:
        while not self._core.ready:  # noqa: ASYNC110 - of many things, and none of them announces it
            await asyncio.sleep(_LOOK_EVERY_S)
        self._line.say(SERVING)

    async def _drain(self) -> int:
        """Only the calls that came here; those of the edges are theirs to wait for, and are still run."""
        await self._core.drain(self._settings.drain_timeout_s)
        await self._grpc.close()
        return self._core.open_calls

    def _fatal(self, reason: str) -> None:
        end_for(reason, self._http.stop, is_lost=self._core.load_failure is None)


if __name__ == "__main__":
    raise SystemExit(main())
