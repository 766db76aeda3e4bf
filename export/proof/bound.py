"""How sure can one be that a variant loses little? An exact, paired confidence bound on lost accuracy.

Knows arithmetic only. Both networks answered the same images, so only the images that one of them gets right
and the other wrong say anything: `lost` of them turned wrong, `won` turned right.
"""

from __future__ import annotations

import math

LEVEL = 0.05
# The share of the error that is spent on what was lost. Most of it: `won` is often 0, and its bound then is too.
_SHARE_OF_LOST = 0.9


def loss_bound_points(lost: int, won: int, images: int, *, level: float = LEVEL) -> float:
    """The upper end of the one-sided confidence interval of the accuracy lost, in percentage points.

    Exact for every number of images, and conservative: the true loss lies above it in at most `level` of all
    samples. Method: the loss is P(turned wrong) - P(turned right); each is bounded by Clopper and Pearson's
    exact interval (Biometrika 26, 1934), and the two errors add up to `level` (Bonferroni).
    """
    upper = binomial_upper(lost, images, level * _SHARE_OF_LOST)
    lower = 1 - binomial_upper(images - won, images, level * (1 - _SHARE_OF_LOST))
    return 100 * (upper - lower)


def binomial_upper(hits: int, trials: int, level: float) -> float:
    """The largest p for which as few as `hits` of `trials` would be seen with a probability of `level` or more."""
    if hits >= trials:
        return 1.0
    low, high = hits / trials, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if _at_most(hits, trials, middle) > level:
            low = middle
        else:
            high = middle
    return high


def _at_most(hits: int, trials: int, p: float) -> float:
    """P(X <= hits) for X binomial, from its largest term downwards, which cannot underflow where it matters."""
    if p <= 0:
        return 1.0
    if p >= 1:
        return 0.0
    log_term = (
        math.lgamma(trials + 1)
        - math.lgamma(hits + 1)
        - math.lgamma(trials - hits + 1)
        + hits * math.log(p)
        + (trials - hits) * math.log1p(-p)
    )
    total, term = 0.0, math.exp(log_term)
    odds = (1 - p) / p
    for count in range(hits, -1, -1):
        total += term
        # Above the mean terms grow towards it, below they only shrink.
        if term < total * 1e-17 and count < trials * p:
            break
        term *= count / (trials - count + 1) * odds
    return min(1.0, total)
