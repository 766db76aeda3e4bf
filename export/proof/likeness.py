"""What outputs decide, and how two decisions are compared: classes that stand each for itself, maps of classes.

Knows arrays alone.
"""

from __future__ import annotations

import numpy as np

from convoy.models.spec import Activation

# In masks, as everywhere since Pascal VOC: a pixel that nobody labelled.
UNLABELLED = 255


def decisions(outputs: np.ndarray, activation: Activation) -> np.ndarray:
    """bool of the outputs' shape: which classes are said to be there; a logit says so from 0, a share from one half."""
    above: np.ndarray = outputs >= (0.5 if activation == "none" else 0.0)
    return above


def class_maps(outputs: np.ndarray, activation: Activation) -> np.ndarray:
    """int64 [n, H, W] from scores [n, C, H, W], or from the classes themselves; of one score, 0 or 1."""
    if outputs.ndim == 3:
        return outputs.astype(np.int64)
    if outputs.shape[1] == 1:
        return decisions(outputs[:, 0], activation).astype(np.int64)
    best: np.ndarray = outputs.argmax(axis=1)
    return best


def mean_iou(maps: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float64 [n]: intersection over union, its mean over the classes that are in a sample's map or target.

    Pixels whose target is 255 do not count; a sample without others is right.
    """
    return np.array([_mean_iou(one, target) for one, target in zip(maps, targets, strict=True)])


def _mean_iou(one: np.ndarray, target: np.ndarray) -> float:
    counts = target != UNLABELLED
    found, wanted = one[counts], target[counts].astype(np.int64)
    if not len(wanted):
        return 1.0
    classes = int(max(found.max(), wanted.max())) + 1
    both = np.bincount(wanted[found == wanted], minlength=classes)
    either = np.bincount(found, minlength=classes) + np.bincount(wanted, minlength=classes) - both
    return float((both[either > 0] / either[either > 0]).mean())
