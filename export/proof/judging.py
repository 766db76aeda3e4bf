"""What is a good answer? One judge per task: the similarity of two answers, and the score of one if the target is
known.

    task         similarity                                      score, with targets
    classify     the same best class                             right or wrong (top-1)         targets [n]
    multilabel   the share of classes on the same side           the share that is right        targets [n, classes]
    segment      the share of pixels of the same class           the mean IoU per image         targets [n, h, w]
    detect       F1 of the best boxes, matched by class and IoU  average precision per image    targets [n, m, 5 or 6]
    none         1 less the relative error of the worst output   only by --metric

A user's function, `--metric file.py:function`, may compute the score instead:

    scores = function(outputs, targets)      a number per sample, more is better

`outputs` is the only array [n, ...], or a dict of arrays by name if there are several; `targets` [n, ...] are those of
the data set. The function runs in its own process, `convoy.export.proof.metric_child`, because it may import anything.
That process ends with the export.
"""

from __future__ import annotations

import io
import json
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from convoy.export.proof.box_scores import boxes_against, window_of
from convoy.export.proof.ending import declared_shares
from convoy.export.proof.metric_child import OUT, TARGETS, read_frame, write_frame
from convoy.export.proof.outcomes import (
    WHOLE,
    DetectionOutcomes,
    Outcomes,
    ScoredOutcomes,
    SegmentationOutcomes,
    errors_by_output,
    relative_errors,
)
from convoy.export.rows import Rows, count_of
from convoy.export.sources.torch_job import one_line
from convoy.export.sources.torch_process import child_process
from convoy.export.targets import UNLABELLED
from convoy.models.activation import class_numbers
from convoy.models.boxes import InputBoxes, find_boxes, in_order_of, intersection_over_union, scores_by_sample
from convoy.models.bundle import TOP_1
from convoy.models.errors import JobError, ModelFailed
from convoy.models.spec import Activation, ModelSpec
from convoy.models.tasks import DetectionOutputs, Task


def decisions(outputs: np.ndarray, activation: Activation) -> np.ndarray:
    """bool of the outputs' shape: which classes are present; logits from 0 up, probabilities from one half up."""
    above: np.ndarray = outputs >= (0.5 if activation == "none" else 0.0)
    return above


def class_maps(outputs: np.ndarray, activation: Activation) -> np.ndarray:
    """int64 [n, H, W] from the input of `class_numbers`, [n, ...]; all -1 in a map that would not be answered."""
    return np.stack([_class_map(one, activation) for one in outputs])


def _class_map(values: np.ndarray, activation: Activation) -> np.ndarray:
    try:
        return class_numbers(values, activation).astype(np.int64)
    except ModelFailed:
        return np.full(values.shape[-2:], -1)


def class_pixels(maps: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """`both` and `either` of `SegmentationOutcomes`, int64 [n, 255], for maps and targets [n, h, w].

    Pixels with target 255 do not count. A map that would not be answered (-1) is wrong everywhere.
    """
    counts = [_class_pixels(one, target) for one, target in zip(maps, targets, strict=True)]
    return {"both": np.stack([both for both, _ in counts]), "either": np.stack([either for _, either in counts])}


def _class_pixels(one: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counted = target != UNLABELLED
    found, wanted = one[counted], target[counted].astype(np.int64)
    both = np.bincount(wanted[found == wanted], minlength=UNLABELLED)
    found = found[(found >= 0) & (found < UNLABELLED)]
    either = np.bincount(found, minlength=UNLABELLED) + np.bincount(wanted, minlength=UNLABELLED) - both
    return both, either


def mean_iou(maps: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float64 [n]: intersection over union, averaged over the classes in a sample's map or target.

    A sample without pixels that count is right.
    """
    return image_mean_iou(**class_pixels(maps, targets))


def image_mean_iou(both: np.ndarray, either: np.ndarray) -> np.ndarray:
    """The same from `class_pixels`."""
    classes = (either > 0).sum(axis=1)
    shares = np.divide(both, either, out=np.zeros(both.shape), where=either > 0).sum(axis=1)
    means: np.ndarray = np.where(classes > 0, shares / np.maximum(classes, 1), 1.0)
    return means


def of_size(maps: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Class maps [n, h, w] at another height and width: each pixel has the class of the cell at its centre, as a server
    answers it.
    """
    rows, columns = (
        ((np.arange(pixels) + 0.5) * cells / pixels).astype(np.int64)
        for pixels, cells in zip(size, maps.shape[1:], strict=True)
    )
    return maps[:, rows][:, :, columns]


def boxes_f1(answers: Rows, others: Rows, spec: ModelSpec) -> np.ndarray:
    """float64 [n]: how well the boxes of two answers match, as F1 = 2 matched / all of both.

    Uses the boxes that a server would answer or, if none reaches the threshold, the best below it. A match has the same
    class and an IoU of at least 0.5; each box is matched once, best first.
    """
    said = spec.detection
    assert said is not None, "only detectors have boxes; this is a bug"
    return np.array([_f1(answers, others, spec, said, sample) for sample in range(len(others[said.boxes]))])


def _f1(answers: Rows, others: Rows, spec: ModelSpec, said: DetectionOutputs, sample: int) -> float:
    try:
        found, wanted = (_boxes(one, spec, said, sample) for one in (answers, others))
    except ModelFailed:
        return 0.0
    both = len(found.corners) + len(wanted.corners)
    if not both:
        return 1.0
    is_near = intersection_over_union(found.corners, wanted.corners) >= 0.5
    is_near &= found.classes[:, None] == wanted.classes[None, :]
    free, matched = np.ones(len(wanted.corners), bool), 0
    for row in is_near:
        places = np.flatnonzero(row & free)
        if len(places):
            free[places[0]], matched = False, matched + 1
    return 2 * matched / both


def _boxes(rows: Rows, spec: ModelSpec, said: DetectionOutputs, sample: int) -> InputBoxes:
    """Raises ModelFailed."""
    values = {name: rows[name][sample] for name in said.names}
    window = window_of(spec)
    found = find_boxes(values, said, spec.activation, window, said.threshold, said.max_boxes)
    # An untrained network's boxes do not reach the threshold; then the best ones count.
    return found if len(found.scores) else find_boxes(values, said, spec.activation, window, 0.0, said.max_boxes)


Like = Callable[[Rows, Rows], np.ndarray]
# `scores` [n], and the further fields of the outcomes.
ScoreOf = Callable[[Rows, np.ndarray], Mapping[str, np.ndarray]]
# The metric's name, both functions, and the wording of the similarity, for percent and for the rest to a hundred.
_Parts = tuple[str, Like, ScoreOf | None, str]
# Of these, scores of samples give measures of the set.
_OUTCOMES: Mapping[str, type[ScoredOutcomes]] = {"segment": SegmentationOutcomes, "detect": DetectionOutcomes}
_SAME_CLASS = "agrees with fp32 on {0:.1f} % of"


def what_scores(task: Task) -> str:
    """The options to give for a score of this task."""
    if task in ("classify", "segment", "detect"):
        return "--evaluate"
    return "--evaluate FILE.npz" if task == "multilabel" else "--evaluate FILE.npz and --metric"


@dataclass(frozen=True, slots=True)
class ClassJudge:
    """Judges a classifier: its first output [n, classes] is right or wrong.

    `metric` names the score. `scores_targets` means that targets give scores; without, only the similarity to fp32 is
    known.
    """

    spec: ModelSpec
    metric: str = TOP_1
    scores_targets: bool = True

    @property
    def key(self) -> str:
        """Everything that the judgement depends on beside the answers."""
        return self.spec.activation

    def judged(self, answers: Rows, reference: Rows, targets: np.ndarray | None) -> Outcomes:
        """Judge one variant's answers against fp32's, which are the reference without targets. Raises JobError."""
        name, activation = self.spec.outputs[0].name, self.spec.activation
        if targets is not None:
            targets = _class_numbers(targets, max(2, answers[name].shape[1]))
        outcomes = Outcomes.of(answers[name], reference[name], targets, activation)
        return replace(outcomes, errors=errors_by_output(answers, reference, _shares(self.spec)))

    def restored(self, arrays: Mapping[str, np.ndarray]) -> Outcomes:
        """Outcomes from their `arrays()`."""
        return Outcomes(**arrays)

    def likeness(self, agreement: float) -> str:
        """The similarity to fp32's answers, as the beginning of a sentence about what was answered."""
        return _SAME_CLASS.format(100 * agreement)


@dataclass(frozen=True, slots=True)
class ScoreJudge:
    """Judges other tasks: `like` gives 0..1 for each sample, `score` a number for each, of which more is better.

    Has the interface of `ClassJudge`. `scored` is the type of scored outcomes, with the fields that `score` gives.
    """

    metric: str
    key: str
    like: Like
    score: ScoreOf | None
    alike: str
    shares: Collection[str] = ()
    scored: type[ScoredOutcomes] = ScoredOutcomes
    detection: DetectionOutputs | None = None

    @property
    def scores_targets(self) -> bool:
        return self.score is not None

    def judged(self, answers: Rows, reference: Rows, targets: np.ndarray | None) -> ScoredOutcomes:
        agreements = self.like(answers, reference).astype(np.float64)
        # A list of boxes in another order is not another answer.
        said = self.detection
        compared = in_order_of(reference, answers, said) if said is not None and said.is_list else answers
        errors = errors_by_output(compared, reference, self.shares)
        if said is not None and said.scores is None:
            # Boxes in pixels are so much larger that the error of the whole output says nothing of its scores.
            scores, exact = (np.stack(scores_by_sample(one, said)) for one in (compared, reference))
            column = errors[:, list(reference).index(said.boxes)]
            np.maximum(column, relative_errors(scores, exact, least_size=WHOLE), out=column)
        if self.score is None or targets is None:
            return ScoredOutcomes(agreements, agreements, errors)
        return self.scored(agreements=agreements, errors=errors, **self.score(answers, targets))

    def restored(self, arrays: Mapping[str, np.ndarray]) -> ScoredOutcomes:
        # Without targets there are no further fields.
        plain = {field.name for field in fields(ScoredOutcomes)}
        return (ScoredOutcomes if set(arrays) == plain else self.scored)(**arrays)

    def likeness(self, agreement: float) -> str:
        return self.alike.format(100 * agreement, 100 * (1 - agreement))


Judge = ClassJudge | ScoreJudge


def judge_of(spec: ModelSpec) -> Judge:
    """The judge of the spec's task."""
    if spec.task == "classify":
        return ClassJudge(spec)
    metric, like, score, alike = _TASKS[spec.task](spec)
    key = f"{spec.task} {spec.activation} {spec.detection}"
    return ScoreJudge(
        metric, key, like, score, alike, _shares(spec), _OUTCOMES.get(spec.task, ScoredOutcomes), spec.detection
    )


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

    def score(answers: Rows, targets: np.ndarray) -> dict[str, np.ndarray]:
        if targets.shape != answers[name].shape:
            raise _unfit(targets, answers[name].shape[1:])
        return {"scores": (decisions(answers[name], spec.activation) == (targets > 0.5)).mean(axis=1)}

    return "labels right", like, score, "agrees with fp32 on {0:.1f} % of the labels of"


def _of_segment(spec: ModelSpec) -> _Parts:
    assert spec.segmentation is not None
    name = spec.segmentation.class_map

    def like(answers: Rows, reference: Rows) -> np.ndarray:
        maps, wanted = (class_maps(one[name], spec.activation) for one in (answers, reference))
        shares: np.ndarray = ((maps == wanted) & (wanted >= 0)).mean(axis=(1, 2))
        return shares

    def score(answers: Rows, targets: np.ndarray) -> dict[str, np.ndarray]:
        maps = class_maps(answers[name], spec.activation)
        if spec.image is not None and targets.shape[1:] == (spec.image.height, spec.image.width):
            maps = of_size(maps, targets.shape[1:])
        if targets.shape != maps.shape or targets.dtype.kind not in "iub":
            raise _unfit(targets, maps.shape[1:])
        _refuse_beyond(targets[targets != UNLABELLED], spec)
        pixels = class_pixels(maps, targets)
        return {"scores": image_mean_iou(**pixels), **pixels}

    return "mean IoU per image", like, score, "agrees with fp32 on {0:.1f} % of the pixels of"


def _refuse_beyond(classes: np.ndarray, spec: ModelSpec) -> None:
    """Raise JobError if targets name a class that the network does not have."""
    head = spec.segmentation or spec.detection
    assert head is not None, "only segmenters and detectors have such targets; this is a bug"
    known = head.check(spec.outputs)
    if known is not None and classes.max(initial=0) >= max(known, 2 if spec.segmentation else 1):
        raise JobError(
            f"the targets have class {int(classes.max())}, and the network has {known} classes, from 0; number the "
            "classes as the network does, or pass --labels in the order of its outputs"
        )


def _of_detect(spec: ModelSpec) -> _Parts:
    def score(answers: Rows, targets: np.ndarray) -> dict[str, np.ndarray]:
        has_shapes = spec.detection is not None and bool(spec.detection.prototypes or spec.detection.keypoints)
        is_fit = targets.ndim == 3 and (targets.shape[2] in (5, 6) or (has_shapes and targets.shape[2] > 7))
        if not is_fit or targets.dtype.kind not in "iuf":
            raise JobError(
                f"the targets are {targets.dtype} {list(targets.shape[1:])} a sample; a detector's are [objects, 5]: "
                "the box (x1, y1, x2, y2) in pixels of the input, and the class, -1 in unused rows; save them so, or "
                "pass --metric"
            )
        _refuse_beyond(targets[..., 4], spec)
        return boxes_against(answers, targets, spec)

    alike = "finds {0:.1f} % (F1) of fp32's boxes on"
    return "AP per image", partial(boxes_f1, spec=spec), score, alike


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


_CHILD = ("-P", "-B", "-m", "convoy.export.proof.metric_child")


@contextmanager
def metric_judge(metric: tuple[Path, str] | None, spec: ModelSpec) -> Iterator[Judge]:
    """The judge of the spec's task with the user's function as its score, while the context lasts.

    The similarity stays as it is. Raises JobError if the function does not exist.
    """
    judge = judge_of(spec)
    if metric is None:
        yield judge
        return
    file, name = metric

    def like(answers: Rows, reference: Rows) -> np.ndarray:
        found = judge.judged(answers, reference, None)
        return found.right.astype(np.float64) if isinstance(found, Outcomes) else found.agreements

    with tempfile.TemporaryFile() as log, child_process([*_CHILD, str(file), name], subprocess.PIPE, log) as child:
        process = MetricProcess(file, name, child, log)
        process.asked(b"")
        # The file may import anything, so no score is cached for the next run.
        key = f"{judge.key} {uuid.uuid4().hex}"
        alike = judge.alike if isinstance(judge, ScoreJudge) else _SAME_CLASS

        def score(outputs: Rows, targets: np.ndarray) -> dict[str, np.ndarray]:
            # Of boxes, a metric of the user's gets no masks or keypoints.
            known = targets[..., :6] if spec.detection is not None and targets.ndim == 3 else targets
            return {"scores": process.scores(outputs, known)}

        yield ScoreJudge(process.shown, key, like, score, alike, _shares(spec))


class MetricProcess:
    """A process that has the function. Made by `metric_judge`."""

    def __init__(self, file: Path, name: str, child: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.shown = f"{file.name}:{name}"
        self._child, self._log = child, log

    def scores(self, outputs: Rows, targets: np.ndarray) -> np.ndarray:
        """float64 [n], finite. Raises JobError for invalid results and for the function's own errors."""
        if len(targets) != count_of(outputs):
            raise JobError(f"there are {len(targets)} targets for {count_of(outputs)} samples; this is a bug")
        file = io.BytesIO()
        arrays: dict[str, Any] = {TARGETS: targets, **{f"{OUT}{name}": array for name, array in outputs.items()}}
        np.savez(file, **arrays)
        return np.array(self.asked(file.getvalue())["scores"], np.float64)

    def asked(self, frame: bytes) -> dict[str, list[float]]:
        """The child's answer to a frame; an empty frame asks whether it is ready."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            write_frame(self._child.stdin, frame)
            answer = json.loads(read_frame(self._child.stdout))
        except (OSError, EOFError):
            raise JobError(
                f"--metric {self.shown} ended its process{self._final_error()}; let it return scores"
            ) from None
        if "error" in answer:
            raise JobError(f"--metric {answer['error']}")
        return dict(answer)

    def _final_error(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f" ({one_line(lines[-1], 160)})" if lines else ""
