"""The answers for an image as records, for the server's client and for the engine in a program.

Plain data. Needs only numpy, so that the client can be installed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np

from convoy.models.errors import RequestError
from convoy.models.run_lengths import counts_of, mask_of

# How masks are answered: COCO's compressed run lengths, outlines, or not at all.
MaskForm = Literal["rle", "polygons", "none"]
MASK_FORMS: tuple[MaskForm, ...] = get_args(MaskForm)


class Timing(NamedTuple):
    """The stages of one request in milliseconds; `total` counts from the arrival of its headers."""

    decode_wait: float
    decode: float
    queue: float
    compute: float
    total: float

    def document(self) -> dict[str, float]:
        """The timing as a JSON object, rounded to microseconds."""
        return {stage: round(ms, 3) for stage, ms in self._asdict().items()}

    def header(self) -> tuple[bytes, bytes]:
        """The `Server-Timing` header."""
        return b"server-timing", _HEADER % self


_HEADER = b"decode_wait;dur=%.3f, decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, total;dur=%.3f"


@dataclass(slots=True)  # not frozen: construction would take five times as long
class Prediction:
    """One class and its score. The label is None if the model has none for it."""

    class_id: int
    label: str | None
    score: float

    def __str__(self) -> str:
        return f"{_name(self)} {self.score:.3f}"


@dataclass(slots=True)
class ClassShare:
    """One class that occurs in a class map. The label is None if the model has none for it.

    `share` is its share of all pixels of the picture, from 0 to 1.
    """

    class_id: int
    label: str | None
    share: float

    def __str__(self) -> str:
        return f"{_name(self)} {100 * self.share:.1f} %"


class Box(NamedTuple):
    """The upper left corner (x1, y1) and the lower right corner (x2, y2), in pixels of the picture.

    The origin is the picture's upper left corner. The server rounds to hundredths of a pixel.
    """

    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, slots=True)
class Mask:
    """The pixels of one object in a picture of this size, as COCO's compressed run lengths, which pycocotools reads."""

    height: int
    width: int
    counts: str

    def array(self) -> np.ndarray:
        """The mask as bool [height, width]. Raises ValueError if the run lengths are damaged."""
        return mask_of(counts_of(self.counts), self.height, self.width)

    def document(self) -> dict[str, object]:
        """The mask as JSON, in COCO's form."""
        return {"size": [self.height, self.width], "counts": self.counts}


class Keypoint(NamedTuple):
    """A point of an object in pixels of the picture, as for a box. `score` is None if the model gives none."""

    x: float
    y: float
    score: float | None = None

    def document(self) -> dict[str, float]:
        """The point as JSON."""
        return {"x": self.x, "y": self.y} if self.score is None else {"x": self.x, "y": self.y, "score": self.score}


@dataclass(slots=True)
class Detection:
    """One object with its box. The label is None if the model has none for the class.

    A segmenting model gives the `mask`, or its outlines as `polygons`, lists of x, y, x, y and so on; a pose model the
    `keypoints` in its own order.
    """

    class_id: int
    label: str | None
    score: float
    box: Box
    mask: Mask | None = None
    polygons: list[list[int]] | None = None
    keypoints: tuple[Keypoint, ...] = ()

    def document(self) -> dict[str, object]:
        """The object as JSON, as `/predictions` returns it."""
        found: dict[str, object] = {"class_id": self.class_id, "label": self.label, "score": self.score}
        found["box"] = self.box._asdict()
        if self.mask is not None:
            found["mask"] = self.mask.document()
        if self.polygons is not None:
            found["polygons"] = self.polygons
        if self.keypoints:
            found["keypoints"] = [point.document() for point in self.keypoints]
        return found

    def __str__(self) -> str:
        x1, y1, x2, y2 = self.box
        return f"{_name(self)} {self.score:.3f} from ({x1:g}, {y1:g}) to ({x2:g}, {y2:g})"


# `print` shows at most this many things of an answer; programs read the fields.
_MOST_LINES = 20


def _name(one: Prediction | ClassShare | Detection) -> str:
    return f"class {one.class_id}" if one.label is None else one.label


def _shown(answer: Classification | Segmentation | Detections, head: str, rows: Sequence[object]) -> str:
    """An answer for people: the model, then a line for each thing in the image, or why there is none."""
    model = f"{answer.model} version {answer.version}"
    if answer.error is not None:
        return f"{model}: {answer.error}"
    left = len(rows) - _MOST_LINES
    rest = [f"and {left} more"] if left > 0 else []
    return "\n  ".join([f"{model}: {head}", *map(str, rows[:_MOST_LINES]), *rest])


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

    def __str__(self) -> str:
        return _shown(self, _counted(self.predictions, "class", "classes"), self.predictions)


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

    def __str__(self) -> str:
        height, width = self.class_map.shape
        most_first = sorted(self.classes, key=lambda one: -one.share)
        classes = _counted(self.classes, "class", "classes")
        return _shown(self, f"{classes} in {width} x {height} pixels", most_first)


@dataclass(frozen=True, slots=True)
class Detections:
    """The objects in one image, best first. With an `error` there are none, and `timing_ms` is None."""

    model: str
    version: int
    detections: tuple[Detection, ...] = ()
    timing_ms: Timing | None = None
    error: RequestError | None = None

    def __str__(self) -> str:
        return _shown(self, _counted(self.detections, "object", "objects"), self.detections)


def _counted(rows: Sequence[object], one: str, several: str) -> str:
    return f"{len(rows)} {one if len(rows) == 1 else several}"


# The result for each of several images.
ImageAnswer = TypeVar("ImageAnswer", Classification, Segmentation, Detections)
