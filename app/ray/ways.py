"""How requests came into a replica: past Ray's ASGI on its own connections, or by it; and the prefix of the latter."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Ways(Collector):
    """Counts of one replica; they belong to the loops that count, one each, and are read by any.

    `replica` is Ray's name of it: behind one address each look at the metrics may find another. `prefix` is the one
    under which Ray serves the application, learnt from each request that comes by ASGI and None until the first; Ray
    may change it while a replica lives.
    """

    def __init__(self, replica: str = "") -> None:
        self._replica = replica
        self.prefix: str | None = None
        self.direct = self.by_asgi = self.by_handle = 0

    def collect(self) -> Iterable[Metric]:
        text = "Requests to this replica of Ray Serve by the way that they took: direct, asgi or handle"
        family = CounterMetricFamily("convoy_ray_requests", text, labels=("way",))
        for way, count in (("direct", self.direct), ("asgi", self.by_asgi), ("handle", self.by_handle)):
            family.add_metric((way,), count)
        own = GaugeMetricFamily("convoy_ray_replica", "Which replica of Ray Serve this is: 1", labels=("replica",))
        own.add_metric((self._replica,), 1)
        return [family, own]
