"""The deployment that Ray Serve runs, and one replica of it: a core in a process of Ray's.

Ray creates a replica, checks its health, routes requests to it and ends it. A core that cannot recover does not end the
process, as it does in `convoy serve`: it fails Ray's health check, and Ray replaces the replica.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp

from convoy.app.core import Core
from convoy.app.http.application import create_app, hot_routes
from convoy.app.http.connection import guarded_protocol
from convoy.app.lifecycle.load_watch import batch_speed
from convoy.app.python.inside import Asking
from convoy.app.ray.arguments import AppArguments, replica_settings
from convoy.app.ray.autoscaling import REQUESTS_PER_S, UTILISATION, WAITING_S, ByUtilisation
from convoy.app.ray.connections import HotPaths, Ingress, Ways, take_connections
from convoy.app.ray.handle import HandleCalls
from convoy.app.server import logs
from convoy.app.server.runtime import collect_only_what_comes, give_large_allocations_back, raise_file_limit
from convoy.app.telemetry.outcomes import Refusal
from convoy.app.telemetry.start_tracing import start_tracing

_log = logging.getLogger("convoy")
_THROUGH_PYTHON = (
    "requests pass through Ray's Python proxy, which costs about 40 times more than Convoy itself; set "
    "RAY_SERVE_ENABLE_HA_PROXY=1 and RAY_SERVE_THROUGHPUT_OPTIMIZED=1 on every node, before `ray start`"
)
_ROUTERS = {"expected-finish": "convoy.app.ray.router:ExpectedFinishRouter"}


class ReplicaUnwell(Exception):
    """A failed health check."""


class Replica(HandleCalls):
    """Used on the event loop on which Ray runs user code."""

    def __init__(self, given: dict[str, object]) -> None:
        """`given` comes from `AppArguments.server_options`. Raises UsageError."""
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
        """Return the application when the core is ready. Raises ReplicaUnwell if it never will be."""
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
        """Raise ReplicaUnwell with the reason if the core is not healthy."""
        self._raise_if_lost()
        if not self._core.ready and not self._core.leaving:
            raise ReplicaUnwell(self._core.not_ready_reason())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the replica's load for the policy in `autoscaling`."""
        load = self._core.current_load()
        return {UTILISATION: load.utilisation, WAITING_S: load.waiting_s, REQUESTS_PER_S: load.requests_per_s}

    async def record_routing_stats(self) -> dict[str, float]:
        """Report the replica's speed for the router in `router`."""
        speed = batch_speed(self._core.catalog)
        return {} if speed is None else speed._asdict()

    async def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if not await self._core.drain(self._settings.drain_timeout_s):
            _log.error("shut down: %d requests were not answered before the drain timeout", self._core.open_calls)
        self._hot.close()
        await self._core.stop()

    def _is_lost(self, reason: str) -> None:
        """Note that the core is lost. Called from any thread."""
        _log.critical("%s", reason)
        self._fatal = self._fatal or reason

    def _raise_if_lost(self) -> None:
        if self._fatal is not None:
            raise ReplicaUnwell(self._fatal)


def application(arguments: AppArguments) -> serve.Application:
    """The deployment with its arguments bound, for `serve.run` and `serve deploy`."""
    # Not a decorator: replicas must be able to import the class under its own name.
    deployment: Any = serve.deployment(serve.ingress()(Replica), **_options(arguments))
    return deployment.bind(arguments.server_options())


def _options(given: AppArguments) -> dict[str, Any]:
    options: dict[str, Any] = {
        "name": given.name,
        "max_ongoing_requests": given.max_ongoing_requests,
        "health_check_period_s": given.health_check_period_s,
        "health_check_timeout_s": given.health_check_timeout_s,
        "graceful_shutdown_timeout_s": given.graceful_shutdown_timeout_s,
        "ray_actor_options": {
            "num_cpus": given.num_cpus,
            "num_gpus": given.num_gpus,
            "resources": given.resources,
        },
        # Convoy has its own log, and Ray's line per request costs a fifth of the throughput.
        "logging_config": {"enable_access_log": False},
    }
    if given.max_replicas is None:
        options["num_replicas"] = given.num_replicas or 1
    else:
        options["autoscaling_config"] = {
            "min_replicas": 1 if given.min_replicas is None else given.min_replicas,
            "max_replicas": given.max_replicas,
            "upscale_delay_s": given.upscale_delay_s,
            "downscale_delay_s": given.downscale_delay_s,
            "metrics_interval_s": given.metrics_interval_s,
            "look_back_period_s": given.look_back_period_s,
            "policy": {
                "policy_function": f"{ByUtilisation.__module__}:{ByUtilisation.__name__}",
                "policy_kwargs": {"target_utilisation": given.target_utilisation},
            },
        }
    if given.max_replicas_per_node is not None:
        options["max_replicas_per_node"] = given.max_replicas_per_node
    if given.placement_bundles:
        options["placement_group_bundles"] = given.placement_bundles
        options["placement_group_strategy"] = given.placement_strategy
    if given.router:
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=_ROUTERS[given.router], request_routing_stats_period_s=5.0
        )
    return options
