"""How long a batch will take on one lane, learned from how long batches took.

The shape is `a + c * b` beyond a knee and flat before it, so a table with straight lines between powers of
two fits better than one line; a size beyond the table follows the last segment. Estimates carry a margin,
the worst recent ratio of measured to expected time within bounds, as in Clockwork (Gujarati et al., OSDI
2020), because a prediction that is late is worse than one that is early.

Sizes that were slow once would be avoided for ever, and with them the chance to learn that they are fast
again. Two things prevent it. What is believed of one size bounds the others: a batch may not be thought much
dearer than the same samples in smaller batches, nor a small batch dearer than a large one. And every batch
teaches a little about all sizes, as if the whole profile had become slower or faster by the same factor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

from convoy.app.scheduling.request import MILLISECOND_NS

# Before anything was measured: low, so that the first requests are admitted and teach the truth.
UNKNOWN_NS = 1 * MILLISECOND_NS
_WEIGHT = 0.2
# Enough to forget a disturbance in some hundred batches, too little to drown what a size says of itself.
_WEIGHT_FOR_OTHERS = 0.02
_RECENT = 10
_MARGIN_BOUNDS = (1.0, 1.5)
# The other way round, for what must be ready when a batch ends: the fastest recent one and a little less.
_SOONEST_BOUNDS = (0.5, 0.98)
_SOONER_STILL = 0.95
_SOONEST_UNKNOWN = 0.75
# One batch that took thirty times the usual says more about a hiccup than about the next batch.
_OUTLIER_RATIO = 4.0
# Caches make real tables bend a little against both bounds; within this factor they may.
_SLACK = 1.5


class LatencyModel:
    """Expected nanoseconds by number of samples. `measured_ns` is a profile of batches that ran alone."""

    def __init__(self, measured_ns: Mapping[int, float] | None = None) -> None:
        self._profile = _Table({size: max(1.0, value) for size, value in (measured_ns or {}).items()})
        self._table = _Table(dict(self._profile.values))
        self._ratios: deque[float] = deque(maxlen=_RECENT)
        # Asked several times for every request, and the same until the next batch has ended.
        self._predicted_ns: dict[int, int] = {}

    def expect_ns(self, samples: int) -> int:
        """The plain expectation, without margin."""
        return int(self._table.at(samples))

    def predict_ns(self, samples: int) -> int:
        """The expectation with its margin: what promises are made from."""
        known = self._predicted_ns.get(samples)
        if known is None:
            known = self._predicted_ns[samples] = int(self._table.at(samples) * self.margin)
        return known

    def soonest_ns(self, samples: int) -> int:
        """What it takes when it goes as well as lately at best."""
        low, high = _SOONEST_BOUNDS
        recent = _SOONER_STILL * min(self._ratios) if self._ratios else _SOONEST_UNKNOWN
        return int(self._table.at(samples) * min(high, max(low, recent)))

    @property
    def margin(self) -> float:
        low, high = _MARGIN_BOUNDS
        return min(high, max(low, max(self._ratios, default=low)))

    def observe(self, samples: int, took_ns: int) -> None:
        """Learn from one batch that ran alone on the lane."""
        self._predicted_ns.clear()
        below, above = _powers_around(samples)
        if not self._table.sizes:
            self._table.set(above, float(max(1, took_ns)))
            return
        self._table.add_knot(below)
        self._table.add_knot(above)
        expected = self._table.at(samples)
        self._ratios.append(took_ns / expected)
        surprise = min(took_ns / expected, _OUTLIER_RATIO) - 1.0
        weights = self._table.weights(samples)
        norm = sum(weight * weight for weight in weights.values())
        for size, weight in weights.items():
            self._table.set(size, self._table.at(size) * (1.0 + _WEIGHT * surprise * weight / norm))
        self._teach_others(samples)

    def _teach_others(self, samples: int) -> None:
        now_ns, values = self._table.at(samples), self._table.values
        factor = now_ns / self._profile.at(samples)
        for size, value in values.items():
            if self._profile.sizes:
                value += _WEIGHT_FOR_OTHERS * (factor * self._profile.at(size) - value)
            value = min(value, _SLACK * now_ns if size < samples else _SLACK * now_ns * size / samples)
            if size >= samples:
                value = max(value, now_ns / _SLACK)
            values[size] = max(1.0, value)


class _Table:
    """Nanoseconds at some sizes, straight lines between them."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values = values
        self.sizes = sorted(values)

    def set(self, size: int, value: float) -> None:
        if size not in self.values:
            self.sizes = sorted([*self.sizes, size])
        self.values[size] = max(1.0, value)

    def add_knot(self, size: int) -> None:
        if size not in self.values:
            self.set(size, self.at(size))

    def at(self, samples: int) -> float:
        if samples in self.values:
            return self.values[samples]
        sizes = self.sizes
        if not sizes:
            return float(UNKNOWN_NS)
        if samples < sizes[0]:
            return self.values[sizes[0]]
        if samples < sizes[-1]:
            return sum(weight * self.values[size] for size, weight in self.weights(samples).items())
        last = self.values[sizes[-1]]
        if len(sizes) == 1:
            # One point says nothing about the slope; proportional is the safe guess upwards.
            return last * samples / sizes[0]
        slope = (last - self.values[sizes[-2]]) / (sizes[-1] - sizes[-2])
        return last + max(0.0, slope) * (samples - sizes[-1])

    def weights(self, samples: int) -> dict[int, float]:
        """How much each knot says about a size inside the table."""
        if samples in self.values:
            return {samples: 1.0}
        position = bisect_left(self.sizes, samples)
        low, high = self.sizes[position - 1], self.sizes[position]
        share = (samples - low) / (high - low)
        return {low: 1.0 - share, high: share}


def _powers_around(samples: int) -> tuple[int, int]:
    """The largest power of two that is not above, the smallest that is not below."""
    above = 1 << (samples - 1).bit_length()
    return (above if above == samples else above >> 1), above
