"""The router of deployment handles for replicas of different speed: the next request goes where it should finish first.

The rule is in `scheduling.routing`. Replicas report their speed now and then. The number of outstanding requests is
Ray's own count per handle, which excludes requests over HTTP. Ray accepts no router for a deployment behind its
HAProxy, which balances by itself; this one is for deployments that are called through handles.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, RequestRouter

from convoy.app.scheduling.routing import BatchSpeed, ranked


class ExpectedFinishRouter(FIFOMixin, RequestRouter):
    """Created by Ray in each process that has a handle."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Every replica, the best first, each in a rank of its own."""
        queues = self.replica_queue_len_cache
        outstanding = [queues.get(replica.replica_id) or 0 for replica in candidate_replicas]
        order = ranked(outstanding, [_speed(replica.routing_stats) for replica in candidate_replicas])
        return [[candidate_replicas[index]] for index in order]


def _speed(stats: dict[str, Any]) -> BatchSpeed | None:
    """The speed that a replica has reported; None at first."""
    if not stats:
        return None
    return BatchSpeed(float(stats["fixed_s"]), float(stats["per_sample_s"]), int(stats["max_batch"]))
