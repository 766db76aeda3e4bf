"""How a picture's outputs become an answer: one row per task.

Knows which outputs a task needs, whether reading them is short, and what reads them. Knows no wire.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from convoy.app.engines.batch import Answer
from convoy.app.pictures.class_map import SegmentedPicture, rendering_bytes, segmented
from convoy.app.pictures.scores import Prediction, best_classes
from convoy.models.boxes import find_boxes
from convoy.models.geometry import Extent, ImagePlacement
from convoy.models.spec import ModelSpec
from convoy.models.tasks import Task


@dataclass(slots=True)
class Detection:
    """One object: (x1, y1, x2, y2) in pixels of the picture, from its upper left corner, to hundredths.

    The label is None where the model has none for the class.
    """

    box: tuple[float, float, float, float]
    class_id: int
    label: str | None
    score: float


def detections(
    answers: Mapping[str, Answer], spec: ModelSpec, placement: ImagePlacement, threshold: float | None, most: int | None
) -> list[Detection]:
    """One sample's objects, best first. Raises ModelFailed where a score or a box of those is not a number.

    `answers` has the outputs that the spec declares, by name; `threshold` and `most` None are as it declares.
    """
    said = spec.detection
    assert said is not None, "a detector has this; this is a bug"
    threshold = said.threshold if threshold is None else threshold
    most = said.max_boxes if most is None else most
    values = {name: _one_sample(answer, spec, name) for name, answer in answers.items()}
    found = find_boxes(values, said, spec.activation, placement.window, threshold, most)
    placed = placement.boxes_on_picture(found.corners).round(2).tolist()
    known = len(spec.labels)
    return [
        Detection((x1, y1, x2, y2), number, spec.labels[number] if number < known else None, score)
        for (x1, y1, x2, y2), number, score in zip(placed, found.classes.tolist(), found.scores.tolist(), strict=True)
    ]


def _one_sample(answer: Answer, spec: ModelSpec, name: str) -> npt.NDArray[np.generic]:
    """As its spec's shape says, without the batch dimension."""
    output = spec.outputs[spec.output_index(name)]
    of_sample = answer.shape[len(answer.shape) - len(output.shape) :]
    return np.frombuffer(answer.data, output.numpy_dtype).reshape(of_sample)


class Wanted(NamedTuple):
    """What is asked of a picture: by the version's task, and what else the task's answers depend on.

    The best `top_k` classes or boxes, or all for None, of those that reach `threshold`. `finish` makes of what was
    found what the asker needs, where that takes as long as reading does.
    """

    answering: Answering
    top_k: int | None = None
    threshold: float | None = None
    finish: Callable[[Any], Any] | None = None


class Answering(ABC):
    """One task. `key` is what documents call its answer; `is_long`: for a thread, and not for the event loop."""

    key: ClassVar[str]
    is_long: ClassVar[bool]

    @abstractmethod
    def outputs(self, spec: ModelSpec) -> tuple[int, ...]:
        """Those that are needed, by their index."""

    @abstractmethod
    def read(self, answers: Sequence[Answer], spec: ModelSpec, size: Extent, wanted: Wanted) -> Any:
        """What they say of a picture of this upright size. Raises ModelFailed, and what `wanted.finish` raises."""

    def working_bytes(self, spec: ModelSpec, size: Extent) -> int:
        """About how much memory `read` takes beside the outputs; only asked of one that is long."""
        return 0


class _Classes(Answering):
    key, is_long = "predictions", False

    def outputs(self, spec: ModelSpec) -> tuple[int, ...]:
        return (0,)

    def read(self, answers: Sequence[Answer], spec: ModelSpec, size: Extent, wanted: Wanted) -> list[Prediction]:
        scores = np.frombuffer(answers[0].data, spec.outputs[0].numpy_dtype)
        return best_classes(scores, spec, wanted.top_k, wanted.threshold)


class _ClassMap(Answering):
    key, is_long = "segmentation", True

    def outputs(self, spec: ModelSpec) -> tuple[int, ...]:
        assert spec.segmentation is not None, "the spec has seen to it; this is a bug"
        return (spec.output_index(spec.segmentation.class_map),)

    def read(self, answers: Sequence[Answer], spec: ModelSpec, size: Extent, wanted: Wanted) -> Any:
        found: SegmentedPicture = segmented(answers[0], spec, _placement(size, spec))
        return found if wanted.finish is None else wanted.finish(found)

    def working_bytes(self, spec: ModelSpec, size: Extent) -> int:
        return rendering_bytes(_placement(size, spec))


class _Boxes(Answering):
    key, is_long = "detections", True

    def outputs(self, spec: ModelSpec) -> tuple[int, ...]:
        assert spec.detection is not None, "the spec has seen to it; this is a bug"
        return tuple([spec.output_index(name) for name in spec.detection.names])

    def read(self, answers: Sequence[Answer], spec: ModelSpec, size: Extent, wanted: Wanted) -> list[Detection]:
        assert spec.detection is not None, "the spec has seen to it; this is a bug"
        by_name = dict(zip(spec.detection.names, answers, strict=True))
        return detections(by_name, spec, _placement(size, spec), wanted.threshold, wanted.top_k)

    def working_bytes(self, spec: ModelSpec, size: Extent) -> int:
        # As far as the outputs' sizes are fixed.
        return 2 * sum(spec.outputs[index].sample_bytes or 0 for index in self.outputs(spec))


CLASSES, CLASS_MAP, BOXES = _Classes(), _ClassMap(), _Boxes()
ANSWERING: dict[Task, Answering] = {
    "classify": CLASSES,
    "multilabel": CLASSES,
    "segment": CLASS_MAP,
    "detect": BOXES,
}


def why_no_predictions(spec: ModelSpec) -> str | None:
    """Why a model answers nothing to a picture, in words that go on from its name; None where it does."""
    if spec.image is None:
        return "has no image preprocessing, so it cannot take images"
    return None if spec.task in ANSWERING else f"has the task {spec.task!r}, so that nobody knows what its outputs mean"


def _placement(size: Extent, spec: ModelSpec) -> ImagePlacement:
    assert spec.image is not None, "the route has checked it; this is a bug"
    return ImagePlacement.of(size, spec.image)
