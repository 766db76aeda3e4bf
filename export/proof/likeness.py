"""What outputs decide, and how two decisions are compared: classes that stand each for itself, maps of classes, boxes.

Knows arrays alone.
"""

from __future__ import annotations

import numpy as np

from convoy.export.rows import Rows
from convoy.models.spec import Activation
from convoy.models.tasks import DetectionOutputs

# In masks, as everywhere since Pascal VOC: a pixel that nobody labelled.
UNLABELLED = 255
_BEST_BOXES, _SAME_IOU = 100, 0.5


def decisions(outputs: np.ndarray, activation: Activation) -> np.ndarray:
    """bool of the outputs' shape: which classes are said to be there; a logit says so from 0, a share from one half."""
    above: np.ndarray = outputs >= (0.5 if activation == "none" else 0.0)
    return above


def class_maps(outputs: np.ndarray, activation: Activation) -> np.ndarray:
    """int64 [n, H, W] from scores [n, C, H, W], or from the classes themselves; of one score, 0 or 1."""
    if outputs.ndim == 3:
        return outputs.astype(np.int64)
    if outputs.shape[1] == 1:
        return decisions(outputs[:, 0], activation).astype(np.int64)
    best: np.ndarray = outputs.argmax(axis=1)
    return best


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
    classes = int(max(found.max(), wanted.max())) + 1
    both = np.bincount(wanted[found == wanted], minlength=classes)
    either = np.bincount(found, minlength=classes) + np.bincount(wanted, minlength=classes) - both
    return float((both[either > 0] / either[either > 0]).mean())


def boxes_f1(answers: Rows, others: Rows, said: DetectionOutputs) -> np.ndarray:
    """float64 [n]: how many of the best boxes of one are among those of the other, as F1 = 2 matched / all of both.

    The best are up to 100 of the highest scores, from `said.threshold`, or all where none reaches it, before what
    overlaps has gone. A match is of the same class, with an IoU of 0.5 and more; each box is matched once, best first.
    """
    return np.array([_f1(answers, others, said, sample) for sample in range(len(others[said.boxes]))])


def _f1(answers: Rows, others: Rows, said: DetectionOutputs, sample: int) -> float:
    (boxes, classes), (wanted, wanted_classes) = (_best_boxes(one, said, sample) for one in (answers, others))
    if not len(boxes) + len(wanted):
        return 1.0
    near = (_iou(boxes, wanted) >= _SAME_IOU) & (classes[:, None] == wanted_classes[None, :])
    free, matched = np.ones(len(wanted), bool), 0
    for row in near:
        places = np.flatnonzero(row & free)
        if len(places):
            free[places[0]], matched = False, matched + 1
    return 2 * matched / (len(boxes) + len(wanted))


def _best_boxes(rows: Rows, said: DetectionOutputs, sample: int) -> tuple[np.ndarray, np.ndarray]:
    """Corners [k, 4] and classes [k], the best first."""
    scores = rows[said.scores][sample]
    scores = scores[:, None] if scores.ndim == 1 else scores
    if said.count is not None:
        scores = scores[: int(rows[said.count][sample].reshape(-1)[0])]
    if said.background is not None:
        scores = np.delete(scores, said.background, axis=1)
    flat = scores.reshape(-1)
    best = np.argsort(-flat, kind="stable")[:_BEST_BOXES]
    # Scores may be logits, and an untrained network's reach no threshold; then the best are the best.
    best = best[flat[best] >= said.threshold] if (flat[best] >= said.threshold).any() else best
    index, classes = np.divmod(best, scores.shape[1])
    if said.labels is not None:
        classes = rows[said.labels][sample][index]
    boxes = rows[said.boxes][sample][index].astype(np.float64)
    if said.box_form == "cxcywh":
        boxes[:, :2] -= boxes[:, 2:] / 2
    if said.box_form != "xyxy":
        boxes[:, 2:] += boxes[:, :2]
    return boxes, classes


def _iou(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of all pairs; boxes without an area have none."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    both = (high - low).clip(0).prod(axis=2)
    areas, other_areas = ((one[:, 2:] - one[:, :2]).clip(0).prod(axis=1) for one in (boxes, others))
    either = areas[:, None] + other_areas[None, :] - both
    shares: np.ndarray = np.divide(both, either, out=np.zeros_like(both), where=either > 0)
    return shares
