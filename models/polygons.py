"""The outlines of a mask as polygons.

An outline runs along the edges of pixels, and is then simplified. Holes are left out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# How far a simplified outline may be from the pixels' edges.
TOLERANCE_PX = 1.0

Integers = npt.NDArray[np.int64]
Points = npt.NDArray[np.int64]


def polygons_of(counts: Integers, height: int, tolerance_px: float = TOLERANCE_PX) -> list[Points]:
    """The outer outlines of a mask of this height, int64 [n, 2] of (x, y) each, clockwise on the screen.

    `counts` are its run lengths down the columns. Coordinates are of edges: pixel i covers i to i + 1. Pixels that
    touch only at a corner have outlines of their own.
    """
    outlines = [outline for outline in _outlines(*_edges(counts, height), height) if _doubled_area(outline) > 0]
    return [simplified(outline, tolerance_px) for outline in outlines]


def _outlines(edges: Integers, ends: Integers, height: int) -> list[Points]:
    """All outlines, corner by corner; those of holes run the other way."""
    following = _following(edges, ends).tolist()
    corners = np.stack(np.divmod(edges // 4, height + 1), axis=1)
    is_seen, outlines = bytearray(len(following)), []
    for first in range(len(following)):
        if is_seen[first]:
            continue
        loop, edge = [], first
        while not is_seen[edge]:
            is_seen[edge] = 1
            loop.append(edge)
            edge = following[edge]
        turns = edges[loop] % 4 != edges[[loop[-1], *loop[:-1]]] % 4
        outlines.append(corners[np.array(loop)[turns]])
    return outlines


def _edges(counts: Integers, height: int) -> tuple[Integers, Integers]:
    """The edges between the mask and the rest, each with its mask on the right-hand side, in ascending order.

    An edge is 4 times the number of the corner where it begins, and its direction: 0 to the right, 1 down, 2 left, 3
    up; the second array has the corners where they end. Corners are numbered down the columns, `height` + 1 in each.
    """
    tops, bottoms = _runs(counts, height)
    step = height + 1
    # The upper edges of runs, and the lower ones.
    across = [tops * 4, (bottoms + step) * 4 + 2]
    across_ends = [tops + step, bottoms]
    # Between two columns, there is an edge where one of them is in the mask: 1 for the right one, 2 for the left.
    own = np.concatenate([tops, bottoms])
    places, sides = np.concatenate([own, own + step]), np.repeat([1, 2], len(own))
    order = np.argsort(places, kind="stable")
    places, is_in = places[order], np.bitwise_xor.accumulate(sides[order])
    is_long = places[1:] > places[:-1]
    up, down = (np.flatnonzero(is_long & (is_in[:-1] == side)) for side in (1, 2))
    edges = np.concatenate([*across, places[up + 1] * 4 + 3, places[down] * 4 + 1])
    ends = np.concatenate([*across_ends, places[up], places[down + 1]])
    order = np.argsort(edges)
    return edges[order], ends[order]


def _runs(counts: Integers, height: int) -> tuple[Integers, Integers]:
    """The upper and lower corner, on the left-hand side, of each run of the mask in a column."""
    edges = counts.cumsum()
    starts, ends = edges[:-1:2], edges[1::2]
    columns = starts // height
    spanned = (ends - 1) // height - columns + 1
    # A run that goes on at the top of the next column is one in each.
    run = np.repeat(np.arange(len(starts)), spanned)
    column = columns[run] + np.arange(len(run)) - np.repeat(spanned.cumsum() - spanned, spanned)
    tops = np.maximum(starts[run], column * height) - column * height
    bottoms = np.minimum(ends[run], (column + 1) * height) - column * height
    return column * (height + 1) + tops, column * (height + 1) + bottoms


def _following(edges: Integers, ends: Integers) -> Integers:
    """The place of the edge that follows each edge. Where two meet, the one of the same pixel, to the right."""
    following = np.full(len(edges), -1)
    for turn in (3, 0, 1):
        wanted = ends * 4 + (edges + turn) % 4
        places = np.searchsorted(edges, wanted).clip(0, max(0, len(edges) - 1))
        is_there = edges[places] == wanted
        following[is_there] = places[is_there]
    return following


def _doubled_area(points: Points) -> int:
    x, y = points.T
    return int((x * np.roll(y, -1) - np.roll(x, -1) * y).sum())


def simplified(points: Points, tolerance_px: float) -> Points:
    """Some of a closed outline's points [n, 2], so that it moves by at most the tolerance; as they are if fewer than
    three would be left.

    The method is Ramer's, Douglas' and Peucker's, for all parts of the outline at once.
    """
    count = len(points)
    opposite = int(((points - points[0]) ** 2).sum(axis=1).argmax())
    kept = [np.array([0, opposite])]
    closed = np.concatenate([points, points[:1]]).astype(np.float64)
    # The points that are left, and the kept ones before and after each.
    left = np.delete(np.arange(count), kept[0])
    before, after = np.where(left < opposite, [[0], [opposite]], [[opposite], [count]])
    while len(left):
        (along_x, along_y), (x, y) = (closed[after] - closed[before]).T, (closed[left] - closed[before]).T
        lengths = np.hypot(along_x, along_y)
        distances = np.divide(np.abs(along_x * y - along_y * x), lengths, out=np.hypot(x, y), where=lengths > 0)
        is_first = np.diff(before, prepend=-1) > 0
        part = is_first.cumsum() - 1
        farthest = np.maximum.reduceat(distances, np.flatnonzero(is_first))
        is_far = (distances == farthest[part]) & (distances > tolerance_px)
        parts, places = np.unique(part[is_far], return_index=True)
        split = np.full(len(farthest), -1)
        split[parts] = left[is_far][places]
        kept.append(split[parts])
        own = split[part]
        is_left = (own >= 0) & (left != own)
        left, before, after, own = left[is_left], before[is_left], after[is_left], own[is_left]
        before, after = np.where(left > own, own, before), np.where(left < own, own, after)
    places = np.sort(np.concatenate(kept))
    return points[places] if len(places) >= 3 else points
