"""A Prometheus histogram for one thread: values are buffered, and sorted into buckets many at a time.

The client library's own takes a lock per bucket and per sum, several times what a value is worth on a route
where each microsecond counts. Everything here is counted and rendered on the event loop, so none is needed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar


class Distribution:
    """One series: how many values fell at or below each of `bounds` (ascending), or above all of them.

    Values are given in units of which `per_unit` make one of the bounds' units.
    """

    def __init__(self, bounds: Sequence[float], per_unit: float) -> None:
        self._bounds = np.array(bounds, np.float64)
        self._per_unit = per_unit
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total: float = 0  # in the values' own unit: whole ones are added exactly
        self._unsorted: list[float] = []
        self.exemplars: dict[int, Exemplar] = {}  # the last one of a bucket, by its number

    def exemplify(self, value: float, labels: dict[str, str]) -> None:
        """One of the values that were observed is an example, which these labels lead to."""
        in_unit = value / self._per_unit
        self.exemplars[int(np.searchsorted(self._bounds, in_unit))] = Exemplar(labels, in_unit, time.time())

    def observe(self, *values: float) -> None:
        self._unsorted += values
        if len(self._unsorted) > 1024:
            self.sorted()

    def sorted(self) -> tuple[np.ndarray, float]:
        """How many values there are by bucket, of which the last has no bound, and their sum in the bounds' unit."""
        if self._unsorted:
            buckets = np.searchsorted(self._bounds, np.array(self._unsorted, np.float64) / self._per_unit)
            self._counts += np.bincount(buckets, minlength=len(self._counts))
            self._total += sum(self._unsorted)
            self._unsorted = []
        return self._counts, self._total / self._per_unit


class Histogram(Collector):
    """Distributions by label values. Values are given in units of which `per_unit` make one of the bounds'."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float], *, per_unit: float = 1.0
    ) -> None:
        self._name, self._documentation, self._labels, self._bounds = name, documentation, labels, bounds
        self._per_unit = per_unit
        self._series: dict[tuple[str, ...], Distribution] = {}

    def at(self, *values: str) -> Distribution:
        """The series with these label values; it begins empty."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Distribution(self._bounds, self._per_unit)
        return found

    def forget(self, *first: str) -> None:
        """End every series whose first label values are these."""
        self._series = {key: one for key, one in self._series.items() if key[: len(first)] != first}

    def family(self, name: str, documentation: str, labels: int) -> HistogramMetricFamily:
        """The series for Prometheus; those with the same first `labels` label values are added up."""
        family = HistogramMetricFamily(name, documentation, labels=self._labels[:labels])
        bounds = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        together: defaultdict[tuple[str, ...], list[Distribution]] = defaultdict(list)
        for values, one in self._series.items():
            together[values[:labels]].append(one)
        for values, series in together.items():
            counts, totals = zip(*(one.sorted() for one in series), strict=True)
            buckets: list[Any] = [
                (bound, float(count), _latest([one.exemplars[number] for one in series if number in one.exemplars]))
                for number, (bound, count) in enumerate(zip(bounds, np.sum(counts, axis=0).cumsum(), strict=True))
            ]
            family.add_metric(list(values), buckets, sum(totals))
        return family

    def collect(self) -> Iterable[Metric]:
        return [self.family(self._name, self._documentation, len(self._labels))]


def _latest(exemplars: Sequence[Exemplar]) -> Exemplar | None:
    return max(exemplars, key=lambda one: float(one.timestamp or 0), default=None)
