"""How many replicas there should be, from the load that replicas report.

Ray's own policy counts requests that pass through its wrapper, and hot paths bypass it. Neither the number of requests
nor the busy time of engines says how much a batching replica can take: see `CoreLoad`.

Pure: no clock, no I/O. Ray pickles this module by value, so it imports nothing of Convoy and keeps no state.
"""

from __future__ import annotations

import math
from typing import Any

# The keys of a replica's report, as `record_autoscaling_stats` returns them.
UTILISATION, WAITING_S, REQUESTS_PER_S = "utilisation", "waiting_s", "requests_per_s"


def replicas_for(demand: float, now: int, target_utilisation: float) -> int:
    """The number of replicas for `demand`, in units of fully busy replicas; `now` is the current number."""
    wanted = max(0, math.ceil(demand / target_utilisation - 1e-9))
    if wanted >= now:
        return wanted
    # Scale down only if the rest would be well below the target, which avoids oscillation.
    return min(now, math.ceil(demand / (target_utilisation * 0.85) - 1e-9))


def demand_of(utilisations: list[float], waiting_s: list[float]) -> float:
    """The demand in units of fully busy replicas: current work, and work to clear the backlog."""
    return sum(utilisations) + sum(waiting_s)  # the backlog should be cleared within a second


class ByUtilisation:
    """The policy in the form that Ray calls. Ray keeps its result within the configured bounds and delays."""

    def __init__(self, target_utilisation: float = 0.7) -> None:
        self._target = target_utilisation

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Ray's AutoscalingContext."""
        told = context.aggregated_metrics or {}
        utilisations = list(told.get(UTILISATION, {}).values())
        now = context.target_num_replicas
        if not utilisations:  # no replica has reported yet
            return max(now, context.capacity_adjusted_min_replicas), {}
        waiting_s = list(told.get(WAITING_S, {}).values())
        # Even an idle replica uses some CPU; without requests no replica is needed.
        is_asked = sum(told.get(REQUESTS_PER_S, {}).values()) > 0 or sum(waiting_s) > 0
        demand = demand_of(utilisations, waiting_s) if is_asked else 0.0
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(most, max(least, replicas_for(demand, now, self._target))), {}
