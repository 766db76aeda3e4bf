"""What a network's outputs are for: its task, and which output holds what, from what the user says and what they are.

Nothing is promised that is not sure: what could mean this or that is served as tensors, and a line says how to name it.
Knows outputs as arrays. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.export.rows import Rows
from convoy.models.errors import BundleError, JobError
from convoy.models.spec import OIP_NAMES, TensorSpec
from convoy.models.tasks import DetectionOutputs, SegmentationOutput, Task

# What the outputs of a detector are looked for under.
_BOXES, _SCORES, _LABELS, _COUNT = "boxes", "scores", "labels", "count"
_IOU = 0.5
_FLOAT = "FP32"


@dataclass(frozen=True, slots=True)
class Purpose:
    """`remark` says for people what was left open, and how to settle it."""

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
) -> Purpose:
    """The purpose of a network with these outputs, whose task is `asked` for by the user or by whoever published it.

    `detection` is how its boxes are read, where that is known. Raises JobError where the outputs do not fit the task.
    """
    if asked is None:
        return _guessed(outputs, labels, takes_images=takes_images)
    try:
        if asked == "segment":
            return Purpose(asked, segmentation=_segmentation(outputs))
        if asked == "detect":
            return Purpose(asked, detection=detection or _detection(outputs))
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
    told = "what its outputs mean is not known, so that they are served as tensors"
    if any(_is_map(one) for one in outputs):
        return Purpose("none", remark=f"{told}; --task segment, if {_first_map(outputs)} is a class for each pixel")
    if _is_class_row(first):
        return Purpose("none", remark=f"{told}; --task classify or multilabel, if {first.name} scores classes")
    return Purpose("none", remark=f"{told}; --task says otherwise")


def _is_class_row(spec: TensorSpec) -> bool:
    return spec.dtype == _FLOAT and len(spec.shape) == 1


def _is_map(spec: TensorSpec) -> bool:
    return (spec.dtype == _FLOAT and len(spec.shape) == 3) or (spec.dtype != _FLOAT and len(spec.shape) == 2)


def _first_map(outputs: Sequence[TensorSpec]) -> str:
    return next(one.name for one in outputs if _is_map(one))


def _segmentation(outputs: Sequence[TensorSpec]) -> SegmentationOutput:
    if not any(_is_map(one) for one in outputs):
        raise JobError(
            "--task segment wants an output float [N, classes, height, width] or integer [N, height, width], and "
            f"there is {_listed(outputs)}; pass another --task"
        )
    return SegmentationOutput(_first_map(outputs))


def _detection(outputs: Sequence[TensorSpec]) -> DetectionOutputs:
    """By name, for shapes alone would tell boxes from anything with four columns."""
    named = {one.name: one for one in outputs}
    if _BOXES not in named or _SCORES not in named:
        raise JobError(
            f"--task detect wants outputs that are called {_BOXES} [N, K, 4] and {_SCORES} [N, K, classes], or [N, K] "
            f"with {_LABELS} [N, K], and there is {_listed(outputs)}; name them so, in a dict that forward() returns"
        )
    has_labels = _LABELS in named
    found = DetectionOutputs(
        boxes=_BOXES,
        scores=_SCORES,
        labels=_LABELS if has_labels else None,
        count=_COUNT if _COUNT in named else None,
        # One score a box is what is left when overlaps have gone; a score for each class is what the head gave.
        iou_threshold=None if has_labels else _IOU,
    )
    found.check(outputs)
    return found


def specs_of(reference: Rows, elsewhere: Sequence[Rows]) -> tuple[TensorSpec, ...]:
    """The outputs as they were seen; what differs `elsewhere`, at other sizes of input, is free."""
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
