"""From a model's raw output to the classes a person asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from convoy.models.errors import ModelFailed
from convoy.models.spec import Activation, ModelSpec

NAN = "the model produced NaN"
_FEW_IN = 20  # a share of the classes that is cheaper to find than to sort


@dataclass(slots=True)  # not frozen, which would take five times as long to make
class Prediction:
    """One class and its score; the label is None where the model has none for it."""

    class_id: int
    label: str | None
    score: float


def best_classes(
    logits: np.ndarray, spec: ModelSpec, top_k: int | None, threshold: float | None = None
) -> list[Prediction]:
    """The `top_k` classes of one sample, or all, best first, ties by class number; none that scores below `threshold`.

    `logits` is the sample's output, flattened. Raises ModelFailed when a score is not a number.
    """
    scores = _scores(logits.astype(np.float32, copy=False), spec)
    order = _best(scores, top_k)
    if threshold is not None:
        order = order[scores[order] >= threshold]
    labels, classes = spec.labels, order.tolist()
    known = len(labels)
    return [
        Prediction(number, labels[number] if number < known else None, score)
        for number, score in zip(classes, scores[order].tolist(), strict=True)
    ]


def _best(scores: np.ndarray, top_k: int | None) -> np.ndarray:
    """Class numbers, as `best_classes` has them. Raises ModelFailed."""
    negated, count = -scores, len(scores)
    if top_k is None or _FEW_IN * top_k > count:
        order: np.ndarray = negated.argsort(kind="stable")  # behind all others comes what is not a number
        if count and math.isnan(scores[order[-1]]):
            raise ModelFailed(NAN)
        return order[:top_k]
    if math.isnan(np.minimum.reduce(scores)):
        raise ModelFailed(NAN)
    # Of many the few that count are found without sorting the others; equals of the last one stay in their order.
    among: np.ndarray = (negated <= np.partition(negated, top_k - 1)[top_k - 1]).nonzero()[0]
    best: np.ndarray = among[negated[among].argsort(kind="stable")][:top_k]
    return best


class RankedClasses(NamedTuple):
    """The best classes of each sample of a batch: numbers int32 [samples, k], scores float32 [samples, k].

    `is_nan` [samples]: a score of the sample is not a number, so none of them counts.
    """

    class_ids: np.ndarray
    scores: np.ndarray
    is_nan: np.ndarray


def best_classes_of_batch(outputs: np.ndarray, spec: ModelSpec, top_k: int) -> RankedClasses:
    """What `best_classes` gives for each row of [samples, values], to the last bit, all at once."""
    scores = _scores(outputs.astype(np.float32, copy=False), spec)
    is_nan = np.isnan(scores).any(axis=1)
    if _FEW_IN * top_k > scores.shape[1] or is_nan.any():
        order = (-scores).argsort(axis=1, kind="stable")[:, :top_k]
    else:
        order = np.array([_best(row, top_k) for row in scores]).reshape(-1, top_k)
    return RankedClasses(order.astype(np.int32), np.take_along_axis(scores, order, axis=1), is_nan)


def _scores(outputs: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """One a class, along the last axis.

    A single output with two labels is the second's score, and what it lacks to one the first's.
    """
    if not spec.is_binary or spec.activation == "softmax":
        return activate(outputs, spec.activation)
    if spec.activation == "sigmoid":
        # Not one minus it: of a score near one, nothing would be left of the other.
        return activate(np.concatenate([-outputs, outputs], axis=-1), "sigmoid")
    return np.concatenate([1 - outputs, outputs], axis=-1)


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
