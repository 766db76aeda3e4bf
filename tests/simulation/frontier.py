"""The goodput frontier: the highest load at which at least 99 % of what is offered is answered in time."""

from __future__ import annotations

import math
from collections.abc import Callable

GOOD_SHARE = 0.99
_LOWEST, _HIGHEST = 1e-3, 1.2
_RESOLUTION = 1.005


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
