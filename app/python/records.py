"""The results of the Python engine, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from convoy.app.calls.timing import Timing
from convoy.app.pictures.answering import ClassShare, Detection, Prediction
from convoy.models.errors import RequestError
from convoy.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Classification:
    """One image's classes, best first, or its error.

    With an `error`, `timing_ms` is None and `predictions` is empty.
    """

    model: str
    version: int
    predictions: tuple[Prediction, ...] = ()
    timing_ms: Timing | None = None
    error: RequestError | None = None

    @property
    def best(self) -> Prediction:
        """The best class. Raises the image's error if it has one, and ModelFailed if no classes were asked for."""
        if self.error is not None:
            raise self.error
        return self.predictions[0]


@dataclass(frozen=True, slots=True)
class Segmentation:
    """The class of each pixel of one image, or its error.

    `class_map` is uint8 [height, width] of the image as a viewer shows it, 255 for pixels that the network did not see;
    `unseen_share` is their share. `classes` are those that occur, with their share of all pixels. With an `error`, the
    map is empty and `timing_ms` is None.
    """

    model: str
    version: int
    class_map: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    classes: tuple[ClassShare, ...] = ()
    unseen_share: float = 0.0
    timing_ms: Timing | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Detections:
    """The objects in one image, best first. With an `error` there are none, and `timing_ms` is None."""

    model: str
    version: int
    detections: tuple[Detection, ...] = ()
    timing_ms: Timing | None = None
    error: RequestError | None = None


# The result for each of several images.
ImageAnswer = TypeVar("ImageAnswer", Classification, Segmentation, Detections)


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A served version and what runs it: `engine`, `precision` and `device` as in `/stats`.

    `spec` has its inputs, outputs, labels, preprocessing and largest batch.
    """

    name: str
    version: int
    spec: ModelSpec
    engine: str
    precision: str
    device: str
    reason: str
