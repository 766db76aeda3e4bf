"""From a model's raw output to the classes a person asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from convoy.models.activation import NAN, activate
from convoy.models.errors import ModelFailed
from convoy.models.spec import ModelSpec

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
    return _predictions(order.tolist(), scores[order].tolist(), spec.labels)


def _predictions(classes: list[int], scores: list[float], labels: Sequence[str]) -> list[Prediction]:
    known = len(labels)
    return [
        Prediction(number, labels[number] if number < known else None, score)
        for number, score in zip(classes, scores, strict=True)
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
    values = outputs.astype(np.float32, copy=False)
    scores = _scores(values, spec)
    is_nan = np.isnan(scores).any(axis=1)
    if _FEW_IN * top_k > scores.shape[1] or is_nan.any():
        order = (-scores).argsort(axis=1, kind="stable")[:, :top_k]
    else:
        order = np.array([_best(row, top_k) for row in scores]).reshape(-1, top_k)
    return RankedClasses(order.astype(np.int32), np.take_along_axis(scores, order, axis=1), is_nan)


def _is_pair(spec: ModelSpec) -> bool:
    """Whether one value stands for the scores of two classes."""
    return spec.is_binary and spec.activation != "softmax"


def _scores(outputs: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """One a class, along the last axis.

    A single output with two labels is the second's score, and what it lacks to one the first's.
    """
    if not _is_pair(spec):
        return activate(outputs, spec.activation)
    if spec.activation == "sigmoid":
        # Not one minus it: of a score near one, nothing would be left of the other.
        return activate(np.concatenate([-outputs, outputs], axis=-1), "sigmoid")
    return np.concatenate([1 - outputs, outputs], axis=-1)
