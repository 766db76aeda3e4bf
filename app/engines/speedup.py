"""What measured milliseconds mean: the line through them, the speed-up with its doubt, and whether it pays.

Pure arithmetic, one definition for export, which writes it down, and for the server, which measures where
nothing was written down. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from convoy.models.bundle import Interval, LatencyPoint, LatencyTable

# A quantised variant must be faster beyond doubt, or the exact one serves.
WORTHWHILE_SPEEDUP = 1.02


@dataclass(frozen=True, slots=True)
class Line:
    """A batch of b samples takes `fixed_ms` + `per_sample_ms` * b; neither is negative."""

    fixed_ms: float
    per_sample_ms: float

    def at(self, batch_size: float) -> float:
        """Milliseconds."""
        return self.fixed_ms + self.per_sample_ms * batch_size


def fit_line(points: Sequence[LatencyPoint]) -> Line | None:
    """The line with the least sum of absolute relative errors to the medians; None through fewer than two points.

    Relative, because 1 ms is much for one sample and little for 64; absolute, because one disturbed size must
    not bend the line. Such an optimum passes through two of the points, or through one of them where it is held
    to be not negative (Bloomfield & Steiger, Least Absolute Deviations, 1983), so trying all of these finds it.
    """
    if len(points) < 2:
        return None
    return min(_lines(points), key=lambda line: sum(abs(line.at(p.batch_size) / p.median_ms - 1) for p in points))


def _lines(points: Sequence[LatencyPoint]) -> Iterator[Line]:
    for point in points:
        yield Line(0.0, point.median_ms / point.batch_size)
        yield Line(point.median_ms, 0.0)
    for one, other in combinations(points, 2):
        slope = (other.median_ms - one.median_ms) / (other.batch_size - one.batch_size)
        fixed = one.median_ms - slope * one.batch_size
        if slope >= 0 and fixed >= 0:
            yield Line(fixed, slope)


def paired_speedup(reference_ms: Sequence[np.ndarray], own_ms: Sequence[np.ndarray], *, seed: int = 0) -> Interval:
    """How many times faster than the reference, over all batch sizes, with a 95 % interval.

    Both hold one float array [rounds] of milliseconds per batch size; runs at the same place were made one
    after the other, so their ratio is free of the machine's drift. The estimate is the geometric mean over the
    sizes of the median ratio; the interval is the percentile bootstrap over rounds within each size
    (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13).
    """
    generator = np.random.default_rng(seed)
    estimates, resampled = [], []
    for theirs, ours in zip(reference_ms, own_ms, strict=True):
        ratios = np.log(theirs / ours)
        draws = generator.integers(0, len(ratios), (1000, len(ratios)))
        estimates.append(np.median(ratios))
        resampled.append(np.median(ratios[draws], axis=1))
    low, high = np.exp(np.percentile(np.mean(resampled, axis=0), [2.5, 97.5]))
    return Interval(float(np.exp(np.mean(estimates))), float(low), float(high))


def is_beyond_doubt(speedup: Interval) -> bool:
    """Whether it pays: the interval's lower end decides."""
    return speedup.low > WORTHWHILE_SPEEDUP


def is_worthwhile(table: LatencyTable) -> bool:
    """Whether the variant is faster than the reference beyond doubt."""
    return table.speedup is not None and is_beyond_doubt(table.speedup)


def best_per_sample_ms(table: LatencyTable) -> float:
    """Milliseconds per sample at the batch size where a sample costs least."""
    return min(point.median_ms / point.batch_size for point in table.points)
