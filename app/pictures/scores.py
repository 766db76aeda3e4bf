"""From a model's raw output to the classes a person asked for."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from convoy.models.activation import NAN, activate
from convoy.models.errors import ModelFailed
from convoy.models.spec import Activation, ModelSpec

_FEW_IN = 20  # a share of the classes that is cheaper to find than to sort
_FEW = 32  # values that are scored and sorted in less time than numpy takes to begin
_LARGEST_POWER = 700.0  # of e, that fits


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
    values = logits.astype(np.float32, copy=False)
    if 0 < len(values) <= _FEW:
        ranked = _ranked_few(values.tolist(), spec.activation, top_k, is_pair=_is_pair(spec))
        if ranked is None:
            raise ModelFailed(NAN)
        best = _predictions(*ranked, spec.labels)
        if threshold is None:
            return best
        least = array("f", [threshold])[0]  # as precise as a score, so that one which is written like it reaches it
        return [one for one in best if one.score >= least]
    scores = _scores(values, spec)
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
    if len(values) and 0 < values.shape[1] <= _FEW:
        return _batch_of_few(values, spec, top_k)
    scores = _scores(values, spec)
    is_nan = np.isnan(scores).any(axis=1)
    if _FEW_IN * top_k > scores.shape[1] or is_nan.any():
        order = (-scores).argsort(axis=1, kind="stable")[:, :top_k]
    else:
        order = np.array([_best(row, top_k) for row in scores]).reshape(-1, top_k)
    return RankedClasses(order.astype(np.int32), np.take_along_axis(scores, order, axis=1), is_nan)


def _batch_of_few(values: np.ndarray, spec: ModelSpec, top_k: int) -> RankedClasses:
    is_pair = _is_pair(spec)
    count = min(top_k, values.shape[1] * (2 if is_pair else 1))
    nothing = [0] * count, [math.nan] * count
    rows = [_ranked_few(row, spec.activation, top_k, is_pair=is_pair) for row in values.tolist()]
    classes, scores = zip(*[nothing if ranked is None else ranked for ranked in rows], strict=True)
    is_nan = np.array([ranked is None for ranked in rows])
    return RankedClasses(np.array(classes, np.int32), np.array(scores, np.float32), is_nan)


def _ranked_few(
    values: list[float], activation: Activation, top_k: int | None, *, is_pair: bool
) -> tuple[list[int], list[float]] | None:
    """The best classes of one sample and their scores, as `best_classes` has them; None: one is not a number.

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
