"""The process around a core: uvicorn, signals, exit codes.

    exit 0    drained after SIGTERM or SIGINT
         1    nothing could be served
         2    wrong usage
         70   an engine hung and could not be replaced; only a new process helps

`uvicorn convoy.app.server.main:app` serves the same application, with uvicorn's signal handling.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp

from convoy.app.config.reload import Reloading
from convoy.app.config.settings import Settings, read_settings
from convoy.app.core import Core
from convoy.app.grpc.opening import grpc_host
from convoy.app.http.application import create_app, hot_routes
from convoy.app.http.connection import guarded_protocol
from convoy.app.server import logs
from convoy.app.server.acceptor import Acceptor
from convoy.app.server.http_server import HttpServer, announce, listen, take_port, write_address
from convoy.app.server.runtime import (
    collect_only_what_comes,
    end_for,
    end_now,
    end_within,
    give_large_allocations_back,
    handle_signals,
    raise_file_limit,
    run,
)
from convoy.app.telemetry.outcomes import Refusal
from convoy.app.telemetry.start_tracing import check_tracing, start_tracing

_log = logging.getLogger("convoy")


def serve(settings: Settings, unknown_variables: Sequence[str] = ()) -> int:
    """Serve until told to stop. Returns the exit code. Raises UsageError.

    `unknown_variables` are environment variables that look like options but are not.
    """
    logs.configure(settings.log_level, settings.log_format)
    try:
        return _serve(settings, unknown_variables)
    finally:
        logs.flush()


def _serve(settings: Settings, unknown_variables: Sequence[str]) -> int:
    if unknown_variables:
        _log.warning("ignored unknown environment variables: %s", ", ".join(unknown_variables))
    if ignored := settings.sources.ignored:
        _log.debug("ignored environment variables of a Kubernetes Service: %s", ", ".join(ignored))
    _warn_of_edges(settings)
    raise_file_limit()
    give_large_allocations_back()
    listener = listen(settings.host, settings.port)
    if settings.address_file:
        write_address(settings.scheme, listener, Path(settings.address_file))
    if settings.tracing:
        check_tracing()  # before the server is announced
    return run(Host(settings, listener).run())


def _warn_of_edges(settings: Settings) -> None:
    if "edges" in settings.model_fields_set:
        _log.warning(
            "--edges (CONVOY_EDGES, or edges in the file) is deprecated and has no effect: one process serves. Remove "
            "it; the next minor version rejects it. To use more than one core, run replicas: see docs/scaling.md"
        )


class Host:
    """One core behind one uvicorn server, from the first signal to the last request.

    `make_core` is called like `Core`; tests pass their own engines that way.
    """

    def __init__(self, settings: Settings, listener: socket.socket, make_core: Callable[..., Core] = Core) -> None:
        self._settings = settings
        self._listener = listener
        self.core = make_core(settings.core_options(), on_loaded=collect_only_what_comes, on_fatal=self._fatal)
        self.core.trace_with(start_tracing(is_wanted=settings.tracing))
        options = settings.serve_options()
        self._is_open = options.is_open
        self._reloading = Reloading(settings, self.core, options)
        hot = hot_routes(self.core, options)
        limits = settings.connection_limits()
        protocol = guarded_protocol(limits, lambda: self.core.turned_away(Refusal.CONNECTIONS))
        acceptor = Acceptor(listener, limits, tls=lambda: options.tls)
        self._http = HttpServer(create_app(self.core, options, hot), protocol, acceptor)
        holder = take_port(settings.host, settings.grpc_port)
        self._grpc = grpc_host(self.core, options, hot.decoder, holder, max_calls=settings.max_connections)

    async def run(self) -> int:
        handle_signals(self._stop, self._reloading.read_again)
        host, port = self._listener.getsockname()[:2]
        announce(self._settings.scheme, host, port, is_open=self._is_open)
        collect_only_what_comes()
        return await self._grpc.serve_beside(self._http)

    async def _stop(self) -> None:
        """Not ready at once; then a pause for load balancers to notice; then finish what was accepted."""
        settings = self._settings
        self.core.leaving = True
        delay = f"; still serving for {settings.drain_delay_s:g} s" if settings.drain_delay_s else ""
        _log.info("shutting down: draining%s", delay)
        await asyncio.sleep(settings.drain_delay_s)
        if await self.core.drain(settings.drain_timeout_s):
            _log.info("shut down: all accepted requests were answered")
        else:
            _log.error("shut down: %d requests were not answered before the drain timeout", self.core.open_calls)
        end_within(10.0, lambda: self._http.exit_code)
        await self._grpc.close()
        self._http.stop()

    def _fatal(self, reason: str) -> None:
        end_for(reason, self._http.stop, is_lost=self.core.load_failure is None)


def _application() -> ASGIApp:
    """For `uvicorn convoy.app.server.main:app`: everything from the environment."""
    settings = read_settings({})
    logs.configure(settings.log_level, settings.log_format)
    _warn_of_edges(settings)

    def give_up(reason: str) -> None:
        end_for(reason, end_now, is_lost=core.load_failure is None)

    core = Core(settings.core_options(), on_loaded=collect_only_what_comes, on_fatal=give_up)
    core.trace_with(start_tracing(is_wanted=settings.tracing))
    return create_app(core, settings.serve_options())


def __getattr__(name: str) -> ASGIApp:
    # Built on access, so that importing this module reads no environment.
    if name == "app":
        return _application()
    raise AttributeError(name)
