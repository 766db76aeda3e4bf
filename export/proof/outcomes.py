"""What a variant answered, sample by sample, and the resulting scores, as arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from scipy.special import betainc, betaincinv, expit, logsumexp

from convoy.export.proof.detection_metric import (
    IOU_THRESHOLDS,
    PREFIXES,
    Matches,
    SetMatches,
    class_average_precisions,
    mean_average_precision,
)
from convoy.export.rows import Rows
from convoy.models.bundle import TOP_1, Accuracy, ClassAccuracy
from convoy.models.spec import Activation

# For a probability, a millionth is rounding: float32's own sigmoid is off by more than 1e-9.
LEAST_SHARE = 0.01
# The minimum norm of a normalised answer when two exact graphs are compared: their errors are absolute.
WHOLE = 1.0
_TOP = 5
MEAN_IOU = "mean IoU"


def _fields(outcomes: Any) -> list[str]:
    return [field.name for field in fields(outcomes)]


class _PerSample:
    """Arrays of n samples each, by field name."""

    __slots__ = ()
    errors: np.ndarray

    @property
    def worst_error(self) -> float:
        return float(self.errors.max(initial=0.0))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All samples of the parts, in order."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _fields(cls)})

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by field name."""
        return {name: getattr(self, name) for name in _fields(self)}


@dataclass(frozen=True, slots=True)
class Outcomes(_PerSample):
    """One variant on n classified images: `labels` and `top1` int64 [n], `in_top5` bool [n], `errors` and `scores`
    float64 [n].

    An error is ||a - b|| / ||b|| of the answer against fp32's, infinite if an answer is not finite; with several
    outputs `errors` is [n, outputs]. A score is that of the best class. `positions` int64 [n] are the images' indices
    in their set.
    """

    labels: np.ndarray
    top1: np.ndarray
    in_top5: np.ndarray
    errors: np.ndarray
    scores: np.ndarray
    positions: np.ndarray

    @staticmethod
    def of(
        answers: np.ndarray,
        reference: np.ndarray,
        labels: np.ndarray | None,
        activation: Activation = "softmax",
        positions: np.ndarray | None = None,
    ) -> Outcomes:
        """From float32 [n, outputs] of the variant and of fp32; a single output distinguishes two classes.

        Without `labels`, fp32's answers are the labels. `positions` None means that the images are a whole set, in
        order.
        """
        if labels is None:
            labels = Outcomes.of(reference, reference, np.zeros(len(reference), np.int64), activation).top1
        errors = relative_errors(answers, reference, least_size=LEAST_SHARE if activation == "none" else 0.0)
        is_single = answers.shape[1] == 1
        if is_single:
            # A logit means the second class above 0, a probability above one half.
            beyond = answers - (0.5 if activation == "none" else 0.0)
            answers = np.concatenate([-beyond, beyond], axis=1)
        # A class is among the five best if fewer than five score higher.
        own = np.take_along_axis(answers, labels[:, None], axis=1)
        in_top5 = (answers > own).sum(axis=1) < _TOP
        scores = best_scores(answers, activation, is_single=is_single)
        places = np.arange(len(labels)) if positions is None else positions
        return Outcomes(labels, answers.argmax(axis=1), in_top5, errors, scores, places)

    @property
    def right(self) -> np.ndarray:
        """bool [n]."""
        matches: np.ndarray = self.top1 == self.labels
        return matches

    def agreement(self, reference: Any) -> float:
        """The share of images with the same best class as fp32's."""
        return float((self.top1 == reference.top1).mean())

    def accuracy(
        self, reference: Any, labels: Sequence[str], budget_points: float, *, looks: int = 1, metric: str = TOP_1
    ) -> Accuracy:
        """The accuracy against the outcomes of the fp32 reference. `labels` name the classes.

        `looks` is how many variants were tried on these very images until one passed. The bound's error is divided
        among them (Bonferroni), because the best of several tries is always a little lucky.
        """
        count = len(self.labels)
        lost = int((reference.right & ~self.right).sum())
        won = int((self.right & ~reference.right).sum())
        bound = loss_bound_points(lost, won, count, level=LEVEL / looks)
        return Accuracy(
            images=count,
            top1=float(self.right.mean()),
            agreement=self.agreement(reference),
            loss_points=100 * (lost - won) / count,
            top5=float(self.in_top5.mean()) if len(labels) > _TOP else None,
            loss_bound_points=bound if self is not reference else 0.0,
            is_proved=self is reference or bound <= budget_points,
            per_class=self._per_class(labels),
            metric=metric,
        )

    def _per_class(self, labels: Sequence[str]) -> tuple[ClassAccuracy, ...]:
        return tuple(
            ClassAccuracy(label, int(own.sum()), float(self.right[own].mean()))
            for index, label in enumerate(labels)
            for own in [self.labels == index]
            if own.any()
        )


def best_scores(answers: np.ndarray, activation: Activation, *, is_single: bool = False) -> np.ndarray:
    """The score of the best class, float64 [n], of answers [n, outputs]; NaN if none of them is finite.

    `is_single` means that two classes were made of a single output, as in `Outcomes.of`.
    """
    best: np.ndarray = answers.max(axis=1).astype(np.float64)
    if activation == "none":
        best += 0.5 * is_single
        return best
    if is_single or activation == "sigmoid":
        return np.asarray(expit(best))
    with np.errstate(invalid="ignore"):
        shares: np.ndarray = np.exp(best - logsumexp(answers.astype(np.float64), axis=1))
    return shares


@dataclass(frozen=True, slots=True)
class ScoredOutcomes(_PerSample):
    """One variant on n samples that are not simply right or wrong: float64 [n] each, and `errors` [n, outputs].

    `scores` rate the answers; more is better. `agreements` in 0..1 are similarities to fp32's answers.
    """

    scores: np.ndarray
    agreements: np.ndarray
    errors: np.ndarray

    @property
    def set_metrics(self) -> dict[str, float]:
        """Measures of the whole set by name; none for a score of samples alone."""
        return {}

    def per_class(self, labels: Sequence[str]) -> tuple[ClassAccuracy, ...]:
        """The accuracy of each class that occurs, by `labels`; none for a score of samples alone."""
        return ()

    def agreement(self, reference: Any) -> float:
        """The mean similarity to fp32's answers; `reference` is what they were compared with."""
        return float(self.agreements.mean())

    def accuracy(
        self, reference: Any, labels: Sequence[str], budget_points: float, *, looks: int = 1, metric: str = "score"
    ) -> Accuracy:
        """The mean score instead of the top-1, and the loss; a point is a hundredth. Otherwise as in `Outcomes`.

        Scores that are all 0 or 1 have the exact bound, others a bootstrap's.
        """
        lost = reference.scores - self.scores
        level = LEVEL / looks
        if all(np.isin(own.scores, (0.0, 1.0)).all() for own in (self, reference)):
            bound: float | None = loss_bound_points(
                int((lost > 0).sum()), int((lost < 0).sum()), len(lost), level=level
            )
        else:
            bound = score_loss_bound_points(lost, level=level)
        is_reference = self is reference
        return Accuracy(
            images=len(lost),
            top1=float(self.scores.mean()),
            agreement=self.agreement(reference),
            loss_points=100 * float(lost.mean()),
            loss_bound_points=0.0 if is_reference else bound,
            is_proved=is_reference or (bound is not None and bound <= budget_points),
            per_class=self.per_class(labels),
            metric=metric,
            set_metrics=self.set_metrics,
        )


@dataclass(frozen=True, slots=True)
class DetectionOutcomes(ScoredOutcomes):
    """One detector on n images with at most k detections and m objects each.

    `found_scores` float64 [n, k] and `found_classes` int64 [n, k], best first, -1 where there is none. Bit i of `right`
    and `ignored`, uint16 [n, k], is the match at threshold i (`detection_metric.Matches`). `wanted` int64 [n, m] are
    the objects' classes, or -1. `shape` int64 [n] is what was compared: `BOXES`, `MASKS` or `KEYPOINTS`, everywhere the
    same.
    """

    found_scores: np.ndarray
    found_classes: np.ndarray
    right: np.ndarray
    ignored: np.ndarray
    wanted: np.ndarray
    shape: np.ndarray

    @property
    def set_metrics(self) -> dict[str, float]:
        prefix = PREFIXES[int(self.shape.max(initial=0))]
        return {f"{prefix}{name}": value for name, value in mean_average_precision(self._of_set()).items()}

    def per_class(self, labels: Sequence[str]) -> tuple[ClassAccuracy, ...]:
        found = class_average_precisions(self._of_set())
        return tuple(
            ClassAccuracy(_label(labels, number), int((self.wanted == number).sum()), precision)
            for number, precision in found.items()
        )

    def _of_set(self) -> SetMatches:
        is_found = self.found_classes >= 0
        bits = (1 << np.arange(len(IOU_THRESHOLDS), dtype=np.uint16))[:, None]
        matches = Matches((self.right[is_found] & bits) > 0, (self.ignored[is_found] & bits) > 0)
        wanted = self.wanted[self.wanted >= 0]
        return SetMatches(self.found_scores[is_found], self.found_classes[is_found], matches, wanted)


@dataclass(frozen=True, slots=True)
class SegmentationOutcomes(ScoredOutcomes):
    """One segmenter on n images: `both` and `either` int64 [n, 255] are the pixels of each class in map and target, and
    in one of them.
    """

    both: np.ndarray
    either: np.ndarray

    @property
    def set_metrics(self) -> dict[str, float]:
        """The mean IoU over the classes that occur in the set, as of Pascal VOC."""
        both, either = self.both.sum(axis=0), self.either.sum(axis=0)
        return {MEAN_IOU: float((both[either > 0] / either[either > 0]).mean()) if either.any() else 1.0}

    def per_class(self, labels: Sequence[str]) -> tuple[ClassAccuracy, ...]:
        both, either = self.both.sum(axis=0), self.either.sum(axis=0)
        return tuple(
            ClassAccuracy(_label(labels, number), int(either[number]), float(both[number] / either[number]))
            for number in np.flatnonzero(either).tolist()
        )


def _label(labels: Sequence[str], number: int) -> str:
    return labels[number] if number < len(labels) else str(number)


AnyOutcomes = Outcomes | ScoredOutcomes


def relative_errors(answers: np.ndarray, expected: np.ndarray, *, least_size: float = 0.0) -> np.ndarray:
    """||a - b|| / ||b|| of each sample, both [n, ...]; infinite if an answer is not finite.

    A ||b|| below `least_size` counts as that much. For integers and booleans, which are labels and not measures, it is
    the share that differs.
    """
    count = len(expected)
    if expected.dtype.kind not in "fV":
        differing: np.ndarray = (answers != expected).reshape(count, -1).mean(axis=1, dtype=np.float64)
        return differing
    flat, exact = (one.reshape(count, -1).astype(np.float64) for one in (answers, expected))
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.linalg.norm(flat - exact, axis=1)
    size = np.maximum(np.linalg.norm(exact, axis=1), least_size)
    errors = np.divide(difference, size, out=difference.copy(), where=size > 0)
    return np.where(np.isfinite(errors), errors, np.inf)


def errors_by_output(answers: Rows, expected: Rows, shares: Collection[str] = ()) -> np.ndarray:
    """The same for every output, in the order of `expected`: float64 [n, outputs]; `shares` are probabilities."""
    return np.stack(
        [
            relative_errors(answers[name], exact, least_size=LEAST_SHARE if name in shares else 0.0)
            for name, exact in expected.items()
        ],
        axis=1,
    )


LEVEL = 0.05
# The share of the error for losses. Most of it: `won` is often 0, and then its bound is too.
_SHARE_OF_LOST = 0.9


def loss_bound_points(lost: int, won: int, images: int, *, level: float = LEVEL) -> float:
    """The upper end of the one-sided confidence interval of the accuracy lost, in percentage points.

    Exact for every number of images, and conservative: the true loss is above it in at most `level` of all samples.
    Method: the loss is P(turned wrong) - P(turned right); each is bounded by Clopper and Pearson's exact interval
    (Biometrika 26, 1934), and the two errors add up to `level` (Bonferroni).
    """
    upper = binomial_upper(lost, images, level * _SHARE_OF_LOST)
    lower = 1 - binomial_upper(images - won, images, level * (1 - _SHARE_OF_LOST))
    return 100 * (upper - lower)


def score_loss_bound_points(lost: np.ndarray, *, level: float = LEVEL) -> float | None:
    """The same for scores: `lost` float64 [n] is the loss of each sample. None for fewer than 30 samples.

    Method: percentile bootstrap of the paired differences' mean (Efron & Tibshirani, An Introduction to the Bootstrap,
    1993, ch. 13), which needs some tens of samples and cannot see a loss that none of them shows.
    """
    count = len(lost)
    if count < 30:
        return None
    generator = np.random.default_rng(0)
    means = np.array([lost[generator.integers(0, count, count)].mean() for _ in range(2_000)])
    return 100 * float(np.quantile(means, 1 - level))


def binomial_upper(hits: int, trials: int, level: float) -> float:
    """The largest p for which `hits` or fewer of `trials` have a probability of at least `level`."""
    return 1.0 if hits >= trials else float(betaincinv(hits + 1, trials - hits, 1 - level))


def at_least(hits: int, trials: int, share: float) -> float:
    """The probability of `hits` or more of `trials` that each succeed with probability `share`."""
    return 1.0 if hits <= 0 else float(betainc(hits, trials - hits + 1, share))


def at_most(hits: int, trials: int, share: float) -> float:
    """The probability of `hits` or fewer of `trials` that each succeed with probability `share`."""
    return 1.0 if hits >= trials else 1 - at_least(hits + 1, trials, share)
