"""How `shapes_detector` learns boxes: which cells are responsible for an object, the loss, and F1.

A cell learns an object if its middle is inside the object's box and within 1.5 cells of the box's middle; of several,
the smallest. Sources: centre sampling, Tian et al., FCOS, 2019 and 2022; GIoU, Rezatofighi et al., 2019; scores that
learn how well their box fits, Li et al., Generalized Focal Loss, 2020.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from convoy.models.boxes import InputBoxes, find_boxes, intersection_over_union
from convoy.models.tasks import DetectionOutputs
from convoy.models.training.objectives import Evaluation, Tally, mirror, mirrored
from convoy.models.zoo.shapes_detector import STRIDE_PX, corners

_RADIUS_CELLS = 1.5
_BOX_WEIGHT = 2.0
# An object is found by a box of its class that overlaps it by at least this much.
FOUND_IOU = 0.5

Floats = npt.NDArray[np.floating]
Integers = npt.NDArray[np.int64]


class _Predicted(NamedTuple):
    """`boxes` [n, 4, K] are corners in pixels, `logits` [n, C, K]."""

    boxes: Tensor
    logits: Tensor


class _Assigned(NamedTuple):
    """For each cell: whether it learns an object [n, K], that object's class [n, K] and corners [n, 4, K]."""

    learns: Tensor
    classes: Tensor
    boxes: Tensor


class Boxes:
    """`wanted` is float32 [n, M, 5]: class, x1, y1, x2, y2 in pixels; rows with class -1 are padding.

    `said` has the thresholds of the detections that are measured. The measure is F1 at an IoU of 0.5.
    """

    def __init__(self, image_px: int, said: DetectionOutputs) -> None:
        self._px = image_px
        self._said = said

    def distorted(self, images: Tensor, wanted: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = mirrored(len(images), generator)
        kind, x1, y1, x2, y2 = wanted.unbind(2)
        across = chosen.to(wanted.device)[:, None]
        x1, x2 = torch.where(across, self._px - x2, x1), torch.where(across, self._px - x1, x2)
        return mirror(images, chosen), torch.stack([kind, x1, y1, x2, y2], dim=2)

    def loss(self, outputs: Any, wanted: Tensor) -> Tensor:
        predicted = _predicted(outputs, self._px)
        assigned = assign(wanted, self._px)
        overlap = _giou(predicted.boxes, assigned.boxes)
        count = assigned.learns.sum().clamp(min=1)
        box_loss = ((1 - overlap) * assigned.learns).sum() / count
        return _score_loss(predicted, assigned) / count + _BOX_WEIGHT * box_loss

    def tally(self) -> Tally:
        return _Found(self, self._said)

    def detections(self, answer: Floats) -> InputBoxes:
        """The detections in one image's answer [4 + C, K], by the server's own code."""
        said, window = self._said, (self._px, self._px)
        return find_boxes({said.boxes: answer}, said, "none", window, said.threshold, said.max_boxes)


def _predicted(outputs: Any, px: int) -> _Predicted:
    """From the network's answer in training, or from that for inference."""
    if isinstance(outputs, Tensor):
        raw = outputs.float()
        return _Predicted(corners(raw[:, :4]), raw[:, 4:].flatten(2))
    answer = outputs["detections"].float()
    middle, size = answer[:, :2], answer[:, 2:4]
    return _Predicted(torch.cat([middle - size / 2, middle + size / 2], 1), torch.logit(answer[:, 4:], eps=1e-6))


def assign(wanted: Tensor, px: int) -> _Assigned:
    """The object that each cell of a square picture learns. `wanted` is as in `Boxes`."""
    side = px // STRIDE_PX
    line = (torch.arange(side, device=wanted.device) + 0.5) * STRIDE_PX
    x, y = line.repeat(side)[None, :, None], line.repeat_interleave(side)[None, :, None]
    kind, x1, y1, x2, y2 = (one[:, None, :] for one in wanted.unbind(2))
    is_inside = (x > x1) & (x < x2) & (y > y1) & (y < y2) & (kind >= 0)
    reach = _RADIUS_CELLS * STRIDE_PX
    is_near = ((x - (x1 + x2) / 2).abs() < reach) & ((y - (y1 + y2) / 2).abs() < reach)
    areas = torch.where(is_inside & is_near, (x2 - x1) * (y2 - y1), torch.inf)
    smallest, index = areas.min(dim=2)
    chosen = wanted.gather(1, index[..., None].expand(-1, -1, 5))
    return _Assigned(smallest.isfinite(), chosen[..., 0].long().clamp(min=0), chosen[..., 1:].transpose(1, 2))


def _score_loss(predicted: _Predicted, assigned: _Assigned) -> Tensor:
    """Binary cross-entropy over all cells and classes, summed. An object's class learns how well the box fits."""
    classes = predicted.logits.shape[1]
    is_class = functional.one_hot(assigned.classes, classes).transpose(1, 2) * assigned.learns[:, None]
    target = is_class * _iou(predicted.boxes.detach(), assigned.boxes).clamp(0, 1)[:, None]
    loss: Tensor = functional.binary_cross_entropy_with_logits(predicted.logits, target, reduction="sum")
    # The least that these targets allow: without it the loss would rise while boxes begin to fit.
    least: Tensor = torch.special.entr(target) + torch.special.entr(1 - target)
    return loss - least.sum()


def _iou(first: Tensor, second: Tensor) -> Tensor:
    return _overlap(first, second)[0]


def _giou(first: Tensor, second: Tensor) -> Tensor:
    """Generalised IoU of boxes [n, 4, K] in pairs, from -1 to 1, [n, K]."""
    iou, union = _overlap(first, second)
    around = _area(torch.minimum(first[:, :2], second[:, :2]), torch.maximum(first[:, 2:], second[:, 2:]))
    return iou - (around - union) / around.clamp(min=1e-6)


def _overlap(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union, and the union."""
    shared = _area(torch.maximum(first[:, :2], second[:, :2]), torch.minimum(first[:, 2:], second[:, 2:]))
    union = _area(first[:, :2], first[:, 2:]) + _area(second[:, :2], second[:, 2:]) - shared
    return shared / union.clamp(min=1e-6), union


def _area(low: Tensor, high: Tensor) -> Tensor:
    sides = (high - low).clamp(min=0)
    return sides[:, 0] * sides[:, 1]


class _Found:
    """True and false detections, and objects, of one evaluation."""

    def __init__(self, objective: Boxes, said: DetectionOutputs) -> None:
        self._objective, self._said = objective, said
        self._images, self._loss = 0, 0.0
        self._right, self._detected, self._objects = 0, 0, 0

    def add(self, outputs: Any, wanted: Tensor) -> None:
        self._images += len(wanted)
        self._loss += float(self._objective.loss(outputs, wanted)) * len(wanted)
        answers = outputs[self._said.boxes].float().cpu().numpy()
        for answer, objects in zip(answers, wanted.cpu().numpy(), strict=True):
            objects = objects[objects[:, 0] >= 0]
            found = self._objective.detections(answer)
            self._right += matched(found, objects[:, 1:], objects[:, 0].astype(np.int64))
            self._detected += len(found.classes)
            self._objects += len(objects)

    def evaluation(self) -> Evaluation:
        f1 = 2 * self._right / max(1, self._detected + self._objects)
        return Evaluation(f1, self._loss / self._images)


def matched(found: InputBoxes, objects: Floats, kinds: Integers) -> int:
    """How many detections find an object [m, 4] of their class. The best find first, and each object is found once."""
    left = list(range(len(objects)))
    right = 0
    shares = intersection_over_union(found.corners, objects)
    for own, kind in zip(shares, found.classes, strict=True):
        overlaps = {index: own[index] for index in left if kinds[index] == kind}
        best = max(overlaps, key=overlaps.__getitem__, default=None)
        if best is not None and overlaps[best] >= FOUND_IOU:
            left.remove(best)
            right += 1
    return right
