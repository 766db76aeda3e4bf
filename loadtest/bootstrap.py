"""How sure the figures are: 95 % confidence intervals that know of queues.

Latencies of neighbouring requests are alike (they stood in the same queue), so formulas for independent
samples give intervals that are far too narrow. The run is cut into equal blocks of time; whole blocks are
drawn anew with replacement, and each figure is taken of what was drawn (block bootstrap with blocks that do
not overlap: Carlstein, Annals of Statistics 14(3), 1986; Künsch, ibid. 17(3), 1989; percentile intervals).
The intervals hold as far as what happens in one block does not reach beyond its neighbour. Pure; the same
rows give the same intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convoy.loadtest.units import NS_PER_S

RESAMPLES = 500
MOST_BLOCKS = 50
LEAST_BLOCKS = 10
LEAST_BLOCK_S = 0.1
# Latencies are counted by block and by bin; finer at the upper end, where the percentiles of interest are.
BINS = 2000

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """95 % of the resampled figures lie within."""

    low: float
    high: float


class Blocks:
    """A window cut into blocks, and every figure's interval over the same resamples."""

    def __init__(self, start_ns: int, end_ns: int) -> None:
        self._start_ns = start_ns
        self._seconds = max(0, end_ns - start_ns) / NS_PER_S
        self._count = min(MOST_BLOCKS, int(self._seconds / LEAST_BLOCK_S))
        self._possible = self._count >= LEAST_BLOCKS
        if self._possible:
            self._weights = _draws(self._count)

    def rate_interval(self, times_ns: Integers) -> ConfidenceInterval | None:
        """Of events per second."""
        if not self._possible:
            return None
        return _interval(self._weights @ self._counts(times_ns) / self._seconds)

    def share_interval(self, some_ns: Integers, all_ns: Integers) -> ConfidenceInterval | None:
        """Of how many of all are among some."""
        if not self._possible or not len(all_ns):
            return None
        drawn = self._weights @ self._counts(all_ns)
        return _interval((self._weights @ self._counts(some_ns))[drawn > 0] / drawn[drawn > 0])

    def percentile_intervals(
        self, times_ns: Integers, values: Integers, shares: Sequence[float]
    ) -> list[ConfidenceInterval | None]:
        """Of the percentile at each share (0.99 for p99) of values that belong to `times_ns`."""
        if not self._possible or not len(values):
            return [None] * len(shares)
        edges = _edges(np.sort(values))
        cells = self._block_of(times_ns) * len(edges) + np.searchsorted(edges, values)
        counts = np.bincount(cells, minlength=self._count * len(edges)).reshape(self._count, len(edges))
        reached = np.cumsum(self._weights @ counts, axis=1)
        return [_interval(_percentile_of_each(reached, edges, share)) for share in shares]

    def _block_of(self, times_ns: Integers) -> Integers:
        blocks = ((times_ns - self._start_ns) / (self._seconds * NS_PER_S) * self._count).astype(np.int64)
        return np.clip(blocks, 0, self._count - 1)

    def _counts(self, times_ns: Integers) -> Floats:
        return np.bincount(self._block_of(times_ns), minlength=self._count).astype(np.float64)


def ratio_interval(above: Floats, below: Floats) -> ConfidenceInterval | None:
    """Of the sum of `above` over the sum of `below`, of which each block has one; None for fewer than ten blocks."""
    count = len(above)
    if count < LEAST_BLOCKS:
        return None
    weights = _draws(count)
    totals = weights @ below
    some = totals > 0
    return _interval((weights @ above)[some] / totals[some]) if some.any() else None


def _draws(count: int) -> Floats:
    """How often each of `count` blocks is in each resample."""
    return np.random.default_rng(0).multinomial(count, [1 / count] * count, RESAMPLES).astype(np.float64)


def _edges(ascending: Integers) -> Integers:
    """Values that bound the bins from above; every value is one where there are few."""
    count = len(ascending)
    even = np.linspace(0, count - 1, BINS)
    late = count - np.geomspace(1, count, BINS)
    return np.unique(ascending[np.union1d(even, late).astype(np.int64)])


def _percentile_of_each(reached: Floats, edges: Integers, share: float) -> Floats:
    """The nearest-rank percentile of each resample; those that drew nothing are left out."""
    totals = reached[:, -1]
    some = totals > 0
    bins = (reached[some] < share * totals[some, None] - 1e-9).sum(axis=1)
    percentiles: Floats = edges[bins].astype(np.float64)
    return percentiles


def _interval(figures: Floats) -> ConfidenceInterval:
    low, high = np.percentile(figures, [2.5, 97.5])
    return ConfidenceInterval(float(low), float(high))
