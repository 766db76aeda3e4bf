"""The process around a core: uvicorn, signals, exit codes.

    exit 0    drained after SIGTERM or SIGINT
         1    nothing could be served
         2    called wrongly
         70   an engine hung and could not be replaced; only a new process helps

With edge processes this one becomes their supervisor, and the exit codes stay.

`uvicorn convoy.app.main:app` serves the same application, with uvicorn's own signal handling.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from convoy.app.core import Core
from convoy.app.edge.grpc.host import GrpcHost, take_port
from convoy.app.edge.http.application import create_app
from convoy.app.edge.http.connection import guarded_protocol
from convoy.app.edge.http.express import Express
from convoy.app.host import logs
from convoy.app.host.exits import ENGINE_LOST, NOTHING_TO_SERVE
from convoy.app.host.listening import announce, listen, write_address
from convoy.app.host.runtime import (
    collect_only_what_comes,
    end_if_held_up,
    end_within,
    give_large_allocations_back,
    loop_factory,
    raise_file_limit,
)
from convoy.app.processes.launch import become_supervisor
from convoy.app.settings import Settings, read_settings
from convoy.models.errors import UsageError

_log = logging.getLogger("convoy")
# What ends in good order needs less; what hangs is not waited for.
_GRACE_S = 10.0


def serve(settings: Settings) -> int:
    """Serve until told to stop; the exit code. Raises UsageError."""
    logs.configure(settings.log_level)
    raise_file_limit()
    give_large_allocations_back()
    listener = listen(settings.host, settings.port)
    if settings.address_file:
        write_address(listener, Path(settings.address_file))
    edges = settings.edge_count()
    if edges.count:
        _log.info("%d edge processes: %s", edges.count, edges.why)
        become_supervisor(settings, edges.count, listener)
    host = Host(settings, listener)
    # After everything that can be wrong with the call: such an error is one line.
    _log.info("no edge processes: %s", edges.why)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(host.run())


class Host:
    """One core behind one uvicorn server, from the first signal to the last request.

    `make_core` is called as `Core` is; tests give engines of their own that way.
    """

    def __init__(self, settings: Settings, listener: socket.socket, make_core: Callable[..., Core] = Core) -> None:
        self._settings = settings
        self._listener = listener
        self.core = make_core(settings.core_options(), on_loaded=collect_only_what_comes, on_fatal=self._fatal)
        express = Express(self.core, settings.edge_options())
        self._server = _Server(
            uvicorn.Config(
                create_app(self.core, settings.edge_options(), express),
                http=guarded_protocol(settings.connection_limits(), express),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._grpc = self._make_grpc(settings)
        self._stopping: asyncio.Task[None] | None = None
        self._exit_code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        announce(self._listener)
        collect_only_what_comes()
        opening = loop.create_task(self._open_grpc())
        await self._server.serve(sockets=[self._listener])
        opening.cancel()
        await self._close_grpc()
        end_if_held_up(self._exit_code)
        return self._exit_code

    def _make_grpc(self, settings: Settings) -> GrpcHost | None:
        if settings.grpc_port < 0:
            return None
        holder = take_port(settings.host, settings.grpc_port)
        return GrpcHost(self.core, settings.edge_options(), holder, max_calls=settings.max_connections)

    async def _open_grpc(self) -> None:
        try:
            if self._grpc is not None:
                await self._grpc.open()
        except UsageError as error:
            _log.critical("%s", error)
            self._exit_code = error.exit_code
            self._server.should_exit = True

    async def _close_grpc(self) -> None:
        if self._grpc is not None:
            await self._grpc.close()

    def _signalled(self, number: int) -> None:
        if self._stopping is not None:
            _log.warning("second signal: stopping at once")
            os._exit(128 + number)
        self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def _stop(self) -> None:
        """Not ready at once; then a pause for load balancers to notice; then finish what was accepted."""
        settings = self._settings
        self.core.leaving = True
        _log.info("stopping: not ready; serving on for %g s", settings.drain_delay_s)
        await asyncio.sleep(settings.drain_delay_s)
        if await self.core.drain(settings.drain_timeout_s):
            _log.info("stopped: every accepted request was answered")
        else:
            _log.error("stopped: %d requests were not answered in time", self.core.open_calls)
        end_within(_GRACE_S, lambda: self._exit_code)
        await self._close_grpc()
        self._server.should_exit = True

    def _fatal(self, reason: str) -> None:
        _log.critical("%s", reason)
        if self.core.load_failure is not None:
            self._exit_code = NOTHING_TO_SERVE
            self._server.should_exit = True
        else:
            # A thread hangs inside the engine, so an orderly end might hang as well.
            logging.shutdown()
            os._exit(ENGINE_LOST)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; ours drain first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _application() -> FastAPI:
    """For `uvicorn convoy.app.main:app`: everything from the environment."""
    settings = read_settings({})
    logs.configure(settings.log_level)

    def give_up(reason: str) -> None:
        _log.critical("%s", reason)
        logging.shutdown()
        os._exit(ENGINE_LOST if core.load_failure is None else NOTHING_TO_SERVE)

    core = Core(settings.core_options(), on_loaded=collect_only_what_comes, on_fatal=give_up)
    return create_app(core, settings.edge_options())


def __getattr__(name: str) -> FastAPI:
    # Built when it is asked for, so that importing this module reads no environment.
    if name == "app":
        return _application()
    raise AttributeError(name)
