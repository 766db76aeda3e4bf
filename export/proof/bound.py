"""How sure can one be that a variant loses little? A paired confidence bound on lost accuracy.

Knows arithmetic only. Both networks answered the same images, so only the images that one of them gets right
and the other wrong say anything: `lost` of them turned wrong, `won` turned right. There the bound is exact. Where a
sample is not right or wrong but has a score, it is a bootstrap of the differences.
"""

from __future__ import annotations

import numpy as np
from scipy.special import betainc, betaincinv

LEVEL = 0.05
_RESAMPLES = 2_000
_FEWEST_SCORES = 30
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


def score_loss_bound_points(lost: np.ndarray, *, level: float = LEVEL) -> float | None:
    """The same for scores: `lost` float64 [n] is what each sample lost. None for fewer than 30 samples.

    Method: percentile bootstrap of the paired differences' mean (Efron & Tibshirani, An Introduction to the Bootstrap,
    1993, ch. 13), which needs some tens of samples, and knows of no loss that none of them shows.
    """
    count = len(lost)
    if count < _FEWEST_SCORES:
        return None
    generator = np.random.default_rng(0)
    means = np.array([lost[generator.integers(0, count, count)].mean() for _ in range(_RESAMPLES)])
    return 100 * float(np.quantile(means, 1 - level))


def binomial_upper(hits: int, trials: int, level: float) -> float:
    """The largest p for which as few as `hits` of `trials` would be seen with a probability of `level` or more."""
    return 1.0 if hits >= trials else float(betaincinv(hits + 1, trials - hits, 1 - level))


def at_least(hits: int, trials: int, share: float) -> float:
    """The probability of `hits` or more of `trials` that each succeed with probability `share`."""
    return 1.0 if hits <= 0 else float(betainc(hits, trials - hits + 1, share))


def at_most(hits: int, trials: int, share: float) -> float:
    """The probability of `hits` or fewer of `trials` that each succeed with probability `share`."""
    return 1.0 if hits >= trials else 1 - at_least(hits + 1, trials, share)
