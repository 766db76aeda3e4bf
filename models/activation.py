"""From a network's raw outputs to scores, and to the class of each pixel."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from convoy.models.errors import ModelFailed
from convoy.models.geometry import UNSEEN
from convoy.models.spec import Activation

NAN = "the model produced NaN"


def activate(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """Scores in float32, along the last axis. The softmax subtracts the maximum first, to avoid overflow."""
    if activation == "none":
        return logits
    if activation == "softmax":
        if logits.ndim > 1:
            return _softmax_of_rows(logits)
        largest = np.maximum.reduce(logits, initial=-np.inf)
        # there is nothing to warn about, and suppressing warnings takes as long as the softmax
        if math.isfinite(largest):
            return _softmax(logits, largest)
    with np.errstate(all="ignore"):
        return _softmax(logits, largest) if activation == "softmax" else np.asarray(1 / (1 + np.exp(-logits)))


def _softmax(logits: np.ndarray, largest: np.float32) -> np.ndarray:
    powers = np.exp(logits - largest)
    return np.asarray(powers / np.add.reduce(powers))


def _softmax_of_rows(logits: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        powers = np.exp(logits - np.maximum.reduce(logits, axis=-1, initial=-np.inf, keepdims=True))
        return np.asarray(powers / np.add.reduce(powers, axis=-1, keepdims=True))


ClassNumbers = npt.NDArray[np.uint8]


def class_numbers(values: npt.NDArray[np.generic], activation: Activation) -> ClassNumbers:
    """Class ids [h, w] from scores [C, h, w] or from ids [h, w]; with C = 1, 0 or 1. Raises ModelFailed."""
    if values.ndim == 2:
        lowest, highest = values.min(), values.max()
        if lowest < 0 or highest >= UNSEEN:
            wrong = lowest if lowest < 0 else highest
            raise ModelFailed(f"the model returned the class {wrong}, but a class map has 0 to {UNSEEN - 1}")
        return values.astype(np.uint8)
    if np.isnan(values.max()):
        raise ModelFailed(NAN)
    if len(values) == 1:
        return (activate(values[0].astype(np.float32), activation) >= 0.5).astype(np.uint8)
    return _largest(values)  # type: ignore[arg-type]


def _largest(scores: npt.NDArray[np.floating]) -> ClassNumbers:
    """The class with the largest score, the lowest id of equals: `argmax(axis=0)`, computed plane by plane."""
    best, numbers = scores[0].copy(), np.zeros(scores.shape[1:], np.uint8)
    for number in range(1, len(scores)):
        np.copyto(numbers, number, where=scores[number] > best)
        np.maximum(best, scores[number], out=best)
    return numbers
