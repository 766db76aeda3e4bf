"""The core's process: engines, queues, metrics, gRPC, and the application for all that edges do not answer.

Listens on two sockets that only the edges find: one for requests whose tensors lie in shared memory, one for
HTTP. Both are the supervisor's, so that edges reach the core that comes after this one at the same place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn

from convoy.app.core import Core
from convoy.app.edge.grpc.host import GrpcHost
from convoy.app.edge.http.application import create_app
from convoy.app.edge.http.connection import guarded_protocol
from convoy.app.host import logs
from convoy.app.host.exits import ENGINE_LOST, NOTHING_TO_SERVE
from convoy.app.host.runtime import collect_only_what_comes, end_if_held_up, give_large_allocations_back, loop_factory
from convoy.app.processes.control import SERVING, Orderly, belong_to
from convoy.app.processes.desk import Desk
from convoy.app.processes.messages import Extent
from convoy.app.processes.orders import NO_SOCKET, CoreOrders, own_orders
from convoy.app.scheduling.slab import SharedPart
from convoy.app.settings import Settings
from convoy.models.errors import UsageError

_log = logging.getLogger("convoy")
_LOOK_EVERY_S = 0.02


def main(make_core: Callable[..., Core] = Core) -> int:
    """The process, from its orders to its end; the exit code. `make_core` is called as `Core` is."""
    orders = own_orders(CoreOrders)
    belong_to(orders.parent_pid)
    settings = Settings(**json.loads(orders.settings))
    logs.configure(settings.log_level)
    give_large_allocations_back()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_CoreProcess(orders, settings, make_core).run())


class _CoreProcess:
    """One core behind the edges."""

    def __init__(self, orders: CoreOrders, settings: Settings, make_core: Callable[..., Core]) -> None:
        self._orders, self._settings = orders, settings
        *edges, own = orders.parts
        memory = mmap.mmap(orders.memory_fd, 0)
        options = replace(settings.core_options(), shared_memory=SharedPart(memory, own.offset, own.nbytes))
        self._core = make_core(options, on_loaded=collect_only_what_comes, on_fatal=self._fatal)
        self._desk = Desk(self._core, [Extent(part.offset, part.nbytes) for part in edges])
        self._server = _Server(self._config(), self._open_desk)
        self._grpc = self._make_grpc()
        self._orderly = Orderly(orders.control_fd, leave=self._leave, drain=self._drain, exit_now=self._end)
        self._channel_server: asyncio.Server | None = None
        self._exit_code = 0

    async def run(self) -> int:
        self._orderly.line.listen()
        opening = [asyncio.ensure_future(self._open_grpc()), asyncio.ensure_future(self._tell_when_ready())]
        await self._server.serve(sockets=[socket.socket(fileno=self._orders.http_fd)])
        for task in opening:
            task.cancel()
        await self._close_grpc()
        end_if_held_up(self._exit_code)
        return self._exit_code

    def _config(self) -> uvicorn.Config:
        # The edges' gates log every call, with the address that it came from.
        options = replace(self._settings.edge_options(), access_log="off")
        return uvicorn.Config(
            create_app(self._core, options),
            http=guarded_protocol(replace(self._settings.connection_limits(), max_connections=1 << 20)),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
        )

    async def _open_desk(self) -> None:
        listener = socket.socket(fileno=self._orders.channel_fd)
        # The loop does not keep it, and one that nobody keeps hears nobody after the next garbage collection.
        self._channel_server = await asyncio.get_running_loop().create_unix_server(self._desk.receive, sock=listener)

    def _make_grpc(self) -> GrpcHost | None:
        if self._orders.grpc_fd == NO_SOCKET:
            return None
        holder = socket.socket(fileno=self._orders.grpc_fd)
        return GrpcHost(self._core, self._settings.edge_options(), holder, max_calls=self._settings.max_connections)

    async def _open_grpc(self) -> None:
        try:
            if self._grpc is not None:
                await self._grpc.open()
        except UsageError as error:
            _log.critical("%s", error)
            self._exit_code = error.exit_code
            self._end()

    async def _close_grpc(self) -> None:
        if self._grpc is not None:
            await self._grpc.close()

    async def _tell_when_ready(self) -> None:
        while not self._core.ready:  # noqa: ASYNC110 - of many things, and none of them announces it
            await asyncio.sleep(_LOOK_EVERY_S)
        self._orderly.line.say(SERVING)

    def _leave(self) -> None:
        self._core.leaving = True

    async def _drain(self) -> int:
        """Only the calls that came here; those of the edges are theirs to wait for, and are still run."""
        await self._core.drain(self._settings.drain_timeout_s)
        await self._close_grpc()
        return self._core.open_calls

    def _end(self) -> None:
        self._server.should_exit = True

    def _fatal(self, reason: str) -> None:
        _log.critical("%s", reason)
        if self._core.load_failure is not None:
            self._exit_code = NOTHING_TO_SERVE
            self._end()
        else:
            # A thread hangs inside the engine, so an orderly end might hang as well.
            logging.shutdown()
            os._exit(ENGINE_LOST)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; `on_started` runs when the core has started."""

    def __init__(self, config: uvicorn.Config, on_started: Any) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self._on_started()


if __name__ == "__main__":
    raise SystemExit(main())
