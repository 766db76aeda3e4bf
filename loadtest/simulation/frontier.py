"""The goodput frontier: the highest load at which at least 99 % of what is offered is answered in time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

GOOD_SHARE = 0.99
_LOWEST, _HIGHEST = 1e-3, 1.2
_RESOLUTION = 1.005
# Student's t for 95 %, two-sided, by degrees of freedom up to where the normal distribution will do.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def frontier(good_share: Callable[[float], float], hint: float) -> float:
    """By bisection on the logarithm of the load, to half a per cent; 0 when even the lowest load misses.

    `hint` is where to look first; a good one saves a few runs.
    """
    low = high = min(_HIGHEST, max(_LOWEST, hint))
    step = 1.08
    if good_share(low) >= GOOD_SHARE:
        while high < _HIGHEST and good_share(high := min(_HIGHEST, high * step)) >= GOOD_SHARE:
            low, step = high, step * step
        if low == _HIGHEST:
            return low
    else:
        while good_share(low := low / step) < GOOD_SHARE:
            if low < _LOWEST:
                return 0.0
            high, step = low, step * step
    while high / low > _RESOLUTION:
        middle = math.sqrt(low * high)
        if good_share(middle) >= GOOD_SHARE:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean of paired differences and half the width of its 95 % interval."""

    mean: float
    half_width: float

    @property
    def is_worse(self) -> bool:
        """The whole interval lies below zero."""
        return self.mean + self.half_width < 0

    @property
    def is_better(self) -> bool:
        return self.mean - self.half_width > 0


def paired(ours: list[float], theirs: list[float]) -> Difference:
    """What we have more, from runs on the same seeds. Needs two seeds or more."""
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    t = _T[len(differences) - 2] if len(differences) - 2 < len(_T) else 2.0
    return Difference(statistics.fmean(differences), t * statistics.stdev(differences) / math.sqrt(len(differences)))
