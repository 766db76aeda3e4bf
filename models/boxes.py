"""From a detection network's raw outputs for one sample to boxes of its input, by what its spec declares.

The server answers with them, and export compares the boxes of one file with those of another.
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
    """Boxes float64 [n, 4], (x1, y1, x2, y2) in pixels of the network's input, their classes and scores; best first."""

    corners: npt.NDArray[np.float64]
    classes: Integers
    scores: Floats


@dataclass(slots=True)
class _Candidates:
    """The best of what reaches the threshold, best first: the rows of their boxes, their classes and scores."""

    rows: Integers
    classes: Integers
    scores: Floats


def find_boxes(
    values: Values, said: DetectionOutputs, activation: Activation, window: Extent, threshold: float, most: int
) -> InputBoxes:
    """At most `most` objects of one sample that score `threshold` and more, where `said` asks for it without overlaps.

    `values` has the outputs that are declared, by name, without the batch dimension; `window` is the width and height
    of the network's input. Raises ModelFailed where a score or a box of those is not a number.
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
    """The rows that are left of boxes [N, 4], best first, at most `most`.

    A box goes that overlaps a better one of its class that stays by more than `iou_threshold` (greedy non-maximum
    suppression). Boxes without an area overlap nothing.
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
        # Divided, as everybody does: at the very threshold a product is rounded another way.
        is_near = np.divide(shared, union, out=np.zeros_like(union), where=union > 0) > iou_threshold
        left = left[~(is_near & (classes[left] == classes[best]))]
    return np.array(kept, np.int64)


@lru_cache(maxsize=32)
def anchor_boxes(levels: tuple[AnchorLevel, ...]) -> npt.NDArray[np.float64]:
    """Centre, width and height [K, 4] of each anchor, in pixels of the network's input and in the declared order."""
    return np.concatenate([_on_grid(level) for level in levels])


def _on_grid(level: AnchorLevel) -> npt.NDArray[np.float64]:
    anchors = np.empty((level.rows, level.columns, len(level.sizes_px), 4))
    anchors[..., 0] = ((np.arange(level.columns) + level.offset) * level.step_x_px)[None, :, None]
    anchors[..., 1] = ((np.arange(level.rows) + level.offset) * level.step_y_px)[:, None, None]
    anchors[..., 2:] = np.array(level.sizes_px)
    return anchors.reshape(-1, 4)


def _candidates(values: Values, said: DetectionOutputs, activation: Activation, threshold: float) -> _Candidates:
    """Raises ModelFailed."""
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
    # A sigmoid of all would take longer than all the rest; what is close to the threshold is looked at again below.
    # A share in float32 may be off by less than this.
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
    """Where the largest are, the largest first, equals in their order."""
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
        # An untrained size would overflow; no picture is so much larger than an anchor (Detectron's and torchvision's
        # limit).
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
