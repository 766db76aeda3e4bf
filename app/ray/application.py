"""The application that Ray Serve runs: one deployment of replicas, each with a core."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from convoy.app.ray.arguments import AppArguments
from convoy.app.ray.autoscaling import ByUtilisation
from convoy.app.ray.replica import Replica

_ROUTERS = {"expected-finish": "convoy.app.ray.router:ExpectedFinishRouter"}


def application(arguments: AppArguments) -> serve.Application:
    """The deployment with its arguments bound, for `serve.run` and `serve deploy`."""
    # Not as decorators: under its own name the class must stay what a replica can import.
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
        # Convoy has a log of its own, and a line for each request costs a fifth of it.
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
