"""Boxes and masks of images as arrays beside the network's input, for the judges.

The targets of a detector are float64 [n, M, 6], a row for each object: its box (x1, y1, x2, y2) in pixels of the
network's input, its class, and what the row is: `OBJECT`, `CROWD`, or `PICTURE`, the part of the input that shows the
picture. Rows of class -1 are not objects. Files of arrays may leave the last column out.

Masks or keypoints follow in further columns, in pixels of the picture, as all objects have them: how many run lengths a
mask has, and these; or the object's area, and x, y and whether it is labelled of each keypoint. Of the picture, these
are its width and height.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from convoy.models.annotations.masks import read_mask
from convoy.models.annotations.records import BadAnnotation
from convoy.models.errors import JobError
from convoy.models.geometry import Extent, ImagePlacement
from convoy.models.samples import Objects, Sample
from convoy.models.spec import ImageSpec

OBJECT, CROWD, PICTURE, UNUSED = 0.0, 1.0, 2.0, 3.0
# In masks, 255 is an unlabelled pixel, by the convention of Pascal VOC.
UNLABELLED = 255
# Of an object's area, what a crop must leave for it to count.
_LEAST_VISIBLE = 0.25


def target_key(sample: Sample) -> str:
    """The contents of a sample's boxes or mask; empty without."""
    if isinstance(sample.target, Objects):
        own = sample.target
        further = [one for one in (own.keypoints, own.areas, *(own.masks or ())) if one is not None]
        parts = (own.boxes, own.classes, own.is_crowd, *further)
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()
    return "" if sample.target is None else hashlib.sha256(sample.target.read_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Targets:
    """Makes the targets of single samples, `rows` for each if they are boxes."""

    image: ImageSpec
    rows: int
    shape_columns: int = 0

    @staticmethod
    def of(samples: Sequence[Sample], image: ImageSpec) -> Targets:
        """For these samples, which all have the same kind of target."""
        most = max((len(one.target.boxes) for one in samples if isinstance(one.target, Objects)), default=0)
        return Targets(
            image, most + 1, _shape_columns([one.target for one in samples if isinstance(one.target, Objects)])
        )

    def one(self, sample: Sample, picture: Extent) -> npt.NDArray[np.generic]:
        """The target of a sample whose image has this size (width, height). Raises JobError for a broken mask."""
        if sample.target is None:
            return np.array(sample.label, np.int64)
        placement = ImagePlacement.of(picture, self.image)
        if isinstance(sample.target, Path):
            try:
                return mask_on_input(read_mask(sample.target), placement)
            except BadAnnotation as error:
                raise JobError(f"{error}; repair it") from error
        target = np.zeros((self.rows, 6 + self.shape_columns))
        target[:, 4:6] = -1, UNUSED
        target[0, :6] = *boxes_on_input(np.array([[0, 0, *picture]]), placement)[0], -1, PICTURE
        own = slice(1, len(sample.target.boxes) + 1)
        target[own, :6] = objects_on_input(sample.target, placement)
        if self.shape_columns:
            target[0, 6:8] = picture
            for row, shape in zip(target[own], _shape_values(sample.target), strict=True):
                row[6 : 6 + len(shape)] = shape
        return target


def _shape_columns(found: Sequence[Objects]) -> int:
    """How many columns the masks or keypoints take; 0 unless all objects have them."""
    shown = [one for one in found if len(one.boxes)]
    if not shown or not (
        all(one.masks is not None for one in shown) or all(one.keypoints is not None for one in shown)
    ):
        return 0
    return max(2, max(len(shape) for one in shown for shape in _shape_values(one)))


def _shape_values(found: Objects) -> list[npt.NDArray[np.float64]]:
    if found.masks is not None:
        return [np.array([len(counts), *counts], np.float64) for counts in found.masks]
    if found.keypoints is None or found.areas is None:
        return []
    return [np.array([area, *points.reshape(-1)]) for area, points in zip(found.areas, found.keypoints, strict=True)]


def objects_on_input(objects: Objects, placement: ImagePlacement) -> npt.NDArray[np.float64]:
    """A row for each object, in order. One of which a crop leaves less than a quarter is a crowd: finding it is neither
    right nor wrong.
    """
    whole = boxes_on_input(objects.boxes, placement)
    seen = whole.clip(0, np.tile(np.array(placement.window, np.float64), 2))
    areas, seen_areas = ((one[:, 2:] - one[:, :2]).clip(0).prod(axis=1) for one in (whole, seen))
    is_crowd = objects.is_crowd | (seen_areas < _LEAST_VISIBLE * areas)
    rows = np.concatenate([seen, objects.classes[:, None], np.where(is_crowd, CROWD, OBJECT)[:, None]], axis=1)
    rows[seen_areas <= 0, 4:] = -1, UNUSED
    return rows


def boxes_on_input(boxes: npt.NDArray[np.floating], placement: ImagePlacement) -> npt.NDArray[np.float64]:
    """Boxes [n, 4] from the picture's pixels to the input's, not clipped."""
    scale = np.divide(placement.full, placement.picture)
    moved: npt.NDArray[np.float64] = boxes * np.tile(scale, 2) - np.tile(placement.corner, 2)
    return moved


def mask_on_input(mask: npt.NDArray[np.uint8], placement: ImagePlacement) -> npt.NDArray[np.uint8]:
    """A mask [height, width] of the picture as one of the input, by nearest neighbour; `UNLABELLED` in a padding."""
    columns, rows = (_nearest(placement, axis) for axis in (0, 1))
    found: npt.NDArray[np.uint8] = mask[rows.clip(0)][:, columns.clip(0)]
    found[rows < 0] = UNLABELLED
    found[:, columns < 0] = UNLABELLED
    return found


def _nearest(placement: ImagePlacement, axis: int) -> npt.NDArray[np.int64]:
    """For each pixel of the input along an axis, the picture's at its centre; -1 outside."""
    centres = np.arange(placement.window[axis]) + 0.5 + placement.corner[axis]
    found = np.floor(centres * placement.picture[axis] / placement.full[axis]).astype(np.int64)
    found[(centres < 0) | (centres >= placement.full[axis])] = -1
    return np.minimum(found, placement.picture[axis] - 1)
