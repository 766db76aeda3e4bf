"""The task of a network's outputs, and the activation that turns them into scores, from its graph and its outputs.

If a task is not certain, outputs that could mean several things are served as tensors.

    the graph ends in          the outputs                          scores are
    softmax                    sum to one                           the outputs, as they are
    log-softmax                exponentials sum to one              their softmax, which is their exponentials
    sigmoid                    are in 0..1                          the outputs, as they are
    an unbounded operator      any that do not sum to one           their softmax; of a single output, its sigmoid
    a clip                     sum to one                           the outputs, as they are
    arithmetic on these        sum to one, or exponentials do       as above
    unknown operators          sum to one, or exponentials do       as above
    unknown operators          exceed 0..1                          as for an unbounded operator

Everything else is ambiguous, and a guess would be served as a probability: it is refused, and `--activation` settles
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from convoy.export.proof.ending import Ending
from convoy.export.rows import Rows
from convoy.export.sources.layouts import outputs_read
from convoy.models.boxes import raw_scores
from convoy.models.errors import BundleError, JobError
from convoy.models.spec import OIP_NAMES, Activation, TensorSpec
from convoy.models.tasks import DetectionOutputs, SegmentationOutput, Task

# The key under which a detector's outputs are stored.
_BOXES, _SCORES, _LABELS, _COUNT = "boxes", "scores", "labels", "count"


@dataclass(frozen=True, slots=True)
class Purpose:
    """`remark` says what was left open and how to settle it."""

    task: Task
    segmentation: SegmentationOutput | None = None
    detection: DetectionOutputs | None = None
    remark: str = ""


def purpose_of(
    asked: Task | None,
    outputs: Sequence[TensorSpec],
    *,
    labels: Sequence[str],
    takes_images: bool,
    detection: DetectionOutputs | None = None,
    activation: Activation | None = None,
) -> Purpose:
    """The purpose of a network with these outputs. The user asked for the task `asked`, or its publisher gives it.

    `detection` says how its boxes are read, and `activation` what turns outputs into scores, if that is known. Raises
    JobError if the outputs do not fit the task.
    """
    if asked is None:
        return _guessed(outputs, labels, takes_images=takes_images)
    try:
        if asked == "detect":
            found = _located(detection, outputs, labels, activation) if detection else _detection(outputs)
            return Purpose(asked, detection=found)
        if asked == "segment":
            return Purpose(asked, segmentation=_segmentation(outputs))
    except BundleError as error:
        raise JobError(f"{error}; pass another --task") from error
    if asked != "none" and not _is_class_row(outputs[0]):
        raise JobError(
            f"--task {asked} wants scores [N, classes] as the first output, and {outputs[0].name} is "
            f"{_shown(outputs[0])}; pass another --task, or return the scores first"
        )
    return Purpose(asked)


def _guessed(outputs: Sequence[TensorSpec], labels: Sequence[str], *, takes_images: bool) -> Purpose:
    first = outputs[0]
    is_named = bool(labels) and _is_class_row(first) and first.shape[0] in (len(labels), 1)
    if is_named or (takes_images and len(outputs) == 1 and _is_class_row(first)):
        return Purpose("classify")
    if takes_images and len(outputs) == 1 and _is_map(first) and first.shape[0] > 1:
        return Purpose("segment", SegmentationOutput(first.name), remark=f"{first.name} is taken as a class per pixel")
    told = "output type unknown, so the outputs are served as tensors"
    if any(_is_map(one) for one in outputs):
        return Purpose("none", remark=f"{told}; pass --task segment if {_first_map(outputs)} has a class per pixel")
    if _is_class_row(first):
        return Purpose("none", remark=f"{told}; pass --task classify or multilabel if {first.name} has class scores")
    return Purpose("none", remark=f"{told}; --task says otherwise")


def _is_class_row(spec: TensorSpec) -> bool:
    return spec.dtype == "FP32" and len(spec.shape) == 1


def _is_map(spec: TensorSpec) -> bool:
    return (spec.dtype == "FP32" and len(spec.shape) == 3) or (spec.dtype != "FP32" and len(spec.shape) == 2)


def _first_map(outputs: Sequence[TensorSpec]) -> str:
    return next(one.name for one in outputs if _is_map(one))


def _segmentation(outputs: Sequence[TensorSpec]) -> SegmentationOutput:
    if not any(_is_map(one) for one in outputs):
        raise JobError(
            "--task segment wants an output float [N, classes, height, width] or integer [N, height, width], and "
            f"there is {_listed(outputs)}; pass another --task"
        )
    return SegmentationOutput(_first_map(outputs))


def _located(
    detection: DetectionOutputs,
    outputs: Sequence[TensorSpec],
    labels: Sequence[str],
    activation: Activation | None,
) -> DetectionOutputs:
    """The same with the names of its outputs, if only the layout is known. Raises BundleError.

    `labels` may leave out a last class that stands for no object.
    """
    if not detection.boxes:
        detection = _named(detection, outputs, len(labels))
        if detection.layout == "detr" and activation == "softmax" and (count := detection.check(outputs)) is not None:
            # A softmax needs a class for "no object", and DETR's is the last (Carion et al., 2020).
            detection = replace(detection, background=count - 1, multi_label=False)
    classes = detection.check(outputs)
    has_unnamed = classes is not None and detection.background == classes - 1
    if labels and classes is not None and len(labels) not in (classes, classes - has_unnamed):
        raise BundleError(
            f"there are {len(labels)} labels, but read as {detection.layout} {_listed(outputs)} has {classes} classes"
        )
    return detection


def _named(detection: DetectionOutputs, outputs: Sequence[TensorSpec], labels: int) -> DetectionOutputs:
    """The layout with the names of its outputs. Raises BundleError."""
    boxes, second = outputs[0], outputs[1].name if len(outputs) > 1 else None
    if detection.layout == "detr":
        queries, scores = outputs_read("detr", {one.name: (-1, *one.shape) for one in outputs})
        return replace(detection, boxes=queries, scores=scores)
    if detection.layout == "yolo_v8_seg":
        if second is None:
            raise BundleError(
                f"the layout yolo_v8_seg has prototypes as a second output, and there is {_listed(outputs)}"
            )
        return replace(detection, boxes=boxes.name, prototypes=second)
    if detection.layout == "yolo_v8_pose":
        return replace(detection, boxes=boxes.name, keypoints=_keypoints(boxes, max(1, labels)))
    return replace(detection, boxes=boxes.name)


def _keypoints(boxes: TensorSpec, classes: int) -> tuple[int, int]:
    """How many keypoints follow the classes of a box, and how many values each has. Raises BundleError if that is
    unclear.
    """
    values = (boxes.shape[0] if boxes.shape else 0) - 4 - classes
    fitting = [(values // each, each) for each in (3, 2) if values > 0 and values % each == 0]
    if len(fitting) == 1:
        return fitting[0]
    why = "may be keypoints of 2 or of 3 values" if fitting else "are no keypoints of 2 or 3 values"
    raise BundleError(
        f"after 4 values of a box and the scores of {classes} classes, {boxes.name} has {values} values, which {why}; "
        f'pass --labels, or --detection FILE.json with {{"boxes": "{boxes.name}", "layout": "yolo_v8_pose", '
        '"keypoints": [17, 3]}'
    )


def _detection(outputs: Sequence[TensorSpec]) -> DetectionOutputs:
    """By name, because shapes alone do not distinguish boxes from other arrays with four columns."""
    named = {one.name: one for one in outputs}
    if _BOXES not in named or _SCORES not in named:
        raise JobError(
            f"--task detect wants outputs that are called {_BOXES} [N, K, 4] and {_SCORES} [N, K, classes], or [N, K] "
            f"with {_LABELS} [N, K], and there is {_listed(outputs)}; name them so, or say with --detection how they "
            "are read"
        )
    has_labels = _LABELS in named
    found = DetectionOutputs(
        boxes=_BOXES,
        scores=_SCORES,
        labels=_LABELS if has_labels else None,
        count=_COUNT if _COUNT in named else None,
        # One score per box remains after suppression of overlaps; a score per class is the head's output.
        iou_threshold=None if has_labels else 0.5,
    )
    found.check(outputs)
    return found


def specs_of(reference: Rows, elsewhere: Sequence[Rows]) -> tuple[TensorSpec, ...]:
    """The outputs as seen; sizes that differ `elsewhere`, at other input sizes, are dynamic."""
    specs = []
    for name, array in reference.items():
        example = array.shape[1:]
        others = [one[name].shape[1:] for one in elsewhere]
        shape = tuple(size if all(other[axis] == size for other in others) else -1 for axis, size in enumerate(example))
        specs.append(TensorSpec(name, OIP_NAMES[array.dtype], shape, example if -1 in shape else ()))
    return tuple(specs)


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype} [{', '.join(['N', *map(str, spec.shape)])}]"


def _listed(outputs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{one.name} {_shown(one)}" for one in outputs)


Look = Literal["shares", "log_shares", "within_0_1", "free"]

# Far above the rounding of float32 sums over a few thousand classes, and far below sums that are one by chance.
_TOLERANCE = 1e-3
_SHOWN: dict[Look, str] = {
    "shares": "sum to one",
    "log_shares": "are logarithms that sum to one",
    "within_0_1": "lie in 0..1 without summing to one",
    "free": "go beyond 0..1",
}
_OVERRULE = "pass --activation softmax, sigmoid or none"


@dataclass(frozen=True, slots=True)
class Decision:
    """`reason` says what was found and what follows; `are_shares` means that the scores are probabilities."""

    activation: Activation
    reason: str
    are_shares: bool = True


def look_of(outputs: np.ndarray) -> Look:
    """What the outputs [n, classes] of some samples have in common."""
    values = outputs.astype(np.float64)
    is_within = bool((values >= -_TOLERANCE).all() and (values <= 1 + _TOLERANCE).all())
    several = values.shape[1] > 1
    if several and is_within and _sums_to_one(values):
        return "shares"
    if several and bool((values <= _TOLERANCE).all()) and _sums_to_one(np.exp(values)):
        return "log_shares"
    return "within_0_1" if is_within else "free"


def _sums_to_one(values: np.ndarray) -> bool:
    return bool(np.abs(values.sum(axis=1) - 1).max() <= _TOLERANCE)


def decide(ending: Ending, outputs: np.ndarray, *, real: bool, samples: str = "images") -> Decision:
    """The activation for a graph with this ending and these `outputs` [n, classes]; `real` means that they are not for
    random inputs, but for what `samples` names.

    Raises JobError if neither is conclusive.
    """
    look, count = look_of(outputs), outputs.shape[1]
    inputs = f"{len(outputs)} {samples if real else 'random inputs'}"
    found = f"the graph ends in {ending.words}, and the outputs of {inputs} {_SHOWN[look]}"
    if count == 1 and ending.kind in ("softmax", "log_softmax"):
        raise JobError(f"{found}: a softmax of one output is always 1; remove it from the network")
    is_open = ending.kind == "unknown"
    if look == "shares" and (is_open or ending.kind in ("softmax", "clipped", "derived")):
        return Decision("none", f"{found}: these are probabilities")
    if look == "log_shares" and ending.kind != "softmax":
        return Decision("softmax", f"{found}: a softmax of log-probabilities gives the probabilities")
    if look in ("shares", "within_0_1") and ending.kind == "sigmoid":
        each = "its probability" if count == 1 else "the probability of each class by itself"
        return Decision("none", f"{found}: {each}")
    if (ending.kind == "unbounded" and look != "shares") or ((is_open or ending.kind == "clipped") and look == "free"):
        if count == 1:
            return Decision("sigmoid", f"{found}: one logit, whose sigmoid is the probability")
        return Decision("softmax", f"{found}: logits")
    raise JobError(f"it is unclear whether the outputs are scores already: {found}; {_OVERRULE}")


def activation_of(purpose: Purpose, reference: Rows, asked: Activation | None) -> Decision:
    """The same for class maps and boxes, from what the outputs [n, ...] have in common. Raises JobError.

    The class of a pixel has the largest score either way. For boxes the activation decides what a score is, so
    unbounded scores must be settled by the user.
    """
    if purpose.segmentation is not None:
        scores = reference[purpose.segmentation.class_map]
        if asked is not None or scores.ndim == 3:
            return Decision(asked or "none", f"--activation {asked}" if asked else "the classes of pixels themselves")
        look = look_of(np.moveaxis(scores, 1, -1).reshape(-1, scores.shape[1]))
        found: Activation = (
            "none" if look in ("shares", "within_0_1") else "softmax" if scores.shape[1] > 1 else "sigmoid"
        )
        return Decision(found, f"the scores of each pixel {_SHOWN[look]}")
    if purpose.detection is not None:
        name = purpose.detection.scores or purpose.detection.boxes
        look = look_of(raw_scores(reference, purpose.detection))
        if asked is None and look in ("free", "log_shares"):
            raise JobError(
                f"it is unclear whether the scores of boxes in {name} are logits of a softmax or of sigmoids; "
                f"{_OVERRULE}"
            )
        return Decision(asked or "none", f"--activation {asked}" if asked else f"the scores of boxes {_SHOWN[look]}")
    if asked not in (None, "none"):
        raise JobError(
            f"--activation {asked} turns outputs into scores, but the task is none; pass --task, or leave it out"
        )
    return Decision("none", "outputs are returned as they are", are_shares=False)


def overruled(
    activation: Activation,
    ending: Ending,
    outputs: np.ndarray,
    *,
    real: bool,
    samples: str = "images",
    why: str = "",
) -> Decision:
    """What `--activation` says, or `why`, and what would have been found. Raises JobError if it makes no sense."""
    if activation == "softmax" and outputs.shape[1] == 1:
        raise JobError("the network has one output, and its softmax is always 1; pass --activation sigmoid or none")
    try:
        found = decide(ending, outputs, real=real, samples=samples)
        beside = f"without it: {found.activation}, for {found.reason}"
    except JobError as error:
        beside = f"without it: undecided, for {str(error).removesuffix(f'; {_OVERRULE}')}"
    are_shares = activation != "none" or look_of(outputs) in ("shares", "within_0_1")
    return Decision(activation, f"{why or f'--activation {activation}'}; {beside}", are_shares)
