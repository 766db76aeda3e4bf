"""How well masks and keypoints agree: the IoU of masks, and the object keypoint similarity (OKS).

The definitions are COCO's (`pycocotools.cocoeval`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from convoy.export.proof.detection_metric import Booleans, Floats, Integers

# How far annotators differ on COCO's 17 keypoints of a person, as shares of the object's size.
_PERSON = (0.026, *(0.025,) * 2, *(0.035,) * 2, *(0.079,) * 2, *(0.072,) * 2, *(0.062,) * 2)
PERSON_SIGMAS: Floats = np.array([*_PERSON, *(0.107,) * 2, *(0.087,) * 2, *(0.089,) * 2])


def mask_overlaps(found: Sequence[Integers], wanted: Sequence[Integers], is_crowd: Booleans) -> Floats:
    """IoU [n, m] of masks, which are counts of pixels down the columns; with a crowd, the share of the mask in it."""
    areas, other_areas = (np.array([one[1::2].sum() for one in masks], float) for masks in (found, wanted))
    edges = [one.cumsum() for one in found]
    starts = np.concatenate([*(one[:-1:2] for one in edges), np.zeros(0, np.int64)])
    ends = np.concatenate([*(one[1::2] for one in edges), np.zeros(0, np.int64)])
    owner = np.repeat(np.arange(len(found)), [len(one) // 2 for one in edges])
    both = np.zeros((len(found), len(wanted)))
    for place, counts in enumerate(wanted):
        # The number of its pixels before each position grows linearly within runs.
        positions = np.append(0, counts.cumsum())
        before = np.append(0, np.where(np.arange(len(counts)) % 2, counts, 0).cumsum())
        inside = np.interp(ends, positions, before) - np.interp(starts, positions, before)
        both[:, place] = np.bincount(owner, inside, len(found))
    either = np.where(is_crowd[None, :], areas[:, None], areas[:, None] + other_areas[None, :] - both)
    shares: Floats = np.divide(both, either, out=np.zeros_like(both), where=either > 0)
    return shares


def keypoint_overlaps(found: Floats, wanted: Floats, areas: Floats, boxes: Floats) -> Floats:
    """Object keypoint similarity [n, m] of keypoints float64 [n, K, 2 or more] and [m, K, 3], whose third number is 0
    for points that are not labelled.

    `areas` [m] and `boxes` [m, 4] of (x1, y1, x2, y2) are the objects'. For an object without labelled points, those
    count that are far from its box. Of other objects than COCO's persons, each point may be off by the same.
    """
    points = wanted.shape[1]
    sigmas = PERSON_SIGMAS if points == len(PERSON_SIGMAS) else np.full(points, 1 / points)
    found, is_labelled = found[:, None, :, :2], wanted[..., 2] > 0
    distances = found - wanted[None, :, :, :2]
    corners, sizes = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    low, high = (corners - sizes)[None, :, None], (corners + 2 * sizes)[None, :, None]
    outside = (low - found).clip(0) + (found - high).clip(0)
    has_none: Booleans = np.logical_not(is_labelled.any(axis=1))
    distances = np.where(has_none[None, :, None, None], outside, distances)
    errors = (distances**2).sum(axis=3) / (2 * sigmas) ** 2 / (areas[None, :, None] + np.spacing(1)) / 2
    counts = is_labelled | has_none[:, None]
    similar: Floats = (np.exp(-errors) * counts).sum(axis=2) / counts.sum(axis=1)
    return similar
