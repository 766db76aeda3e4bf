"""The accuracy of detections: matches of one image, its score, and the mean average precision of a set.

The definition is COCO's (Lin et al., 2014; `pycocotools.cocoeval`): detections are matched to objects of their class,
best first, at ten thresholds of the intersection over union (IoU); a crowd is a region that is neither right nor wrong.
Knows boxes and numbers, and no networks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

IOU_THRESHOLDS: Floats = np.linspace(0.5, 0.95, 10)
# Per image and class, as in COCO.
MAX_DETECTIONS = 100
# And of keypoints.
MAX_POSES = 20
# What is measured, and how its measures are called.
BOXES, MASKS, KEYPOINTS = range(3)
PREFIXES = ("", "mask ", "OKS ")
_RECALLS: Floats = np.linspace(0.0, 1.0, 101)
MAP_50, MAP_50_95 = "mAP@50", "mAP@50:95"


class Found(NamedTuple):
    """Detections in one image, best first: `boxes` float64 [n, 4] of (x1, y1, x2, y2) in any unit, `classes` int64 [n]
    and `scores` float64 [n].
    """

    boxes: Floats
    classes: Integers
    scores: Floats


class Wanted(NamedTuple):
    """The objects in the image: `boxes` float64 [m, 4] in the same unit, `classes` int64 [m]. `is_crowd` bool [m] marks
    regions with too many objects to count, and `is_ignored` single objects that are neither right nor wrong.
    """

    boxes: Floats
    classes: Integers
    is_crowd: Booleans
    is_ignored: Booleans | None = None

    @property
    def does_not_count(self) -> Booleans:
        return self.is_crowd if self.is_ignored is None else self.is_crowd | self.is_ignored


class Matches(NamedTuple):
    """Each detection at each IoU threshold: `is_right` and `is_ignored` (in a crowd), bool [10, n]. A detection that is
    neither is wrong.
    """

    is_right: Booleans
    is_ignored: Booleans


def match(found: Found, wanted: Wanted, overlaps: Floats | None = None, most: int = MAX_DETECTIONS) -> Matches:
    """Match the detections of one image, class by class. Beyond `most` of a class they are ignored.

    `overlaps` [n, m] are what counts instead of the boxes' IoU, such as that of masks.
    """
    shape = len(IOU_THRESHOLDS), len(found.scores)
    is_right, is_ignored = np.zeros(shape, bool), np.zeros(shape, bool)
    if len(found.scores) > most:
        is_ignored[:, _beyond_most(found.classes, most)] = True
    for label in np.intersect1d(found.classes, wanted.classes):
        rows = np.flatnonzero(found.classes == label)[:most]
        own = np.flatnonzero(wanted.classes == label)
        # Objects before crowds: a crowd counts only for a detection that fits no object.
        own = own[np.argsort(wanted.does_not_count[own], kind="stable")]
        if len(own):
            is_crowd = wanted.is_crowd[own]
            if overlaps is None:
                shares = _overlaps(found.boxes[rows], wanted.boxes[own], is_crowd)
            else:
                shares = overlaps[np.ix_(rows, own)]
            is_right[:, rows], is_ignored[:, rows] = _matched(shares, wanted.does_not_count[own], is_crowd)
    return Matches(is_right, is_ignored)


def _beyond_most(classes: Integers, most: int) -> Booleans:
    """Which detections, best first, come after the first `most` of their class."""
    is_beyond = np.zeros(len(classes), bool)
    for label in np.unique(classes):
        is_beyond[np.flatnonzero(classes == label)[most:]] = True
    return is_beyond


def _overlaps(boxes: Floats, others: Floats, is_crowd: Booleans) -> Floats:
    """IoU [n, m], 0 for boxes without an area; with a crowd, the share of the box that lies in it."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    both = (high - low).clip(0).prod(axis=2)
    areas, other_areas = ((one[:, 2:] - one[:, :2]).clip(0).prod(axis=1) for one in (boxes, others))
    either = np.where(is_crowd[None, :], areas[:, None], areas[:, None] + other_areas[None, :] - both)
    shares: Floats = np.divide(both, either, out=np.zeros_like(both), where=either > 0)
    return shares


def _matched(shares: Floats, does_not_count: Booleans, is_crowd: Booleans) -> tuple[Booleans, Booleans]:
    """The same as `Matches` for one class; the objects come before what does not count, of which only a crowd takes
    several detections.
    """
    count, objects = len(shares), int((~does_not_count).sum())
    is_right, is_ignored = np.zeros((2, len(IOU_THRESHOLDS), count), bool)
    free = np.ones((len(IOU_THRESHOLDS), len(is_crowd)), bool)
    thresholds = IOU_THRESHOLDS[:, None]
    # Most detections of low scores are near nothing.
    for row in np.flatnonzero((shares >= IOU_THRESHOLDS[0]).any(axis=1)):
        fits = (free | is_crowd) & (shares[row] >= thresholds)
        is_right[:, row] = fits[:, :objects].any(axis=1)
        fits[is_right[:, row], objects:] = False
        is_ignored[:, row] = fits[:, objects:].any(axis=1)
        matched = np.flatnonzero(fits.any(axis=1))
        if len(matched):
            values = np.where(fits[matched], shares[row], -1.0)
            # Of equals the last, as in pycocotools.
            free[matched, len(is_crowd) - 1 - values[:, ::-1].argmax(axis=1)] = False
    return is_right, is_ignored


def image_score(found: Found, matches: Matches, objects: int) -> float:
    """The average precision of one image over all of its classes together, averaged over the IoU thresholds; 0..1.

    Every detection counts in the order of its score, so each lost, moved or renamed object and each false box above a
    right one lowers the score, by the more the better it was. In an image without objects it is 1 less the highest
    score of a false box. It is not COCO's measure, which needs a whole set: this one is a number per image, which a
    paired test between two files needs. A score by a fixed threshold, such as F1, hardly changes with a lost object
    among many boxes of low scores.
    """
    if not objects:
        wrong = ~matches.is_right & ~matches.is_ignored
        return 1.0 - float(np.where(wrong, found.scores, 0.0).max(axis=1, initial=0.0).mean())
    sums = [
        _interpolated(right[~ignored])[right[~ignored]].sum()
        for right, ignored in zip(matches.is_right, matches.is_ignored, strict=True)
    ]
    return float(np.mean(sums)) / objects


def _interpolated(is_right: Booleans) -> Floats:
    """The best precision from each rank on, of detections in order."""
    precision = is_right.cumsum() / np.arange(1, len(is_right) + 1)
    best: Floats = np.maximum.accumulate(precision[::-1])[::-1]
    return best


class SetMatches(NamedTuple):
    """The detections of a set of images, in the order of the images: `scores` float64 [n], `classes` int64 [n], and
    their matches [10, n]. `wanted` int64 [m] are the classes of all objects that are not crowds.
    """

    scores: Floats
    classes: Integers
    matches: Matches
    wanted: Integers


def mean_average_precision(one: SetMatches) -> dict[str, float]:
    """mAP at an IoU of 0.5 and averaged over all thresholds, by name: the mean over the classes that have objects.

    Both are 0 if no class has any.
    """
    labels = np.unique(one.wanted)
    if not len(labels):
        return {MAP_50: 0.0, MAP_50_95: 0.0}
    precisions = np.stack([_class_precisions(one, label) for label in labels])
    return {MAP_50: float(precisions[:, 0].mean()), MAP_50_95: float(precisions.mean())}


def class_average_precisions(one: SetMatches) -> dict[int, float]:
    """The average precision over all thresholds of each class that has objects."""
    return {int(label): float(_class_precisions(one, label).mean()) for label in np.unique(one.wanted)}


def _class_precisions(one: SetMatches, label: int) -> Floats:
    """The average precision of a class at each threshold: the mean over 101 levels of recall."""
    rows = np.flatnonzero(one.classes == label)
    rows = rows[np.argsort(-one.scores[rows], kind="stable")]
    objects = int((one.wanted == label).sum())
    return np.array(
        [
            _average_precision(right[rows][~ignored[rows]], objects)
            for right, ignored in zip(one.matches.is_right, one.matches.is_ignored, strict=True)
        ]
    )


def _average_precision(is_right: Booleans, objects: int) -> float:
    if not len(is_right):
        return 0.0
    places = np.searchsorted(is_right.cumsum() / objects, _RECALLS, side="left")
    precision = np.append(_interpolated(is_right), 0.0)
    return float(precision[places].mean())
