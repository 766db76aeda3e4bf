"""How long a batch will take on one lane, learned from how long batches took.

The shape is `a + c * b` beyond a knee and flat before it, so a table over powers of two with straight
lines between them fits better than one line; a size beyond the table follows the last segment. Estimates
carry a margin, the worst recent ratio of measured to expected time within bounds, as in Clockwork
(Gujarati et al., OSDI 2020), because a prediction that is late is worse than one that is early.

What one size teaches bounds what is believed of the others: a batch may not be thought much dearer than
the same samples in smaller batches, nor a small batch dearer than a large one. Without that, sizes that
were slow once would be avoided for ever, and with them the chance to learn that they are fast again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

from app.scheduling.request import MILLISECOND_NS

# Before anything was measured: low, so that the first requests are admitted and teach the truth.
UNKNOWN_NS = 1 * MILLISECOND_NS
_WEIGHT = 0.2
_RECENT = 10
_MARGIN_BOUNDS = (1.02, 1.5)
# One batch that took thirty times the usual says more about a hiccup than about the next batch.
_OUTLIER_RATIO = 4.0
# Caches make real tables bend a little against both bounds; within this factor they may.
_SLACK = 1.5


class LatencyModel:
    """Expected nanoseconds by number of samples."""

    def __init__(self, measured_ns: Mapping[int, float] | None = None) -> None:
        self._table: dict[int, float] = dict(measured_ns or {})
        self._sizes: list[int] = sorted(self._table)
        self._ratios: deque[float] = deque(maxlen=_RECENT)

    def expect_ns(self, samples: int) -> int:
        """The plain expectation, without margin."""
        sizes = self._sizes
        if not sizes:
            return UNKNOWN_NS
        position = bisect_left(sizes, samples)
        if position < len(sizes) and sizes[position] == samples:
            return int(self._table[samples])
        if len(sizes) == 1:
            # One point says nothing about the slope; proportional is the safe guess upwards.
            return int(self._table[sizes[0]] * max(1.0, samples / sizes[0]))
        if position == 0:
            return int(self._table[sizes[0]])
        low = min(position - 1, len(sizes) - 2)
        return int(self._on_line(sizes[low], sizes[low + 1], samples))

    def predict_ns(self, samples: int) -> int:
        """The expectation with its margin: what promises are made from."""
        return int(self.expect_ns(samples) * self.margin)

    @property
    def margin(self) -> float:
        low, high = _MARGIN_BOUNDS
        return min(high, max(low, max(self._ratios, default=low)))

    def observe(self, samples: int, took_ns: int) -> None:
        """Learn from one batch that ran alone on the lane."""
        knot = 1 << max(0, samples - 1).bit_length()
        if not self._sizes:
            self._set(samples, took_ns)
            return
        expected = max(1, self.expect_ns(samples))
        ratio = took_ns / expected
        self._ratios.append(ratio)
        # The knot moves by the same ratio, so a batch of 5 improves what is known of 8.
        known = self._table.get(knot, float(self.expect_ns(knot)))
        self._set(knot, known * (1 + _WEIGHT * (min(ratio, _OUTLIER_RATIO) - 1)))

    def _set(self, samples: int, value_ns: float) -> None:
        if samples not in self._table:
            self._sizes = sorted([*self._sizes, samples])
        value_ns = self._table[samples] = max(1.0, value_ns)
        for size in self._sizes:
            bound = _SLACK * value_ns * max(1.0, size / samples)
            self._table[size] = min(self._table[size], bound)

    def _on_line(self, low: int, high: int, samples: int) -> float:
        slope = max(0.0, (self._table[high] - self._table[low]) / (high - low))
        base = high if samples > high else low
        return self._table[base] + slope * (samples - base)
