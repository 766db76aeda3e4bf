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
    """Boxes float64 [n, 4], (x1, y1, x2, y2) in pixels of the network's input, with classes and scores; best first."""

    corners: npt.NDArray[np.float64]
    classes: Integers
    scores: Floats


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
    found = _candidates(values, said, activation, threshold)
    boxes = _corners(values[said.boxes], found.rows, said, window)
    if not np.isfinite(boxes).all():
        raise ModelFailed(NAN)
    if said.iou_threshold is None:
        kept = np.arange(min(most, len(boxes)))
    else:
        kept = suppressed(boxes, found.classes, said.iou_threshold, most)
    return InputBoxes(boxes[kept], found.classes[kept], found.scores[kept])


def suppressed(boxes: Floats, classes: Integers, iou_threshold: float, most: int) -> Integers:
    """The rows of boxes [N, 4], best first, that remain after suppression, at most `most`.

    Greedy non-maximum suppression: a box is dropped if it overlaps a better remaining box of its class by more than
    `iou_threshold`. Boxes without an area overlap nothing.
    """
    x1, y1, x2, y2 = boxes.astype(np.float64).T
    areas = (x2 - x1).clip(0) * (y2 - y1).clip(0)
    left = np.arange(len(boxes))
    kept: list[int] = []
    while len(left) and len(kept) < most:
        best, left = left[0], left[1:]
        kept.append(int(best))
        wide = (np.minimum(x2[left], x2[best]) - np.maximum(x1[left], x1[best])).clip(0)
        high = (np.minimum(y2[left], y2[best]) - np.maximum(y1[left], y1[best])).clip(0)
        shared = wide * high
        union = areas[left] + areas[best] - shared
        # A division, as in other implementations: a product rounds differently at the threshold.
        is_near = np.divide(shared, union, out=np.zeros_like(union), where=union > 0) > iou_threshold
        left = left[~(is_near & (classes[left] == classes[best]))]
    return np.array(kept, np.int64)


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


def _candidates(values: Values, said: DetectionOutputs, activation: Activation, threshold: float) -> _Candidates:
    """The best rows that reach the threshold. Raises ModelFailed."""
    scores: Floats = values[said.scores]  # type: ignore[assignment]
    if said.count is not None:
        scores = scores[: max(0, int(values[said.count].reshape(-1)[0]))]
    scores = scores.astype(np.float32, copy=False)
    is_sigmoid = activation == "sigmoid"
    if not is_sigmoid:
        scores = activate(scores, activation)
    if scores.size and np.isnan(scores.max()):
        raise ModelFailed(NAN)
    per_row = scores.shape[1] if scores.ndim == 2 else 1
    flat = scores.reshape(-1)
    # A sigmoid of all scores would be slow. Scores near the threshold are checked again below, because float32 may be
    # off by this much.
    places = np.flatnonzero(flat >= (_logit(threshold - 1e-6) if is_sigmoid else threshold))
    rows, classes = np.divmod(places, per_row)
    if said.labels is not None:
        classes = values[said.labels][rows].astype(np.int64)
    is_object = classes >= 0
    if said.background is not None:
        is_object &= classes != said.background
    rows, classes, reached = rows[is_object], classes[is_object], flat[places[is_object]]
    order = _best(reached, said.max_candidates)
    best = activate(reached[order], "sigmoid") if is_sigmoid else reached[order]
    is_enough = (best >= threshold) & (best > 0)
    order = order[is_enough]
    return _Candidates(rows[order], classes[order], best[is_enough])


def _best(values: Floats, most: int) -> Integers:
    """The positions of the largest values, largest first, ties in order."""
    among = np.arange(len(values))
    if len(values) > most:
        among = np.flatnonzero(values >= np.partition(values, -most)[-most])
    best: Integers = among[(-values[among]).argsort(kind="stable")][:most]
    return best


def _corners(
    values: npt.NDArray[np.generic], rows: Integers, said: DetectionOutputs, window: Extent
) -> npt.NDArray[np.float64]:
    """The boxes of these rows, (x1, y1, x2, y2) in pixels of the network's input, float64 [N, 4]."""
    boxes = values[rows].astype(np.float64)
    if said.anchors:
        anchors = anchor_boxes(said.anchors)[rows]
        moved = boxes / np.array(said.anchor_weights)
        centres = anchors[:, :2] + moved[:, :2] * anchors[:, 2:]
        # The output of an untrained network would overflow. The limit is Detectron's and torchvision's.
        sizes = anchors[:, 2:] * np.exp(np.minimum(moved[:, 2:], math.log(1000 / 16)))
        return np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=1)
    if said.box_unit == "fractions":
        boxes *= np.tile(window, 2)
    if said.box_form == "xywh":
        boxes[:, 2:] += boxes[:, :2]
    elif said.box_form == "cxcywh":
        boxes[:, :2] -= boxes[:, 2:] / 2
        boxes[:, 2:] += boxes[:, :2]
    return boxes


def _logit(share: float) -> float:
    if share <= 0:
        return -math.inf
    return math.log(share / (1 - share))
