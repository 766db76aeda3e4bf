"""How the values of one tensor are spread, in bounded memory however many there are.

The bins are symmetric around zero. A value beyond them doubles the range by merging bins in pairs, so that a
first batch of tiny values cannot make a later one cost gigabytes. Knows nothing of graphs or quantisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

BINS = 2048
# So many values of one tensor and batch are enough for its shape; the extremes are always taken from all.
_MOST_VALUES = 1 << 18


@dataclass(slots=True)
class ActivationHistogram:
    """`counts` int64 [BINS] over [-limit, limit]; `lowest` and `highest` are exact."""

    lowest: float = float("inf")
    highest: float = float("-inf")
    limit: float = 0.0
    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, values: np.ndarray) -> None:
        """Count finite float values of any shape. Raises ValueError for NaN or infinity."""
        flat = values.reshape(-1)
        if flat.size == 0:
            return
        low, high = float(flat.min()), float(flat.max())
        if not np.isfinite([low, high]).all():
            raise ValueError("not every value is finite")
        self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
        self._widen(max(abs(low), abs(high)))
        # An odd stride walks through all positions of a power-of-two map instead of hitting one column.
        stride = (flat.size // _MOST_VALUES) | 1
        self.counts += np.histogram(flat[::stride], BINS, (-self.limit, self.limit))[0]

    def percentile(self, percent: float) -> tuple[float, float]:
        """The range that holds `percent` of the values, as much cut off at each end."""
        cumulated = np.cumsum(self.counts) / max(1, self.counts.sum())
        cut = (100 - percent) / 200
        left = int(np.searchsorted(cumulated, cut))
        right = int(np.searchsorted(cumulated, 1 - cut)) + 1
        edges = np.linspace(-self.limit, self.limit, BINS + 1)
        return max(self.lowest, float(edges[left])), min(self.highest, float(edges[min(right, BINS)]))

    def coarse(self, bins: int) -> tuple[np.ndarray, np.ndarray]:
        """Counts [bins] and edges [bins + 1] with bins merged; `bins` divides BINS."""
        merged = self.counts.reshape(bins, -1).sum(axis=1)
        return merged, np.linspace(-self.limit, self.limit, bins + 1, dtype=np.float32)

    def _widen(self, limit: float) -> None:
        if self.limit == 0:
            # All zeros so far, if anything: they lie in the middle whatever the range is.
            self.limit = max(limit, float(np.finfo(np.float32).tiny))
        while self.limit < limit:
            pairs = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.concatenate([np.zeros(BINS // 4, np.int64), pairs, np.zeros(BINS // 4, np.int64)])
            self.limit *= 2
