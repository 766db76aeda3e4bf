"""What is a good answer? One judge for each task: how alike are two answers, and how good is one where that is known.

    task         alike is                                        with targets, a score is
    classify     the same best class                             right or wrong (top-1)         targets [n]
    multilabel   the share of classes on the same side           the share that is right        targets [n, classes]
    segment      the share of pixels of the same class           the mean IoU of classes        targets [n, h, w]
    detect       F1 of the best boxes, matched by class and IoU  by --metric alone
    none         1 less the relative error of the worst output   by --metric alone

A function of the user's (`--metric`) takes the place of the score. Knows arrays and specs; knows no engine and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from convoy.export.proof.likeness import boxes_f1, class_maps, decisions, mean_iou
from convoy.export.proof.outcomes import AnyOutcomes, Outcomes, ScoredOutcomes, errors_by_output
from convoy.export.proof.ranges import declared_shares
from convoy.export.rows import Rows
from convoy.models.bundle import TOP_1, Accuracy
from convoy.models.errors import JobError
from convoy.models.spec import ModelSpec
from convoy.models.tasks import Task

Like = Callable[[Rows, Rows], np.ndarray]
ScoreOf = Callable[[Rows, np.ndarray], np.ndarray]
# The metric's name, both functions, and how alike answers are in words, of percent and of what is left to a hundred.
_Parts = tuple[str, Like, ScoreOf | None, str]
# The tasks beside classify whose targets make scores by themselves.
_SCORED: tuple[Task, ...] = ("multilabel", "segment")
_SAME_CLASS = "agrees with fp32 on {0:.1f} % of"


def what_scores(task: Task) -> str:
    """What has to be given at export for a score of this task, as it is typed."""
    if task == "classify":
        return "--evaluate"
    return "--evaluate FILE.npz" if task in _SCORED else "--evaluate FILE.npz and --metric"


class Judge(Protocol):
    """`metric` says what a score is, `key` what the judgement depends on beside the answers.

    `scores_targets`: targets make scores. Without, only likeness to fp32 is known.
    """

    @property
    def metric(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def scores_targets(self) -> bool: ...

    def judged(self, answers: Rows, reference: Rows, targets: np.ndarray | None) -> AnyOutcomes:
        """Of one variant's answers, against fp32's; without targets these are the measure. Raises JobError."""
        ...

    def restored(self, arrays: Mapping[str, np.ndarray]) -> AnyOutcomes:
        """Outcomes from their `arrays()`."""
        ...

    def accuracy(
        self, own: AnyOutcomes, reference: AnyOutcomes, labels: Sequence[str], budget_points: float, *, looks: int = 1
    ) -> Accuracy:
        """The outcomes in figures."""
        ...

    def likeness(self, agreement: float) -> str:
        """How alike fp32's answers others are, in words that end before what was answered."""
        ...


@dataclass(frozen=True, slots=True)
class ClassJudge:
    """Of a classifier: its first output [n, classes] is right or wrong."""

    spec: ModelSpec
    metric: str = TOP_1
    scores_targets: bool = True

    @property
    def key(self) -> str:
        return self.spec.activation

    def judged(self, answers: Rows, reference: Rows, targets: np.ndarray | None) -> Outcomes:
        name, activation = self.spec.outputs[0].name, self.spec.activation
        if targets is not None:
            targets = _class_numbers(targets, max(2, answers[name].shape[1]))
        outcomes = Outcomes.of(answers[name], reference[name], targets, activation)
        return outcomes.with_errors(errors_by_output(answers, reference, _shares(self.spec)))

    def restored(self, arrays: Mapping[str, np.ndarray]) -> Outcomes:
        return Outcomes(**arrays)

    def likeness(self, agreement: float) -> str:
        return _SAME_CLASS.format(100 * agreement)

    def accuracy(
        self, own: AnyOutcomes, reference: AnyOutcomes, labels: Sequence[str], budget_points: float, *, looks: int = 1
    ) -> Accuracy:
        assert isinstance(own, Outcomes)
        assert isinstance(reference, Outcomes)
        return own.accuracy(reference, labels, budget_points, looks=looks)


@dataclass(frozen=True, slots=True)
class ScoreJudge:
    """Of everything else: `like` gives 0..1 for each sample, `score` a number for each, of which more is better."""

    metric: str
    key: str
    like: Like
    score: ScoreOf | None
    alike: str
    shares: Collection[str] = ()

    @property
    def scores_targets(self) -> bool:
        return self.score is not None

    def judged(self, answers: Rows, reference: Rows, targets: np.ndarray | None) -> ScoredOutcomes:
        agreements = self.like(answers, reference).astype(np.float64)
        is_scored = self.score is not None and targets is not None
        scores = self.score(answers, targets).astype(np.float64) if is_scored else agreements  # type: ignore[misc, arg-type]
        return ScoredOutcomes(scores, agreements, errors_by_output(answers, reference, self.shares))

    def restored(self, arrays: Mapping[str, np.ndarray]) -> ScoredOutcomes:
        return ScoredOutcomes(**arrays)

    def likeness(self, agreement: float) -> str:
        return self.alike.format(100 * agreement, 100 * (1 - agreement))

    def accuracy(
        self, own: AnyOutcomes, reference: AnyOutcomes, labels: Sequence[str], budget_points: float, *, looks: int = 1
    ) -> Accuracy:
        assert isinstance(own, ScoredOutcomes)
        assert isinstance(reference, ScoredOutcomes)
        return replace(own.accuracy(reference, budget_points, looks=looks), metric=self.metric)


def judge_of(spec: ModelSpec) -> Judge:
    """The judge of the spec's task."""
    if spec.task == "classify":
        return ClassJudge(spec)
    metric, like, score, alike = _TASKS[spec.task](spec)
    return ScoreJudge(metric, f"{spec.task} {spec.activation}", like, score, alike, _shares(spec))


def with_metric(judge: Judge, metric: str, key: str, score: ScoreOf, spec: ModelSpec) -> Judge:
    """The judge with a function in the place of its score; how alike answers are stays what it was."""

    def like(answers: Rows, reference: Rows) -> np.ndarray:
        found = judge.judged(answers, reference, None)
        return found.right.astype(np.float64) if isinstance(found, Outcomes) else found.agreements

    alike = judge.alike if isinstance(judge, ScoreJudge) else _SAME_CLASS
    return ScoreJudge(metric, f"{judge.key} {key}", like, score, alike, _shares(spec))


def _shares(spec: ModelSpec) -> tuple[str, ...]:
    """The outputs that are probabilities."""
    return tuple(declared_shares(spec))


def _class_numbers(targets: np.ndarray, classes: int) -> np.ndarray:
    if targets.ndim != 1 or targets.dtype.kind not in "iub":
        raise JobError(
            f"the targets are {targets.dtype} {list(targets.shape[1:])} a sample, and a classifier's are one whole "
            "number, the class; pass --metric for others, or --task"
        )
    numbers = targets.astype(np.int64)
    if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= classes:
        raise JobError(f"the targets name class {numbers.max()}, and the network has {classes}, from 0; repair them")
    return numbers


def _of_multilabel(spec: ModelSpec) -> _Parts:
    name = spec.outputs[0].name

    def like(answers: Rows, reference: Rows) -> np.ndarray:
        same = decisions(answers[name], spec.activation) == decisions(reference[name], spec.activation)
        shares: np.ndarray = same.mean(axis=1)
        return shares

    def score(answers: Rows, targets: np.ndarray) -> np.ndarray:
        if targets.shape != answers[name].shape:
            raise _unfit(targets, answers[name].shape[1:])
        right: np.ndarray = (decisions(answers[name], spec.activation) == (targets > 0.5)).mean(axis=1)
        return right

    return "labels right", like, score, "agrees with fp32 on {0:.1f} % of the labels of"


def _of_segment(spec: ModelSpec) -> _Parts:
    assert spec.segmentation is not None
    name = spec.segmentation.class_map

    def like(answers: Rows, reference: Rows) -> np.ndarray:
        maps, wanted = (class_maps(one[name], spec.activation) for one in (answers, reference))
        shares: np.ndarray = ((maps == wanted) & (wanted >= 0)).mean(axis=(1, 2))
        return shares

    def score(answers: Rows, targets: np.ndarray) -> np.ndarray:
        maps = class_maps(answers[name], spec.activation)
        if targets.shape != maps.shape or targets.dtype.kind not in "iub":
            raise _unfit(targets, maps.shape[1:])
        return mean_iou(maps, targets)

    return "mean IoU", like, score, "agrees with fp32 on {0:.1f} % of the pixels of"


def _of_detect(spec: ModelSpec) -> _Parts:
    def like(answers: Rows, reference: Rows) -> np.ndarray:
        return boxes_f1(answers, reference, spec)

    return "F1 of boxes", like, None, "finds {0:.1f} % (F1) of fp32's boxes on"


def _of_none(spec: ModelSpec) -> _Parts:
    def like(answers: Rows, reference: Rows) -> np.ndarray:
        worst: np.ndarray = 1 - np.minimum(errors_by_output(answers, reference).max(axis=1), 1.0)
        return worst

    return "likeness", like, None, "is off from fp32 by {1:.2g} % on average on"


def _unfit(targets: np.ndarray, wanted: tuple[int, ...]) -> JobError:
    return JobError(
        f"the targets are {targets.dtype} {list(targets.shape[1:])} a sample; this task wants whole numbers "
        f"{list(wanted)}; save them so, or pass --metric"
    )


_TASKS: Mapping[str, Callable[[ModelSpec], _Parts]] = {
    "multilabel": _of_multilabel,
    "segment": _of_segment,
    "detect": _of_detect,
    "none": _of_none,
}
