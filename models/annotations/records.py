"""What every form of annotations is read into, and the collection of what is wrong with a file of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from convoy.models.annotations.filled import filled
from convoy.models.errors import JobError
from convoy.models.geometry import Extent
from convoy.models.image_files import IMAGE_SUFFIXES
from convoy.models.samples import Objects

# "all" if the data has no parts of its own.
Split = Literal["train", "val", "test", "all"]
SPLITS: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "trainval": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
_MOST_SHOWN, _MOST_PX = 5, 1e9
# Exports write six decimals, and rounding may exceed the edge a little.
_MOST_FRACTION = 1.01


def split_of(folder: str) -> Split | None:
    """The part that a folder's name says, such as `train` or `val2017`."""
    return SPLITS.get(folder.lower().rstrip("0123456789"))


# What to read beside boxes.
Shapes = Literal["none", "masks", "keypoints"]
# Polygons, each float64 [n, 2] of (x, y); or run lengths.
Outline = Sequence[npt.NDArray[np.float64]] | npt.NDArray[np.int64]
# A person fills about this share of a box. YOLO's labels have no areas.
BOX_FILLED = 0.53


class BadAnnotation(ValueError):
    """One annotation that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """One image and what is in it: objects, or the file of its mask.

    `are_fractions` means that coordinates are in shares of the image's width and height, and not in pixels. `size` is
    what the annotations say of the image, None if they do not. `where` names the annotation in messages. `outlines` are
    the masks of objects, whose run lengths depend on the image's size, if they were asked for and every object has one.
    """

    image: Path
    target: Objects | Path
    where: str
    size: Extent | None = None
    are_fractions: bool = False
    outlines: tuple[Outline, ...] | None = None


@dataclass(frozen=True, slots=True)
class Annotated:
    """`labels` in the data's order, to which class numbers refer; empty if the data has only numbers."""

    labels: tuple[str, ...]
    parts: Mapping[Split, Sequence[Annotation]]


@dataclass(slots=True)
class Faults:
    """Collects mistakes, so that the first few are reported together; `what` names the data."""

    what: str
    advice: str = "repair or remove them"
    found: list[str] = field(default_factory=list)

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Record a `BadAnnotation` of the block, and continue after it."""
        try:
            yield
        except BadAnnotation as error:
            self.found.append(f"{where}: {error}")

    def refuse(self) -> None:
        """Raise JobError if there were mistakes."""
        if self.found:
            shown = "; ".join(self.found[:_MOST_SHOWN])
            more = f"; and {len(self.found) - _MOST_SHOWN} more" if len(self.found) > _MOST_SHOWN else ""
            raise JobError(f"{self.what}: {shown}{more}; {self.advice}")


def objects(
    boxes: Sequence[Sequence[float]], classes: Sequence[int], is_crowd: Sequence[bool] | None = None
) -> Objects:
    """From rows of (x1, y1, x2, y2); rows without an area are left out, because nothing can match them."""
    corners = np.array(boxes, np.float64).reshape(-1, 4)
    crowds = np.zeros(len(corners), bool) if is_crowd is None else np.array(is_crowd, bool)
    has_area = (corners[:, 2:] > corners[:, :2]).all(axis=1)
    return Objects(corners[has_area], np.array(classes, np.int64)[has_area], crowds[has_area])


def with_keypoints(
    found: Objects, keypoints: Sequence[Sequence[float] | None], areas: Sequence[float] | None
) -> Objects:
    """The same with keypoints, rows of x, y and whether it is labelled, if every object has as many.

    Crowds may have none. Without `areas`, they are a share of the boxes'.
    """
    numbers_of = {len(points) for points in keypoints if points is not None}
    complete = all(points is not None or crowd for points, crowd in zip(keypoints, found.is_crowd, strict=False))
    if len(keypoints) != len(found.boxes) or len(numbers_of) != 1 or not complete:
        return found
    count = numbers_of.pop()
    points = np.array([[0.0] * count if one is None else one for one in keypoints]).reshape(len(keypoints), -1, 3)
    own = (found.boxes[:, 2:] - found.boxes[:, :2]).prod(axis=1) * BOX_FILLED if areas is None else np.array(areas)
    return replace(found, keypoints=points, areas=own.astype(np.float64))


def in_pixels(annotation: Annotation, size: Extent) -> Objects:
    """The objects in pixels of an image of this size (width, height), clipped to it. Raises BadAnnotation."""
    found = annotation.target
    assert isinstance(found, Objects), "masks have no boxes; this is a bug"
    if annotation.size is not None and annotation.size != size:
        turned = ", turned by its EXIF orientation" if annotation.size == size[::-1] else ""
        raise BadAnnotation(
            f"the image is {size[0]}x{size[1]}{turned}, and the annotations say {annotation.size[0]}x"
            f"{annotation.size[1]}"
        )
    boxes = found.boxes * np.tile(size, 2) if annotation.are_fractions else found.boxes
    clipped = boxes.clip(0, np.tile(np.array(size, np.float64), 2))
    if len(boxes) and not (clipped[:, 2:] > clipped[:, :2]).all():
        outside = boxes[(clipped[:, 2:] <= clipped[:, :2]).any(axis=1)][0]
        shown = ", ".join(f"{value:g}" for value in outside)
        raise BadAnnotation(f"the box {shown} (x1, y1, x2, y2) is outside of the image of {size[0]}x{size[1]}")
    scale = np.array(size if annotation.are_fractions else (1, 1), np.float64)
    masks, points, areas = None, found.keypoints, found.areas
    if annotation.outlines is not None:
        masks = tuple(_counts(outline, scale, size) for outline in annotation.outlines)
    if points is not None:
        points = np.concatenate([points[..., :2] * scale, points[..., 2:]], axis=2)
    return Objects(
        clipped, found.classes, found.is_crowd, masks, points, None if areas is None else areas * scale.prod()
    )


def _counts(outline: Outline, scale: npt.NDArray[np.float64], size: Extent) -> npt.NDArray[np.int64]:
    """Raises BadAnnotation."""
    if not isinstance(outline, np.ndarray):
        polygons = [polygon * scale for polygon in outline]
        if any(polygon.min() < -max(size) or polygon.max() > 2 * max(size) for polygon in polygons):
            raise BadAnnotation(f"a polygon is far outside of the image of {size[0]}x{size[1]}")
        return filled(polygons, size)
    if outline.sum() != size[0] * size[1] or outline.min(initial=0) < 0:
        raise BadAnnotation(f"the run lengths of a mask have {outline.sum()} pixels, and the image {size[0]}x{size[1]}")
    return outline


def numbers(values: object, count: int, what: str) -> list[float]:
    """`count` finite numbers below 1e9. Raises BadAnnotation."""
    if not isinstance(values, list | tuple) or len(values) != count or not all(map(_is_number, values)):
        raise BadAnnotation(f"{what} must be {count} numbers, got {shown(values)}")
    return [float(value) for value in values]


def _is_number(value: object) -> bool:
    # No image has more pixels along a side, and larger integers do not fit into arrays.
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST_PX < value < _MOST_PX


def refuse_beyond_image(fractions: npt.NDArray[np.float64]) -> None:
    """Raise BadAnnotation unless these are shares of the image's sides."""
    if not np.isfinite(fractions).all() or fractions.min() < 1 - _MOST_FRACTION or fractions.max() > _MOST_FRACTION:
        raise BadAnnotation("coordinates must be from 0 to 1, as shares of the image's width and height")


def shown(value: object) -> str:
    """A value in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def entries(folder: Path) -> list[Path]:
    """The visible contents of a folder, sorted; empty if it does not exist. Raises JobError if it cannot be read."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise JobError(
            f"cannot read the folder {folder}: {error.strerror}; check the path and its permissions"
        ) from error


def images_below(folder: Path) -> list[Path]:
    """All image files in a folder and its subfolders, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def read_text(path: Path) -> str:
    """A small text file. Raises JobError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}; check the file and its permissions") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{path} is not UTF-8 text; save it again as UTF-8") from error


def listed_labels(folders: Iterable[Path]) -> tuple[str, ...]:
    """The lines of `classes.txt` or `labels.txt` in one of the folders; empty if there is none. Raises JobError."""
    for folder in folders:
        for name in ("classes.txt", "labels.txt"):
            if (folder / name).is_file():
                return tuple(line.strip() for line in read_text(folder / name).splitlines() if line.strip())
    return ()
