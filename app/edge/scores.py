"""From a model's raw output to the classes a person asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.errors import ModelFailed
from models.spec import Activation, ModelSpec


@dataclass(frozen=True, slots=True)
class Prediction:
    """One class and its score; the label is None where the model has none for it."""

    class_id: int
    label: str | None
    score: float


def best_classes(logits: np.ndarray, spec: ModelSpec, top_k: int) -> list[Prediction]:
    """The `top_k` classes of one sample, best first, ties by class number.

    `logits` is the sample's output, flattened. Raises ModelFailed when a score is not a number.
    """
    scores = activate(logits.astype(np.float32), spec.activation)
    if np.isnan(scores).any():
        raise ModelFailed("the model produced NaN")
    order = np.argsort(-scores, kind="stable")[: min(top_k, len(scores))]
    return [Prediction(int(i), spec.labels[i] if i < len(spec.labels) else None, float(scores[i])) for i in order]


def activate(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """Scores in float32; the softmax subtracts the maximum first, so that it cannot overflow."""
    with np.errstate(all="ignore"):
        if activation == "softmax":
            powers = np.exp(logits - logits.max(initial=-np.inf))
            return np.asarray(powers / powers.sum())
        if activation == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-logits)))
    return logits
