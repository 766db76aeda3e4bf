"""What outputs decide, and how two decisions are compared: classes that stand each for itself, maps of classes, boxes.

Knows arrays alone; maps and boxes are read by the server's own code.
"""

from __future__ import annotations

import numpy as np

from convoy.export.rows import Rows
from convoy.models.boxes import InputBoxes, find_boxes
from convoy.models.class_numbers import class_numbers
from convoy.models.errors import ModelFailed
from convoy.models.spec import Activation, ModelSpec
from convoy.models.tasks import DetectionOutputs

# In masks, as everywhere since Pascal VOC: a pixel that nobody labelled.
UNLABELLED = 255
_SAME_IOU = 0.5


def decisions(outputs: np.ndarray, activation: Activation) -> np.ndarray:
    """bool of the outputs' shape: which classes are said to be there; a logit says so from 0, a share from one half."""
    above: np.ndarray = outputs >= (0.5 if activation == "none" else 0.0)
    return above


def class_maps(outputs: np.ndarray, activation: Activation) -> np.ndarray:
    """int64 [n, H, W] of what `class_numbers` takes, [n, ...]; -1 in all of a map that would not be answered."""
    return np.stack([_class_map(one, activation) for one in outputs])


def _class_map(values: np.ndarray, activation: Activation) -> np.ndarray:
    try:
        return class_numbers(values, activation).astype(np.int64)
    except ModelFailed:
        return np.full(values.shape[-2:], -1)


def mean_iou(maps: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float64 [n]: intersection over union, its mean over the classes that are in a sample's map or target.

    Pixels whose target is 255 do not count; a sample without others is right.
    """
    return np.array([_mean_iou(one, target) for one, target in zip(maps, targets, strict=True)])


def _mean_iou(one: np.ndarray, target: np.ndarray) -> float:
    counts = target != UNLABELLED
    found, wanted = one[counts], target[counts].astype(np.int64)
    if not len(wanted):
        return 1.0
    if found.min() < 0:
        return 0.0
    classes = int(max(found.max(), wanted.max())) + 1
    both = np.bincount(wanted[found == wanted], minlength=classes)
    either = np.bincount(found, minlength=classes) + np.bincount(wanted, minlength=classes) - both
    return float((both[either > 0] / either[either > 0]).mean())


def boxes_f1(answers: Rows, others: Rows, spec: ModelSpec) -> np.ndarray:
    """float64 [n]: how many of the boxes of one are among those of the other, as F1 = 2 matched / all of both.

    Boxes are those that a server would answer; where none reaches the threshold, the best below it. A match is of the
    same class, with an IoU of 0.5 and more; each box is matched once, best first.
    """
    said = spec.detection
    assert said is not None, "whoever asks has seen to it; this is a bug"
    return np.array([_f1(answers, others, spec, said, sample) for sample in range(len(others[said.boxes]))])


def _f1(answers: Rows, others: Rows, spec: ModelSpec, said: DetectionOutputs, sample: int) -> float:
    try:
        found, wanted = (_boxes(one, spec, said, sample) for one in (answers, others))
    except ModelFailed:
        return 0.0
    both = len(found.corners) + len(wanted.corners)
    if not both:
        return 1.0
    is_near = _iou(found.corners, wanted.corners) >= _SAME_IOU
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
    # What boxes share of each other is the same on any scale.
    window = (1, 1) if spec.image is None else (spec.image.width, spec.image.height)
    found = find_boxes(values, said, spec.activation, window, said.threshold, said.max_boxes)
    # An untrained network's reach no threshold; then the best are the best.
    return found if len(found.scores) else find_boxes(values, said, spec.activation, window, 0.0, said.max_boxes)


def _iou(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of all pairs; boxes without an area have none."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    both = (high - low).clip(0).prod(axis=2)
    areas, other_areas = ((one[:, 2:] - one[:, :2]).clip(0).prod(axis=1) for one in (boxes, others))
    either = areas[:, None] + other_areas[None, :] - both
    shares: np.ndarray = np.divide(both, either, out=np.zeros_like(both), where=either > 0)
    return shares
