"""One replica: a core in a process of Ray's.

Ray makes it, asks whether it is well, leads requests to it, and ends it. A core that cannot be mended does not end the
process, as it does in `convoy serve`: it fails Ray's health check from then on, and Ray replaces the replica.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial

from ray import serve
from starlette.types import ASGIApp

from convoy.app.core import Core
from convoy.app.http.application import create_app, hot_routes
from convoy.app.http.connection import guarded_protocol
from convoy.app.lifecycle.load_watch import batch_speed
from convoy.app.python.inside import Asking
from convoy.app.ray.arguments import replica_settings
from convoy.app.ray.autoscaling import REQUESTS_PER_S, UTILISATION, WAITING_S
from convoy.app.ray.connections import HotPaths, Ingress, take_connections
from convoy.app.ray.handle import HandleCalls
from convoy.app.ray.ways import Ways
from convoy.app.server import logs
from convoy.app.server.runtime import collect_only_what_comes, give_large_allocations_back, raise_file_limit
from convoy.app.telemetry.outcomes import Refusal
from convoy.app.telemetry.start_tracing import start_tracing

_log = logging.getLogger("convoy")
_THROUGH_PYTHON = (
    "requests come through Ray's Python proxy, which costs some 40 times what they cost here; set "
    "RAY_SERVE_ENABLE_HA_PROXY=1 and RAY_SERVE_THROUGHPUT_OPTIMIZED=1 on every node, before `ray start`"
)


class ReplicaUnwell(Exception):
    """What Ray hears from a health check that failed."""


class Replica(HandleCalls):
    """Belongs to the event loop on which Ray runs users' code."""

    def __init__(self, given: dict[str, object]) -> None:
        """`given` is what `AppArguments.server_options` gave. Raises UsageError."""
        settings = self._settings = replica_settings(given)
        logs.configure_own(settings.log_level, settings.log_format)
        raise_file_limit()
        give_large_allocations_back()
        self._fatal: str | None = None
        self._has_ended = False
        core = self._core = Core(settings.core_options(), on_loaded=collect_only_what_comes, on_fatal=self._is_lost)
        core.trace_with(start_tracing(is_wanted=settings.tracing))
        self._options = settings.serve_options()
        self._hot = hot_routes(core, self._options)
        self._ways = Ways(serve.get_replica_context().replica_tag)
        core.metrics.registry.register(self._ways)
        self._asking = Asking(core, self._hot.decoder, self._options, settings.max_queue)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application, once the core is ready. Raises ReplicaUnwell where it never will be."""
        await self._core.start()
        while not self._core.ready:
            self._raise_if_lost()
            await asyncio.sleep(0.02)
        if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
            _log.warning("%s", _THROUGH_PYTHON)
        app = create_app(self._core, self._options, self._hot)
        on_too_many = partial(self._core.turned_away, Refusal.CONNECTIONS)
        protocol = guarded_protocol(self._settings.connection_limits(), on_too_many)
        take_connections(protocol, HotPaths(app, self._hot, self._ways))
        return Ingress(app, self._ways, self._end)

    async def check_health(self) -> None:
        """Raises ReplicaUnwell with the reason."""
        self._raise_if_lost()
        if not self._core.ready and not self._core.leaving:
            raise ReplicaUnwell(self._core.not_ready_reason())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """How loaded this replica is, for the policy of `autoscaling`."""
        load = self._core.current_load()
        return {UTILISATION: load.utilisation, WAITING_S: load.waiting_s, REQUESTS_PER_S: load.requests_per_s}

    async def record_routing_stats(self) -> dict[str, float]:
        """How fast this replica is, for the router of `router`."""
        speed = batch_speed(self._core.catalog)
        return {} if speed is None else speed._asdict()

    async def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if not await self._core.drain(self._settings.drain_timeout_s):
            _log.error("stopped: %d requests were not answered in time", self._core.open_calls)
        self._hot.close()
        await self._core.stop()

    def _is_lost(self, reason: str) -> None:
        """From any thread."""
        _log.critical("%s", reason)
        self._fatal = self._fatal or reason

    def _raise_if_lost(self) -> None:
        if self._fatal is not None:
            raise ReplicaUnwell(self._fatal)
