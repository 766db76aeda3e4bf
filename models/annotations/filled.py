"""Polygons of annotations as run lengths, pixel for pixel as pycocotools fills them (`frPyObjects` and `merge`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from convoy.models.geometry import Extent
from convoy.models.run_lengths import counts_between

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
# pycocotools follows an outline in fifths of a pixel.
_STEPS = 5


def filled(polygons: Sequence[Floats], size: Extent) -> Integers:
    """The counts of pixels down the columns for the union of polygons, each float64 [n, 2] of (x, y), in an image of
    this width and height.
    """
    width, height = size
    edges = [_edges(polygon, width, height) for polygon in polygons]
    if len(edges) == 1:
        return counts_between(edges[0], width * height)
    parts = [counts_between(one, width * height).cumsum()[:-1] for one in edges]
    places = np.concatenate([*parts, np.zeros(0, np.int64)])
    changes = np.concatenate([*(1 - 2 * (np.arange(len(part)) % 2) for part in parts), np.zeros(0, np.int64)])
    order = np.argsort(places, kind="stable")
    places, is_inside = places[order], changes[order].cumsum() > 0
    is_last = np.append(places[1:] != places[:-1], True)[: len(places)]
    places, is_inside = places[is_last], is_inside[is_last]
    return counts_between(places[np.diff(is_inside, prepend=False)], width * height)


def _edges(polygon: Floats, width: int, height: int) -> Integers:
    """Where the columns of pixels enter or leave a polygon, as places down the columns."""
    corners = np.trunc(_STEPS * polygon + 0.5).astype(np.int64)
    starts, ends = corners, np.roll(corners, -1, axis=0)
    sizes = np.abs(ends - starts)
    is_flat = sizes[:, 0] >= sizes[:, 1]
    long, short = np.where(is_flat, 0, 1), np.where(is_flat, 1, 0)
    every = np.arange(len(corners))
    is_back = starts[every, long] > ends[every, long]
    low, high = (np.where(is_back[:, None], *pair) for pair in ((ends, starts), (starts, ends)))
    steps = sizes.max(axis=1)
    slopes = np.divide((high - low)[every, short], steps, out=np.zeros(len(corners)), where=steps > 0)
    side = np.repeat(every, steps + 1)
    step = np.arange(len(side)) - np.repeat((steps + 1).cumsum() - steps - 1, steps + 1)
    step = np.where(is_back[side], steps[side] - step, step)
    along = low[side, long[side]] + step
    across = np.trunc(low[side, short[side]] + slopes[side] * step + 0.5).astype(np.int64)
    x, y = np.where(is_flat[side], along, across), np.where(is_flat[side], across, along)
    moves = np.flatnonzero(x[1:] != x[:-1]) + 1
    columns = (np.where(x[moves] < x[moves - 1], x[moves], x[moves] - 1) + 0.5) / _STEPS - 0.5
    rows = (np.minimum(y[moves], y[moves - 1]) + 0.5) / _STEPS - 0.5
    is_column = (np.floor(columns) == columns) & (columns >= 0) & (columns <= width - 1)
    places: Integers = columns[is_column].astype(np.int64) * height
    places += np.ceil(rows[is_column].clip(0, height)).astype(np.int64)
    return places
