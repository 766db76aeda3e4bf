"""From a detection network's raw outputs for one sample to boxes on its input, as its spec declares.

The server answers with them, and export compares the boxes of two files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from convoy.models.activation import NAN, activate
from convoy.models.errors import ModelFailed
from convoy.models.geometry import Extent
from convoy.models.spec import Activation
from convoy.models.tasks import AnchorLevel, DetectionOutputs

Floats = npt.NDArray[np.floating]
Integers = npt.NDArray[np.int64]
Values = Mapping[str, npt.NDArray[np.generic]]


class InputBoxes(NamedTuple):
    """Boxes float64 [n, 4], (x1, y1, x2, y2) in pixels of the network's input, with classes and scores; best first.

    `rows` int64 [n] are their places among the network's boxes, by which `further_values` finds the rest of them.
    """

    corners: npt.NDArray[np.float64]
    classes: Integers
    scores: Floats
    rows: Integers


class _Head(NamedTuple):
    """One sample's rows: boxes float [K, at least 4] and scores float [K, C] or [K]; `labels` [K] if they are given.

    `likely` are the rows that can reach the threshold, None for all; `scores` then has only these, activated.
    """

    boxes: Floats
    scores: Floats
    labels: npt.NDArray[np.generic] | None = None
    likely: Integers | None = None


@dataclass(slots=True)
class _Candidates:
    """The best rows that reach the threshold, best first, with their classes and scores."""

    rows: Integers
    classes: Integers
    scores: Floats


def find_boxes(
    values: Values, said: DetectionOutputs, activation: Activation, window: Extent, threshold: float, most: int
) -> InputBoxes:
    """At most `most` objects of one sample that reach `threshold`, after non-maximum suppression if the spec asks for
    it.

    `values` has the declared outputs by name, without the batch dimension; `window` is the width and height of the
    network's input. Raises ModelFailed if a score or box is not a number.
    """
    head = _head(values, said, activation, threshold)
    found = _candidates(head, said, activation if head.likely is None else "none", threshold)
    boxes = _corners(head.boxes, found.rows, said, window)
    if not np.isfinite(boxes).all():
        raise ModelFailed(NAN)
    if said.iou_threshold is None:
        kept = np.arange(min(most, len(boxes)))
    else:
        classes = np.zeros_like(found.classes) if said.class_agnostic else found.classes
        kept = suppressed(boxes, classes, said.iou_threshold, most)
    return InputBoxes(boxes[kept], found.classes[kept], found.scores[kept], found.rows[kept])


def further_values(values: Values, said: DetectionOutputs, rows: Integers) -> npt.NDArray[np.float32]:
    """What follows the classes of these boxes, float32 [n, values]: coefficients of masks, or keypoints.

    Raises ModelFailed if one of them, or of the prototypes, is not a number.
    """
    boxes, _ = _split(values, said)
    if said.prototypes is not None and not np.isfinite(values[said.prototypes]).all():
        raise ModelFailed(NAN)
    further = boxes[rows, boxes.shape[1] - _further_count(values, said) :].astype(np.float32)
    if not np.isfinite(further).all():
        raise ModelFailed(NAN)
    return further


def _further_count(values: Values, said: DetectionOutputs) -> int:
    if said.prototypes is not None:
        return len(values[said.prototypes])
    return math.prod(said.keypoints) if said.keypoints else 0


def input_keypoints(values: Values, said: DetectionOutputs, rows: Integers, window: Extent) -> npt.NDArray[np.float64]:
    """The keypoints of these boxes, float64 [n, points, 2 or 3]: x and y in pixels of the network's input, and the
    score, if the spec declares one. Raises ModelFailed if one is not a number.
    """
    points = further_values(values, said, rows).astype(np.float64).reshape(len(rows), *said.keypoints)
    if said.are_fractions:
        points[..., :2] *= window
    return points


def _head(values: Values, said: DetectionOutputs, activation: Activation, threshold: float) -> _Head:
    """The rows of any layout; views where possible. Raises ModelFailed."""
    boxes, scores = _split(values, said)
    if said.count is not None:
        scores = scores[: max(0, int(values[said.count].reshape(-1)[0]))]
    if said.layout == "end_to_end":
        return _Head(boxes, scores, boxes[:, 5])
    if said.layout != "yolo_v5":
        return _Head(boxes, scores, None if said.labels is None else values[said.labels])
    # A score is at most the objectness, so that few rows are left to multiply.
    objectness = activate(boxes[:, 4], activation)
    if np.isnan(objectness).any():
        raise ModelFailed(NAN)
    likely = np.flatnonzero(objectness >= threshold)
    return _Head(boxes, activate(scores[likely], activation) * objectness[likely, None], None, likely)


def _split(values: Values, said: DetectionOutputs) -> tuple[Floats, Floats]:
    """Boxes [K, at least 4] and scores, [K, C] or [K], as the network gives them; views."""
    boxes: Floats = values[said.boxes]  # type: ignore[assignment]
    if said.scores is not None:
        return boxes, values[said.scores]  # type: ignore[return-value]
    if said.is_yolo_v8:
        boxes = boxes.T
    if said.layout == "end_to_end":
        return boxes, boxes[:, 4]
    first = 5 if said.layout == "yolo_v5" else 4
    end = boxes.shape[1] - _further_count(values, said) if said.classes is None else first + said.classes
    return boxes, boxes[:, first:end]


def raw_scores(answers: Values, said: DetectionOutputs) -> Floats:
    """The scores of all boxes of all samples [n, ...] before the activation, [boxes, classes] or [boxes, 1]."""
    return np.concatenate([scores.reshape(len(scores), -1) for scores in scores_by_sample(answers, said)])


def scores_by_sample(answers: Values, said: DetectionOutputs) -> list[Floats]:
    """The scores of each sample of [n, ...] before the activation, [boxes, classes] or [boxes]."""
    samples = range(len(answers[said.boxes]))
    return [_split({name: answers[name][one] for name in said.names}, said)[1] for one in samples]


# Rounding moves boxes by less than this share of the largest coordinate, and scores by less than this.
_MOVED = 1e-3
# Where the graph chooses boxes, this share may be chosen otherwise: an overlap may lie at the threshold.
_CHOSEN_OTHERWISE = 0.02


def in_order_of(expected: Values, answers: Values, said: DetectionOutputs) -> dict[str, npt.NDArray[np.generic]]:
    """The answers [n, K, ...] of a graph that chooses its boxes, with each sample's rows in the order of `expected`.

    Two right implementations differ in the order of boxes whose scores are equal but for rounding, and in the last
    ones. Such rows without a counterpart are taken from `expected`. If more than a few others have none, the sample's
    rows stay as they are.
    """
    ordered = {name: array.copy() for name, array in answers.items()}
    for sample in range(len(expected[said.boxes])):
        wanted, own = ({name: one[name][sample] for name in said.names} for one in (expected, answers))
        places = _counterparts(wanted, own, said)
        if places is None:
            continue
        is_found = places >= 0
        for name in said.of_boxes:
            ordered[name][sample] = expected[name][sample]
            ordered[name][sample][is_found] = answers[name][sample][places[is_found]]
        if said.count is not None:
            ordered[said.count][sample] = expected[said.count][sample]
    return ordered


def _counterparts(expected: Values, answers: Values, said: DetectionOutputs) -> Integers | None:
    """For each expected row [K] the answers' row that is the same but for rounding, or -1.

    None if too many have none.
    """
    (boxes, scores), (own_boxes, own_scores) = _split(expected, said), _split(answers, said)
    if len(boxes) != len(own_boxes):
        return None
    if said.layout == "detr":
        is_same = _are_alike(scores, own_scores, _MOVED * max(1.0, float(np.abs(scores).max(initial=0))))
        scores = scores.max(axis=1)
    else:
        classes, own_classes = (
            one[:, 5] if said.labels is None else values[said.labels]
            for one, values in ((boxes, expected), (own_boxes, answers))
        )
        is_same = classes[:, None] == own_classes[None, :]
        is_same &= np.abs(scores[:, None] - own_scores[None, :]) <= _MOVED
    far = _MOVED * max(1e-6, float(np.abs(boxes[:, :4]).max(initial=0)))
    is_same &= _are_alike(boxes[:, :4], own_boxes[:, :4], far)
    places, is_free = np.full(len(boxes), -1), np.ones(len(boxes), bool)
    for row in range(len(boxes)):
        found = np.flatnonzero(is_same[row] & is_free)
        if len(found):
            nearest = found[np.abs(own_boxes[found, :4] - boxes[row, :4]).sum(axis=1).argmin()]
            places[row], is_free[nearest] = nearest, False
    is_lost = (places < 0) & (scores > scores.min(initial=math.inf) + _MOVED)
    return places if is_lost.sum() <= _CHOSEN_OTHERWISE * len(boxes) else None


def _are_alike(rows: Floats, others: Floats, far: float) -> npt.NDArray[np.bool_]:
    """Whether all values of two rows [n, V] and [m, V] differ by at most `far`, bool [n, m]."""
    are_alike = np.ones((len(rows), len(others)), bool)
    for axis in range(rows.shape[1]):
        are_alike &= np.abs(rows[:, None, axis] - others[None, :, axis]) <= far
    return are_alike


def suppressed(boxes: Floats, classes: Integers, iou_threshold: float, most: int) -> Integers:
    """The rows of boxes [N, 4], best first, that remain after suppression, at most `most`.

    Greedy non-maximum suppression: a box is dropped if it overlaps a better remaining box of its class by more than
    `iou_threshold`. Boxes without an area overlap nothing.
    """
    corners = boxes.astype(np.float64)
    kept = np.zeros(0, np.int64)
    for start in range(0, len(boxes), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(boxes)))
        block = block[~_overlap(corners, classes, block, kept, iou_threshold).any(axis=1)]
        overlap = _overlap(corners, classes, block, block, iou_threshold)
        is_left = np.ones(len(block), bool)
        for i in range(len(block)):
            if is_left[i]:
                is_left[i + 1 :] &= ~overlap[i, i + 1 :]
        kept = np.concatenate([kept, block[is_left]])
        if len(kept) >= most:
            break
    return kept[:most]


# Boxes that are compared with each other at once.
_BLOCK = 256


def _overlap(
    corners: Floats, classes: Integers, rows: Integers, others: Integers, iou_threshold: float
) -> npt.NDArray[np.bool_]:
    """Whether two boxes are of one class and overlap by more than the threshold, [rows, others]."""
    is_same: npt.NDArray[np.bool_] = classes[rows][:, None] == classes[others][None, :]
    is_same &= intersection_over_union(corners[rows], corners[others]) > iou_threshold
    return is_same


def intersection_over_union(boxes: Floats, others: Floats) -> Floats:
    """Of all pairs of boxes [n, 4] and [m, 4], float [n, m]; 0 for boxes without an area."""
    x1, y1, x2, y2 = (column[:, None] for column in boxes.T)
    other_x1, other_y1, other_x2, other_y2 = others.T
    both = (np.minimum(x2, other_x2) - np.maximum(x1, other_x1)).clip(0)
    both *= (np.minimum(y2, other_y2) - np.maximum(y1, other_y1)).clip(0)
    areas, other_areas = ((one[:, 2:] - one[:, :2]).clip(0).prod(axis=1) for one in (boxes, others))
    either = areas[:, None] + other_areas - both
    # A division, as in other implementations: a product rounds differently at the threshold.
    shares: Floats = np.divide(both, either, out=np.zeros_like(both), where=either > 0)
    return shares


@lru_cache(maxsize=32)
def anchor_boxes(levels: tuple[AnchorLevel, ...]) -> npt.NDArray[np.float64]:
    """Centre, width and height [K, 4] of each anchor, in pixels of the network's input, in the declared order."""
    return np.concatenate([_on_grid(level) for level in levels])


def _on_grid(level: AnchorLevel) -> npt.NDArray[np.float64]:
    anchors = np.empty((level.rows, level.columns, len(level.sizes_px), 4))
    anchors[..., 0] = ((np.arange(level.columns) + level.offset) * level.step_x_px)[None, :, None]
    anchors[..., 1] = ((np.arange(level.rows) + level.offset) * level.step_y_px)[:, None, None]
    anchors[..., 2:] = np.array(level.sizes_px)
    return anchors.reshape(-1, 4)


def _candidates(head: _Head, said: DetectionOutputs, activation: Activation, threshold: float) -> _Candidates:
    """The best rows that reach the threshold. Raises ModelFailed."""
    scores = head.scores.astype(np.float32, copy=False)
    is_sigmoid = activation == "sigmoid"
    if activation == "softmax":
        scores = activate(scores, activation)
    if scores.size and np.isnan(scores.max()):
        raise ModelFailed(NAN)
    # A sigmoid of all scores would be slow. Scores near the threshold are checked again below, because float32 may be
    # off by this much.
    least = _logit(threshold - 1e-6) if is_sigmoid else threshold
    if scores.ndim == 1:
        rows = np.flatnonzero(scores >= least)
        reached = scores[rows]
        classes = np.zeros_like(rows) if head.labels is None else head.labels[rows].astype(np.int64)
    elif said.is_multi_label:
        rows, classes = np.nonzero(scores >= least)
        reached = scores[rows, classes]
    else:
        if said.background is not None:
            scores = scores.copy()
            scores[:, said.background] = -math.inf
        rows = np.flatnonzero(scores.max(axis=1, initial=-math.inf) >= least)
        classes = scores[rows].argmax(axis=1)
        reached = scores[rows, classes]
    is_object = classes >= 0
    if said.background is not None:
        is_object &= classes != said.background
    rows, classes, reached = rows[is_object], classes[is_object], reached[is_object]
    order = _best(reached, said.max_candidates)
    best = activate(reached[order], "sigmoid") if is_sigmoid else reached[order]
    is_enough = (best >= threshold) & (best > 0)
    order = order[is_enough]
    rows = rows if head.likely is None else head.likely[rows]
    return _Candidates(rows[order], classes[order], best[is_enough])


def _best(values: Floats, most: int) -> Integers:
    """The positions of the largest values, largest first, ties in order."""
    among = np.arange(len(values))
    if len(values) > most:
        among = np.flatnonzero(values >= np.partition(values, -most)[-most])
    best: Integers = among[(-values[among]).argsort(kind="stable")][:most]
    return best


def _corners(boxes: Floats, rows: Integers, said: DetectionOutputs, window: Extent) -> npt.NDArray[np.float64]:
    """The boxes of these rows, (x1, y1, x2, y2) in pixels of the network's input, float64 [N, 4]."""
    picked = boxes[rows, :4].astype(np.float64)
    if said.anchors:
        anchors = anchor_boxes(said.anchors)[rows]
        moved = picked / np.array(said.anchor_weights)
        centres = anchors[:, :2] + moved[:, :2] * anchors[:, 2:]
        # The output of an untrained network would overflow. The limit is Detectron's and torchvision's.
        sizes = anchors[:, 2:] * np.exp(np.minimum(moved[:, 2:], math.log(1000 / 16)))
        return np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=1)
    if said.strides:
        cells = grid_cells(said.strides, window)
        if len(cells) != len(boxes):
            raise ModelFailed(f"the output has {len(boxes)} boxes, but the grids of its strides have {len(cells)}")
        picked[:, :2] += cells[rows, :2]
        picked[:, 2:] = np.exp(np.minimum(picked[:, 2:], math.log(1e6)))
        picked *= cells[rows, 2:]
    form = {"separate": said.box_form, "end_to_end": "xyxy"}.get(said.layout, "cxcywh")
    if said.are_fractions:
        picked *= np.tile(window, 2)
    if form == "xywh":
        picked[:, 2:] += picked[:, :2]
    elif form == "cxcywh":
        picked[:, :2] -= picked[:, 2:] / 2
        picked[:, 2:] += picked[:, :2]
    return picked


@lru_cache(maxsize=32)
def grid_cells(strides: tuple[int, ...], window: Extent) -> npt.NDArray[np.float64]:
    """Column, row and stride [K, 3] of each cell of a grid-based head, row by row, one grid after the other."""
    grids = []
    for stride in strides:
        rows, columns = np.mgrid[: window[1] // stride, : window[0] // stride]
        grids.append(np.stack([columns.ravel(), rows.ravel(), np.full(rows.size, stride)], axis=1))
    return np.concatenate(grids).astype(np.float64)


def _logit(share: float) -> float:
    if share <= 0:
        return -math.inf
    return math.log(share / (1 - share))
