"""An edge process: accepts, parses, decodes, and encodes; the inference is the core's.

Imports no engine and no FastAPI: there may be many of it, and each is to stay small.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import socket
from dataclasses import dataclass

from convoy.app.edge.http.connection import ConnectionLimits, guarded_protocol
from convoy.app.edge.http.cors import Cors
from convoy.app.edge.http.gate import Gate
from convoy.app.edge.http.hot_routes import HotRoutes, Shortcut
from convoy.app.edge.http.infer import InferRoute
from convoy.app.edge.http.predictions import PredictionsRoute
from convoy.app.edge.options import EdgeOptions
from convoy.app.host import logs
from convoy.app.host.acceptor import Acceptor
from convoy.app.host.http_server import HttpServer
from convoy.app.host.runtime import collect_only_what_comes, give_large_allocations_back, run
from convoy.app.outcomes import Refusal
from convoy.app.processes.balance import Balance
from convoy.app.processes.control import SERVING, ControlLine, belong_to
from convoy.app.processes.messages import OptionsTold
from convoy.app.processes.orders import EdgeOrders, channel_socket, http_socket, own_orders
from convoy.app.processes.proxy import Proxy
from convoy.app.processes.remote_core import RemoteCore
from convoy.app.scheduling.slab import SharedPart, Slab
from convoy.app.tracing.starting import CLOSING_S, start_tracing
from convoy.models.records import from_jsonable

_CORE_WITHIN_S = 2.0
_PUBLISH_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class EdgeProfile:
    """What every edge of a server is told. `infers`: it takes tensors itself, and leads none of them to the core.

    `traces`: its calls have spans, which it sends itself.
    """

    options: EdgeOptions
    limits: ConnectionLimits
    infers: bool
    traces: bool = False


def main() -> None:
    """The process, from its orders to its end."""
    orders = own_orders(EdgeOrders)
    belong_to(orders.parent_pid)
    profile = from_jsonable(EdgeProfile, json.loads(orders.fleet.edge), "edge")
    logs.configure(orders.fleet.log_level, orders.fleet.log_format)
    give_large_allocations_back()
    run(_EdgeProcess(orders, profile).run())


class _EdgeProcess:
    """One edge, from its first connection to its last answer."""

    def __init__(self, orders: EdgeOrders, profile: EdgeProfile) -> None:
        self._orders, self._profile = orders, profile
        fleet = orders.fleet
        memory, own = mmap.mmap(fleet.memory_fd, 0), fleet.parts[orders.number]
        part = SharedPart(memory, own.offset, own.nbytes)
        self._balance = Balance(memory, fleet.edges, orders.number)
        self._core = RemoteCore(Slab(part.nbytes, part), orders.number, orders.incarnation)
        self._core.on_options = self._take_options
        self._core.tracing = self._tracing = start_tracing(is_wanted=profile.traces)
        kinds = (PredictionsRoute, InferRoute) if profile.infers else (PredictionsRoute,)
        self._hot = HotRoutes(self._core, profile.options, kinds)
        rest = Proxy(self._core, http_socket(orders.folder))
        self._server = HttpServer(
            Cors(Gate(Shortcut(rest, self._hot), self._core, profile.options), profile.options),
            guarded_protocol(profile.limits, lambda: self._core.turned_away(Refusal.CONNECTIONS)),
            lifespan="off",
            on_started=self._accept,
            on_stopping=self._accept_no_more,
        )
        self._listener = socket.socket(fileno=fleet.listener_fd)
        self._acceptor: Acceptor | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._line = ControlLine(orders.control_fd, self._core, self._drain, self._server.stop)

    async def run(self) -> None:
        speaking = asyncio.ensure_future(self._core.stay_connected(channel_socket(self._orders.folder)))
        self._line.listen()
        await self._server.serve(sockets=[])
        speaking.cancel()
        self._hot.close()

    async def _accept(self) -> None:
        # Whoever comes before the core has been met would only hear that it is away.
        await self._core.until_present(_CORE_WITHIN_S)
        profile = self._profile
        self._acceptor = Acceptor(
            self._listener,
            self._server.make_protocol,
            profile.limits.handshakes(lambda: profile.options.tls),
            self._balance.patience_s,
            self._publish,
        )
        self._publishing = asyncio.ensure_future(self._publish_for_ever())
        collect_only_what_comes()
        self._line.say(SERVING)

    def _accept_no_more(self) -> None:
        if self._acceptor is not None and self._publishing is not None:
            self._acceptor.close()
            self._publishing.cancel()

    async def _publish_for_ever(self) -> None:
        while True:
            self._publish()
            await asyncio.sleep(_PUBLISH_EVERY_S)

    def _publish(self, coming: int = 0) -> None:
        self._balance.publish(self._server.open_connections + coming)

    def _take_options(self, told: OptionsTold) -> None:
        self._profile.options.change(from_jsonable(EdgeOptions, json.loads(told.options), "options"))
        logs.set_level(told.log_level)

    async def _drain(self) -> int:
        await self._core.drain(self._orders.fleet.drain_timeout_s)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close, CLOSING_S)
        self._server.stop()
        return self._core.open_calls


if __name__ == "__main__":
    main()
