"""Boxes from COCO's JSON (https://cocodataset.org/#format-data), as COCO itself, CVAT and Roboflow write it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from convoy.models.annotations.records import (
    BOX_FILLED,
    SPLITS,
    Annotated,
    Annotation,
    BadAnnotation,
    Faults,
    Outline,
    Shapes,
    Split,
    entries,
    numbers,
    objects,
    shown,
    split_of,
    with_keypoints,
)
from convoy.models.errors import JobError
from convoy.models.geometry import Extent
from convoy.models.run_lengths import counts_of
from convoy.models.samples import some

_BESIDE_IMAGES = "_annotations.coco.json"


class _Image(msgspec.Struct):
    id: int | str
    file_name: Any = None
    width: Any = None
    height: Any = None


class _Box(msgspec.Struct):
    """Polygons, which take most of a file, are not decoded unless they are needed."""

    id: Any = None
    image_id: int | str | None = None
    category_id: int | str | None = None
    bbox: Any = None
    iscrowd: Any = 0
    segmentation: msgspec.Raw = msgspec.Raw(b"")
    keypoints: msgspec.Raw = msgspec.Raw(b"")
    area: Any = None


class _Category(msgspec.Struct):
    id: int
    name: str
    supercategory: Any = None


class _File(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Box]
    categories: list[_Category]


def annotation_files(root: Path) -> dict[Split, Path]:
    """The JSON files in a folder, by part; "all" if there is one. Empty if there are none. Raises JobError if it is not
    clear which part a file is.
    """
    beside = {split_of(folder.name): folder / _BESIDE_IMAGES for folder in entries(root) if folder.is_dir()}
    found = {split: file for split, file in beside.items() if split and file.is_file()}
    if found:
        return found if len(found) > 1 else {"all": next(iter(found.values()))}
    files = _json_files(root)
    if len(files) < 2:
        return {"all": files[0]} if files else {}
    parts = {_split_of(file): file for file in files}
    if None in parts or len(parts) < len(files):
        raise JobError(
            f"{root} has several files of annotations ({some([file.name for file in files])}), and their names do not "
            "say which is for training and which for validation; put train and val into the names, or pass one file "
            "with --calibrate and another with --evaluate"
        )
    return {split: file for split, file in parts.items() if split}


def _json_files(root: Path) -> list[Path]:
    """Of boxes rather than of captions or key points, if the names tell."""
    for folder, pattern in ((root / "annotations", "instances*.json"), (root, "instances*.json")):
        if found := sorted(folder.glob(pattern)):
            return found
    if (root / _BESIDE_IMAGES).is_file():
        return [root / _BESIDE_IMAGES]
    return sorted((root / "annotations").glob("*.json"))


def _split_of(file: Path) -> Split | None:
    words = [word for word in SPLITS if word in file.stem.lower()]
    return SPLITS[max(words, key=len)] if words else None


def read_coco(source: Path, shapes: Shapes = "none") -> Annotated:
    """A folder, or a JSON file. Categories are numbered in the order of their ids. Raises JobError.

    `shapes` are read as well, except for training, where nothing is measured.
    """
    files: dict[Split, Path] = {"all": source} if source.is_file() else annotation_files(source)
    decoded = {split: _decoded(file) for split, file in files.items()}
    labels = _labels(decoded.values(), source)
    root = source.parent if source.is_file() else source
    found: dict[Split, list[Annotation]] = {}
    for split, one in decoded.items():
        found[split] = _annotations(files[split], one, labels, root, "none" if split == "train" else shapes)
    return Annotated(labels, found)


def _decoded(file: Path) -> _File:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_File)
    except OSError as error:
        raise JobError(f"cannot read {file}: {error.strerror}; check the file and its permissions") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JobError(
            f"{file} is not COCO's JSON with images, annotations and categories ({error}); export it again as COCO"
        ) from error


def _labels(files: Collection[_File], source: Path) -> tuple[str, ...]:
    categories: dict[int, _Category] = {}
    for one in files:
        for category in one.categories:
            if categories.setdefault(category.id, category).name != category.name:
                raise JobError(
                    f"{source}: category {category.id} is {categories[category.id].name!r} in one file and "
                    f"{category.name!r} in another; use the same categories in all"
                )
    used = {box.category_id for one in files for box in one.annotations}
    names = (
        category.name
        for number, category in sorted(categories.items())
        if number in used or not _is_placeholder(category, list(categories.values()))
    )
    return tuple(dict.fromkeys(names))


def _is_placeholder(category: _Category, every: Sequence[_Category]) -> bool:
    """Roboflow's first category is the name of the project, the parent of all others."""
    others = [one for one in every if one is not category]
    return (
        category.supercategory == "none" and bool(others) and all(one.supercategory == category.name for one in others)
    )


def _annotations(file: Path, decoded: _File, labels: Sequence[str], root: Path, shapes: Shapes) -> list[Annotation]:
    faults = Faults(str(file))
    numbered = {category.id: labels.index(category.name) for category in decoded.categories if category.name in labels}
    known = {image.id for image in decoded.images}
    of_image: dict[Any, list[tuple[list[float], int, bool, _Box]]] = {image: [] for image in known}
    for place, box in enumerate(decoded.annotations):
        with faults.at(f"annotations[{place}] (id {shown(box.id)})"):
            if box.image_id not in of_image:
                raise BadAnnotation(f"there is no image {shown(box.image_id)}")
            if box.category_id not in numbered:
                raise BadAnnotation(f"there is no category {shown(box.category_id)}")
            corners = _corners(box)
            # Boxes without an area are left out.
            if corners[0] < corners[2] and corners[1] < corners[3]:
                of_image[box.image_id].append((corners, numbered[box.category_id], bool(box.iscrowd), box))
    finder = _ImageFinder(file, root)
    found = []
    for place, image in enumerate(decoded.images):
        with faults.at(f"images[{place}] (id {shown(image.id)})"):
            boxes, classes, crowds, own = zip(*of_image[image.id], strict=True) if of_image[image.id] else ((),) * 4
            where = f"{file.name}, image {shown(image.id)}"
            path = finder.path(image.file_name)
            target, outlines = objects(boxes, classes, crowds), None
            if shapes == "masks":
                outlines = _outlines(own)
            elif shapes == "keypoints":
                target = with_keypoints(target, [_keypoints(one) for one in own], [_area(one) for one in own])
            found.append(Annotation(path, target, where, _size(image), outlines=outlines))
    faults.refuse()
    return found


def _corners(box: _Box) -> list[float]:
    x, y, width, height = numbers(box.bbox, 4, "bbox")
    if width < 0 or height < 0:
        raise BadAnnotation(f"bbox has a negative size, {shown(box.bbox)}; COCO's are x, y, width, height")
    return [x, y, x + width, y + height]


def _outlines(boxes: Sequence[_Box]) -> tuple[Outline, ...] | None:
    """The masks of all objects, None if one has none. Raises BadAnnotation."""
    found = [_outline(box) for box in boxes]
    return None if any(one is None for one in found) else tuple(one for one in found if one is not None)


def _outline(box: _Box) -> Outline | None:
    match _decoded_field(box.segmentation):
        case [first, *rest] as polygons if all(isinstance(one, list) and len(one) >= 6 for one in (first, *rest)):
            what = f"a polygon of annotation {shown(box.id)}"
            return [np.array(numbers(one, len(one) // 2 * 2, what)).reshape(-1, 2) for one in polygons]
        case {"counts": str(text)}:
            try:
                return counts_of(text)
            except ValueError as error:
                raise BadAnnotation(f"the segmentation of annotation {shown(box.id)}: {error}") from error
        case {"counts": list(counts)} if all(type(one) is int for one in counts):
            return np.array(counts, np.int64)
    return None


def _keypoints(box: _Box) -> list[float] | None:
    values = _decoded_field(box.keypoints)
    if not isinstance(values, list) or not values or len(values) % 3:
        return None
    return numbers(values, len(values), "keypoints")


def _area(box: _Box) -> float:
    if isinstance(box.area, int | float) and box.area > 0:
        return float(box.area)
    x1, y1, x2, y2 = _corners(box)
    return (x2 - x1) * (y2 - y1) * BOX_FILLED


def _decoded_field(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw) if bytes(raw) else None


def _size(image: _Image) -> Extent | None:
    # Some tools write 0 for what they do not know.
    if isinstance(image.width, int) and isinstance(image.height, int) and min(image.width, image.height) > 0:
        return image.width, image.height
    return None


class _ImageFinder:
    """Finds images by their `file_name`, relative to the file, the folder, or the usual subfolders."""

    def __init__(self, file: Path, root: Path) -> None:
        part = file.stem.rpartition("_")[2]
        base = root.parent if root.name == "annotations" else root
        self._folders = list(dict.fromkeys(_image_folders(file, base, part)))

    def path(self, name: object) -> Path:
        """Raises BadAnnotation."""
        if not isinstance(name, str) or not name:
            raise BadAnnotation(f"file_name must be text, got {shown(name)}")
        for place, folder in enumerate(self._folders):
            # Unlike a path's own method, this is false for names that no file can have.
            if os.path.isfile(folder / name):  # noqa: PTH113
                # The next one probably lies beside it.
                self._folders.insert(0, self._folders.pop(place))
                return folder / name
        raise BadAnnotation(f"there is no image {shown(name)} in {some([str(folder) for folder in self._folders[:3]])}")


def _image_folders(file: Path, root: Path, part: str) -> Iterator[Path]:
    yield file.parent
    for folder in (root, root / "images"):
        yield folder
        yield from (folder / name for name in (part, *(word for word in SPLITS if word in part)))
