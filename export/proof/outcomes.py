"""What a variant answered, image by image, and the scores that follow from it.

Knows labels and answers as arrays. Knows nothing of engines, files or budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logsumexp

from convoy.export.proof.bound import LEVEL, loss_bound_points
from convoy.models.bundle import Accuracy, ClassAccuracy
from convoy.models.spec import Activation

# Of a probability, a millionth is no more than a rounding error: float32's own sigmoid is off by more than 1e-9.
LEAST_SHARE = 0.01
_TOP = 5


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One variant on n images: `labels` and `top1` int64 [n], `in_top5` bool [n], `errors` and `scores` float64 [n].

    An error is ||a - b|| / ||b|| of the answer against fp32's, infinite where an answer is not finite. A score is that
    of the best class. `positions` int64 [n] are the images' places in their set.
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
        labels: np.ndarray,
        activation: Activation = "softmax",
        positions: np.ndarray | None = None,
    ) -> Outcomes:
        """From float32 [n, outputs] of the variant and of fp32; a single output tells two classes apart.

        `positions` None: the images are a whole set, in order.
        """
        errors = relative_errors(answers, reference, least_size=LEAST_SHARE if activation == "none" else 0.0)
        is_single = answers.shape[1] == 1
        if is_single:
            # A logit is on the side of the second class above 0, a probability above one half.
            beyond = answers - (0.5 if activation == "none" else 0.0)
            answers = np.concatenate([-beyond, beyond], axis=1)
        # A class is among the five best when fewer than five score higher.
        own = np.take_along_axis(answers, labels[:, None], axis=1)
        in_top5 = (answers > own).sum(axis=1) < _TOP
        scores = best_scores(answers, activation, is_single=is_single)
        places = np.arange(len(labels)) if positions is None else positions
        return Outcomes(labels, answers.argmax(axis=1), in_top5, errors, scores, places)

    @staticmethod
    def joined(parts: Sequence[Outcomes]) -> Outcomes:
        """All of the parts' images, in order."""
        return Outcomes(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in Outcomes.__slots__}
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """By field name."""
        return {name: getattr(self, name) for name in Outcomes.__slots__}

    @property
    def right(self) -> np.ndarray:
        """bool [n]."""
        matches: np.ndarray = self.top1 == self.labels
        return matches

    @property
    def worst_error(self) -> float:
        return float(self.errors.max(initial=0.0))

    def agreement(self, reference: Outcomes) -> float:
        """The share of images with the same best class as fp32's."""
        return float((self.top1 == reference.top1).mean())

    def accuracy(self, reference: Outcomes, labels: Sequence[str], budget_points: float, *, looks: int = 1) -> Accuracy:
        """The scores against the fp32 reference. `labels` name the classes.

        `looks` is how many variants were held against these very images until one passed; the bound's error is
        divided among them (Bonferroni), for the best of several tries is always a little lucky.
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
        )

    def _per_class(self, labels: Sequence[str]) -> tuple[ClassAccuracy, ...]:
        return tuple(
            ClassAccuracy(label, int(own.sum()), float(self.right[own].mean()))
            for index, label in enumerate(labels)
            for own in [self.labels == index]
            if own.any()
        )


def best_scores(answers: np.ndarray, activation: Activation, *, is_single: bool = False) -> np.ndarray:
    """The score of the best class, float64 [n], of answers [n, outputs]; not a number where none of them is finite.

    `is_single`: of what lies beyond the border between two classes, as `Outcomes.of` makes it of a single output.
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


def relative_errors(answers: np.ndarray, expected: np.ndarray, *, least_size: float = 0.0) -> np.ndarray:
    """||a - b|| / ||b|| of each sample, both [n, outputs]; infinite where an answer is not finite.

    A ||b|| below `least_size` counts as that much.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.linalg.norm(answers.astype(np.float64) - expected.astype(np.float64), axis=1)
    size = np.maximum(np.linalg.norm(expected.astype(np.float64), axis=1), least_size)
    errors = np.divide(difference, size, out=difference.copy(), where=size > 0)
    return np.where(np.isfinite(errors), errors, np.inf)
