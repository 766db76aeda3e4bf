"""The answers for an image as records: the same from a server's client and from an engine in the program.

Plain data. Needs nothing but numpy, so that the client can be installed alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from convoy.models.errors import RequestError


class Timing(NamedTuple):
    """Milliseconds of one request; `total` counts from the arrival of its headers."""

    decode_wait: float
    decode: float
    queue: float
    compute: float
    total: float

    def document(self) -> dict[str, float]:
        """For a JSON answer, in whole microseconds."""
        return {stage: round(ms, 3) for stage, ms in self._asdict().items()}

    def header(self) -> tuple[bytes, bytes]:
        """`Server-Timing`, which browsers and proxies know how to show."""
        return b"server-timing", _HEADER % self


_HEADER = b"decode_wait;dur=%.3f, decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, total;dur=%.3f"


@dataclass(slots=True)  # not frozen, which would take five times as long to make
class Prediction:
    """One class and its score; the label is None where the model has none for it."""

    class_id: int
    label: str | None
    score: float


@dataclass(slots=True)
class ClassShare:
    """One class that occurs in a class map; the label is None where the model has none for it.

    `share` is that of all pixels of the picture, from 0 to 1.
    """

    class_id: int
    label: str | None
    share: float


@dataclass(slots=True)
class Detection:
    """One object: (x1, y1, x2, y2) in pixels of the picture, from its upper left corner, to hundredths.

    The label is None where the model has none for the class.
    """

    box: tuple[float, float, float, float]
    class_id: int
    label: str | None
    score: float


@dataclass(frozen=True, slots=True)
class Classification:
    """One image's classes, best first, or why there are none.

    `timing_ms` is None where there is an `error`, and `predictions` is empty.
    """

    model: str
    version: int
    predictions: tuple[Prediction, ...] = ()
    timing_ms: Timing | None = None
    error: RequestError | None = None

    @property
    def best(self) -> Prediction:
        """The best class. Raises the image's error where it has one, and ModelFailed where no class was asked for."""
        if self.error is not None:
            raise self.error
        return self.predictions[0]


@dataclass(frozen=True, slots=True)
class Segmentation:
    """The class of each pixel of one image, or why there is none.

    `class_map` is uint8 [height, width] of the image as a viewer shows it, 255 where the network was not shown a pixel,
    which `unseen_share` counts; `classes` are those that occur, with their share of all pixels. With an `error` the map
    has no pixels and `timing_ms` is None.
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
    """The objects in one image, best first, or why there are none: then `timing_ms` is None."""

    model: str
    version: int
    detections: tuple[Detection, ...] = ()
    timing_ms: Timing | None = None
    error: RequestError | None = None


# What a call for several images gives for each.
ImageAnswer = TypeVar("ImageAnswer", Classification, Segmentation, Detections)
