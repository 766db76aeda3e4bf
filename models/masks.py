"""From a network's prototypes to the mask of each object, as run lengths in pixels of the picture.

A mask is never drawn: along each column of the picture, the values between two cells of the prototypes are on a line,
so a mask begins and ends where that line crosses 0. The work grows with the picture's width and not with its pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from convoy.models.geometry import ImagePlacement
from convoy.models.run_lengths import counts_between

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
# Prototypes are combined for so many objects at once.
_AT_ONCE = 32


class _Axis(NamedTuple):
    """Where the centres of the picture's pixels lie between the cells of the prototypes, along an axis.

    Pixel i is at i * `step` - `shift`, where the centre of cell j is at j, but not below `low` or above `high`.
    """

    step: float
    shift: float
    low: float
    high: float

    @staticmethod
    def of(placement: ImagePlacement, axis: int, cells: int) -> _Axis:
        """Of x (0) or y (1); the cells cover the whole input.

        What a network gives for the padding of a letterbox means nothing, so nothing is interpolated with it: the
        values at the edge of what it was shown hold to the edge of the picture. As in Ultralytics, they are of whole
        cells. If the padding ends within a cell, they are of the largest equal parts of a cell that it does not cut.
        """
        window, full, corner = placement.window[axis], placement.full[axis], placement.corner[axis]
        shown = max(0, -corner), min(window, full - corner)
        sample_px = math.gcd(window // cells, *shown) if window % cells == 0 else 1
        low, high = (
            (edge + half) * cells / window - 0.5
            for edge, half in zip(shown, (sample_px / 2, -sample_px / 2), strict=True)
        )
        step = full / placement.picture[axis] * cells / window
        shift = corner * cells / window + 0.5 - step / 2
        return _Axis(step, shift, max(0.0, low), min(float(cells - 1), high))

    def at(self, pixels: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """Their places, from `low` to `high`."""
        places: npt.NDArray[np.float64] = (pixels * self.step - self.shift).clip(self.low, self.high)
        return places


def masks_on_picture(
    coefficients: Floats,
    prototypes: npt.NDArray[np.floating],
    corners: npt.NDArray[np.float64],
    placement: ImagePlacement,
) -> Iterator[Integers]:
    """The run lengths of each object's mask on the picture, as int64 counts of pixels down the columns.

    `coefficients` float32 [n, M] and `prototypes` float [M, h, w] give values for the whole input, which are
    interpolated linearly; the mask is where they are above 0, in the pixels whose left and upper edge is within the
    object's box in `corners` float64 [n, 4], which is (x1, y1, x2, y2) on the picture.
    """
    masks, rows, columns = prototypes.shape
    # Column by column, as run lengths go.
    turned = prototypes.astype(np.float32).transpose(0, 2, 1).reshape(masks, -1)
    across, down = _Axis.of(placement, 0, columns), _Axis.of(placement, 1, rows)
    edges = np.ceil(corners).astype(np.int64)
    for first in range(0, len(coefficients), _AT_ONCE):
        values = (coefficients[first : first + _AT_ONCE] @ turned).reshape(-1, columns, rows)
        for own, (left, top, right, bottom) in zip(values, edges[first : first + _AT_ONCE].tolist(), strict=True):
            width, height = placement.picture
            found = _edges(own, across, down, (left, top, right, bottom), height)
            yield counts_between(found, width * height)


def _edges(values: Floats, across: _Axis, down: _Axis, box: tuple[int, int, int, int], height: int) -> Integers:
    """Where the mask begins or ends in the box, as places down the picture's columns; `values` is [columns, rows]."""
    left, top, right, bottom = box
    if left >= right or top >= bottom:
        return np.zeros(0, np.int64)
    lines = _between_columns(values, across.at(np.arange(left, right)))
    upper, lower = down.at(np.array([top, bottom - 1])).astype(np.int64).tolist()
    lines = lines[:, upper : lower + 2]
    is_inside = lines > 0
    columns, cells = np.nonzero(is_inside[:, 1:] != is_inside[:, :-1])
    before, after = lines[columns, cells].astype(np.float64), lines[columns, cells + 1]
    crossings = upper + cells + before / (before - after)
    # The first pixel beyond the crossing. Exactly there, the value is 0, which is outside.
    ends = before > 0
    rows = (crossings + down.shift) / down.step
    rows = np.where(ends, np.ceil(rows), np.floor(rows) + 1)
    rows[np.where(ends, crossings <= down.low, crossings < down.low)] = top
    rows[np.where(ends, crossings > down.high, crossings >= down.high)] = bottom
    rows = rows.clip(top, bottom).astype(np.int64)
    starts = np.arange(left, right) * height
    return np.concatenate([starts[is_inside[:, 0]] + top, starts[columns] + rows, starts[is_inside[:, -1]] + bottom])


def _between_columns(values: Floats, places: npt.NDArray[np.float64]) -> Floats:
    """The values [columns, rows] at these places between columns, [places, rows]."""
    first = places.astype(np.int64)
    share = (places - first).astype(np.float32)[:, None]
    lines = values[first]
    lines += (values[np.minimum(first + 1, len(values) - 1)] - lines) * share
    return lines
