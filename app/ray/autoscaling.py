"""How many replicas there should be, from what the replicas say of themselves.

Ray's own policy counts requests that go through its wrapper, and those on the direct way do not. And what replicas that
batch can bear is not told by how many requests they have, nor by how long their engines are busy: see `CoreLoad`.

Pure: no clock, no I/O. Ray pickles this module by value, so it imports nothing of ours and keeps nothing.
"""

from __future__ import annotations

import math
from typing import Any

# What a replica reports; `record_autoscaling_stats` gives these names.
UTILISATION, WAITING_S, REQUESTS_PER_S = "utilisation", "waiting_s", "requests_per_s"


def replicas_for(demand: float, now: int, target_utilisation: float) -> int:
    """How many replicas bear `demand`, in replicas that are wholly busy; there are `now`."""
    wanted = max(0, math.ceil(demand / target_utilisation - 1e-9))
    if wanted >= now:
        return wanted
    # Replicas are taken away only where the rest would be well below the target, or they would come and go.
    return min(now, math.ceil(demand / (target_utilisation * 0.85) - 1e-9))


def demand_of(utilisations: list[float], waiting_s: list[float]) -> float:
    """In replicas that are wholly busy: what they do, and what they should do beside it to catch up."""
    return sum(utilisations) + sum(waiting_s)  # what waits is to be worked off within a second


class ByUtilisation:
    """The policy as Ray calls it. Ray keeps what it gives within its bounds, and waits before it acts."""

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
        # An idle replica still costs its process something; without requests no replica is needed.
        is_asked = sum(told.get(REQUESTS_PER_S, {}).values()) > 0 or sum(waiting_s) > 0
        demand = demand_of(utilisations, waiting_s) if is_asked else 0.0
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(most, max(least, replicas_for(demand, now, self._target))), {}
