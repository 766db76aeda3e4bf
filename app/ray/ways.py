"""How requests came into a replica: past Ray's ASGI on its own connections, or by it."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class Ways(Collector):
    """Counts of one replica; they belong to the loops that count, one each, and are read by any."""

    def __init__(self) -> None:
        self.direct = self.by_asgi = self.by_handle = 0

    def collect(self) -> Iterable[Metric]:
        text = "Requests to this replica of Ray Serve by the way that they took: direct, asgi or handle"
        family = CounterMetricFamily("convoy_ray_requests", text, labels=("way",))
        for way, count in (("direct", self.direct), ("asgi", self.by_asgi), ("handle", self.by_handle)):
            family.add_metric((way,), count)
        return [family]
