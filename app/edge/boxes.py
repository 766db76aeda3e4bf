"""From a detection network's raw outputs to the objects in a picture, by what its spec declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convoy.app.batch import Answer
from convoy.models.boxes import find_boxes
from convoy.models.geometry import ImagePlacement
from convoy.models.spec import ModelSpec


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
    assert said is not None, "whoever asks has seen to it; this is a bug"
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
