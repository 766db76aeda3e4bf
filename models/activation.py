"""From a network's raw outputs to scores. Knows arrays; knows nothing of what a score stands for."""

from __future__ import annotations

import math

import numpy as np

from convoy.models.spec import Activation

NAN = "the model produced NaN"


def activate(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """Scores in float32, along the last axis; the softmax subtracts the maximum first, so that it cannot overflow."""
    if activation == "none":
        return logits
    if activation == "softmax":
        if logits.ndim > 1:
            return _softmax_of_rows(logits)
        largest = np.maximum.reduce(logits, initial=-np.inf)
        if math.isfinite(largest):  # nothing to warn of, and to ask for silence takes as long as the softmax
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
