"""From a segmentation network's raw output to the class of each pixel of its input, for who serves it, and for who
holds one file's maps against another's.

Knows the array of one sample. Knows nothing of pictures and of labels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from convoy.models.activation import NAN, activate
from convoy.models.errors import ModelFailed
from convoy.models.geometry import UNSEEN
from convoy.models.spec import Activation

ClassNumbers = npt.NDArray[np.uint8]

_HALF = 0.5


def class_numbers(values: npt.NDArray[np.generic], activation: Activation) -> ClassNumbers:
    """[h, w] of scores [C, h, w], or of the classes themselves [h, w]; of one score, 0 or 1. Raises ModelFailed."""
    if values.ndim == 2:
        lowest, highest = values.min(), values.max()
        if lowest < 0 or highest >= UNSEEN:
            wrong = lowest if lowest < 0 else highest
            raise ModelFailed(f"the model gave the class {wrong}, and a class map has 0 to {UNSEEN - 1}")
        return values.astype(np.uint8)
    if np.isnan(values.max()):
        raise ModelFailed(NAN)
    if len(values) == 1:
        return (activate(values[0].astype(np.float32), activation) >= _HALF).astype(np.uint8)
    return _largest(values)  # type: ignore[arg-type]


def _largest(scores: npt.NDArray[np.floating]) -> ClassNumbers:
    """The class of the largest score, of several the lowest: `argmax(axis=0)`, plane by plane as they lie."""
    best, numbers = scores[0].copy(), np.zeros(scores.shape[1:], np.uint8)
    for number in range(1, len(scores)):
        np.copyto(numbers, number, where=scores[number] > best)
        np.maximum(best, scores[number], out=best)
    return numbers
