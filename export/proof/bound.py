"""How sure can one be that a variant loses little? An exact, paired confidence bound on lost accuracy.

Knows arithmetic only. Both networks answered the same images, so only the images that one of them gets right
and the other wrong say anything: `lost` of them turned wrong, `won` turned right.
"""

from __future__ import annotations

from scipy.special import betainc, betaincinv

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
    return 1.0 if hits >= trials else float(betaincinv(hits + 1, trials - hits, 1 - level))


def at_least(hits: int, trials: int, share: float) -> float:
    """The probability of `hits` or more of `trials` that each succeed with probability `share`."""
    return 1.0 if hits <= 0 else float(betainc(hits, trials - hits + 1, share))


def at_most(hits: int, trials: int, share: float) -> float:
    """The probability of `hits` or fewer of `trials` that each succeed with probability `share`."""
    return 1.0 if hits >= trials else 1 - at_least(hits + 1, trials, share)
