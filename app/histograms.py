"""A Prometheus histogram for one thread: a bisection and two additions per value.

The client library's own takes a lock per bucket and per sum, several times what a value is worth on a route
where each microsecond counts. Everything here is counted and rendered on the event loop, so none is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Distribution:
    """One series: how many values fell at or below each of `bounds` (ascending), or above all of them."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        counts, bounds = self.counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.total += value


class Histogram(Collector):
    """Distributions by label values."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._documentation, self._labels, self._bounds = name, documentation, labels, bounds
        self._series: dict[tuple[str, ...], Distribution] = {}

    def at(self, *values: str) -> Distribution:
        """The series with these label values; it begins empty."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Distribution(self._bounds)
        return found

    def forget(self, *first: str) -> None:
        """End every series whose first label values are these."""
        self._series = {key: one for key, one in self._series.items() if key[: len(first)] != first}

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        bounds = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        for values, one in self._series.items():
            buckets = list(zip(bounds, map(float, accumulate(one.counts)), strict=True))
            family.add_metric(list(values), buckets, one.total)
        return [family]
