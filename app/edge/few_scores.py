"""Scores of a few values, in plain numbers: they are sorted before numpy has begun."""

from __future__ import annotations

import math
from array import array

from convoy.models.spec import Activation

_LARGEST_POWER = 700.0  # of e, that fits


def ranked_few(
    values: list[float], activation: Activation, top_k: int | None, *, is_pair: bool
) -> tuple[list[int], list[float]] | None:
    """The best classes of one sample and their scores, as `scores.best_classes` has them; None: one is not a number.

    `is_pair`: one value stands for the scores of two classes.
    """
    scores = array("f", _scores_of_few(values, activation, is_pair=is_pair)).tolist()
    if math.isnan(sum(scores)) and any(map(math.isnan, scores)):  # infinities may add up to no number
        return None
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:top_k]  # equals stay in their order
    return order, [scores[number] for number in order]


def _scores_of_few(values: list[float], activation: Activation, *, is_pair: bool) -> list[float]:
    """One a class, as for many but for the last bits and what is nearly 0: these are exact before they are rounded."""
    if activation == "softmax":
        largest = max(values)
        powers = [math.exp(value - largest) for value in values]
        total = sum(powers)
        return [power / total for power in powers]
    if activation == "sigmoid":
        both = [-value for value in values] + values if is_pair else values
        return [1 / (1 + math.exp(min(-value, _LARGEST_POWER))) for value in both]
    return [1 - value for value in values] + values if is_pair else values
