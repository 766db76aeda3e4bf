"""A detector's answers against the objects of images: each image's score, and what a mean average precision needs."""

from __future__ import annotations

import numpy as np

from convoy.export.proof.detection_metric import (
    IOU_THRESHOLDS,
    MAX_DETECTIONS,
    Found,
    Matches,
    Wanted,
    image_score,
    match,
)
from convoy.export.rows import Rows
from convoy.export.targets import CROWD, PICTURE
from convoy.models.boxes import find_boxes
from convoy.models.errors import ModelFailed
from convoy.models.spec import ModelSpec
from convoy.models.tasks import DetectionOutputs

# Of boxes in a mean average precision.
LEAST_SCORE = 0.001


def window_of(spec: ModelSpec) -> tuple[int, int]:
    """Width and height of the input. Without an image they may be any: overlaps are the same on every scale."""
    return (1, 1) if spec.image is None else (spec.image.width, spec.image.height)


def boxes_against(answers: Rows, targets: np.ndarray, spec: ModelSpec) -> dict[str, np.ndarray]:
    """The fields of `DetectionOutcomes` beside agreements and errors, for `targets` of `convoy.export.targets`.

    The scores of images are of the boxes that a server would answer. The matches go down to a score of 0.001, where
    published mean average precisions usually end.
    """
    samples = [_against(answers, target, spec, sample) for sample, target in enumerate(targets)]
    return {name: np.stack([one[name] for one in samples]) for name in samples[0]}


def _against(answers: Rows, target: np.ndarray, spec: ModelSpec, sample: int) -> dict[str, np.ndarray]:
    said = spec.detection
    assert said is not None, "only detectors have boxes; this is a bug"
    found, wanted = _found(answers, target, spec, said, sample), _wanted(target)
    matches, count = match(found, wanted), len(found.scores)
    answered = min(int((found.scores >= said.threshold).sum()), said.max_boxes)
    served = Found(found.boxes[:answered], found.classes[:answered], found.scores[:answered])
    is_object = ~wanted.is_crowd
    score = image_score(served, Matches(*(one[:, :answered] for one in matches)), int(is_object.sum()))
    filled = {
        "found_scores": np.full(MAX_DETECTIONS, -1.0),
        "found_classes": np.full(MAX_DETECTIONS, -1),
        "right": np.zeros(MAX_DETECTIONS, np.uint16),
        "ignored": np.zeros(MAX_DETECTIONS, np.uint16),
        "wanted": np.full(len(target), -1),
    }
    bits = 1 << np.arange(len(IOU_THRESHOLDS), dtype=np.uint16)
    filled["found_scores"][:count], filled["found_classes"][:count] = found.scores, found.classes
    filled["right"][:count], filled["ignored"][:count] = (bits @ one.astype(np.uint16) for one in matches)
    filled["wanted"][: int(is_object.sum())] = wanted.classes[is_object]
    return {"scores": np.array(score), **filled}


def _found(answers: Rows, target: np.ndarray, spec: ModelSpec, said: DetectionOutputs, sample: int) -> Found:
    """The boxes of one sample, clipped to its picture, as a server clips them; none if it would answer an error."""
    values = {name: answers[name][sample] for name in said.names}
    window = window_of(spec)
    threshold = min(LEAST_SCORE, said.threshold)
    try:
        boxes, classes, scores, _ = find_boxes(values, said, spec.activation, window, threshold, MAX_DETECTIONS)
    except ModelFailed:
        return Found(np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0))
    if spec.image is not None:
        pictures = target[target[:, 5] == PICTURE, :4] if target.shape[1] > 5 else target[:0, :4]
        low, high = (pictures[0, :2], pictures[0, 2:]) if len(pictures) else (np.zeros(2), np.array(window))
        boxes = boxes.clip(np.tile(low, 2), np.tile(high, 2))
    return Found(boxes, classes, scores.astype(np.float64))


def _wanted(target: np.ndarray) -> Wanted:
    rows = target[target[:, 4] >= 0].astype(np.float64)
    is_crowd = rows[:, 5] == CROWD if rows.shape[1] > 5 else np.zeros(len(rows), bool)
    return Wanted(rows[:, :4], rows[:, 4].astype(np.int64), is_crowd)
