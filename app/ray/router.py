"""The router of handles for replicas that differ: the next request goes where it is expected to be done first.

Its rule is `scheduling.routing`. How fast a replica is it learns from the replica every now and then, which may be old;
how many requests are at it from Ray's own count, which goes up as a request is sent and down as it ends. That count has
nothing of what came to a replica over HTTP, and Ray takes no router of ours for a deployment behind its HAProxy, which
balances by itself: this one is for deployments that are asked by handles.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, RequestRouter

from convoy.app.scheduling.routing import BatchSpeed, ranked


class ExpectedFinishRouter(FIFOMixin, RequestRouter):
    """What Ray makes in each process that has a handle."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Every replica, the best first, each in a rank of its own."""
        queues = self.replica_queue_len_cache
        outstanding = [queues.get(replica.replica_id) or 0 for replica in candidate_replicas]
        order = ranked(outstanding, [_speed(replica.routing_stats) for replica in candidate_replicas])
        return [[candidate_replicas[index]] for index in order]


def _speed(stats: dict[str, Any]) -> BatchSpeed | None:
    """What a replica has told, which is nothing at first."""
    if not stats:
        return None
    return BatchSpeed(float(stats["fixed_s"]), float(stats["per_sample_s"]), int(stats["max_batch"]))
