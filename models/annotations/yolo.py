"""Boxes from YOLO's text files: a line per object with its class, centre, width and height as shares of the image.

`data.yaml` names classes and parts, as Ultralytics documents it (https://docs.ultralytics.com/datasets/detect/); a
folder with `images/` and `labels/` does without. Segmentation labels are a class and a polygon, whose box is around it;
pose labels have keypoints after the box, as `kpt_shape` of `data.yaml` says.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from convoy.models.annotations.records import (
    SPLITS,
    Annotated,
    Annotation,
    BadAnnotation,
    Faults,
    Outline,
    Shapes,
    Split,
    entries,
    images_below,
    listed_labels,
    objects,
    read_text,
    refuse_beyond_image,
    shown,
    split_of,
    with_keypoints,
)
from convoy.models.errors import JobError, UsageError
from convoy.models.samples import Objects
from convoy.models.yaml_file import read_yaml

# Without names for them; more is a mistake.
_MOST_CLASSES = 1_000_000
_YAML_NAMES = ("data.yaml", "data.yml", "dataset.yaml")


def yaml_of(root: Path) -> Path | None:
    """The file that describes the data set in a folder."""
    return next((root / name for name in _YAML_NAMES if (root / name).is_file()), None)


def has_label_files(root: Path) -> bool:
    """Whether the folder has `images/` and `labels/` with text files, or `train/images/` and `train/labels/`."""
    return any(
        (folder / "images").is_dir() and any((folder / "labels").rglob("*.txt"))
        for folder in (root, *(root / name for name in SPLITS))
    )


def read_yolo(source: Path, shapes: Shapes = "none") -> Annotated:
    """A folder, or its `data.yaml`. `shapes` are read as well. Raises JobError."""
    file = source if source.is_file() else yaml_of(source)
    if file is not None:
        return _described(file, shapes)
    labels = listed_labels((source, source / "labels"))
    parts = {split: images for split, images in _folders(source).items() if images}
    form = _Form(labels, (), shapes)
    return Annotated(labels, {split: _annotations(images, form, source) for split, images in parts.items()})


@dataclass(frozen=True, slots=True)
class _Form:
    """How labels are read: names of classes, `kpt_shape` or (), and what is read beside boxes."""

    labels: tuple[str, ...]
    keypoints: tuple[int, ...]
    shapes: Shapes


def _folders(root: Path) -> dict[Split, list[Path]]:
    """The images by part, from the names of folders."""
    found: dict[Split, list[Path]] = {}
    for folder in (root, root / "images"):
        for entry in entries(folder):
            if entry.is_dir() and (split := split_of(entry.name)):
                found[split] = images_below(entry)
    return found or {"all": images_below(root / "images")}


def _described(file: Path, shapes: Shapes) -> Annotated:
    try:
        values = read_yaml(file).values
    except UsageError as error:
        raise JobError(str(error).replace("--config ", "")) from error
    labels = _names(file, values.get("names"))
    root = _root(file, values.get("path"))
    form = _Form(labels, _keypoint_shape(file, values.get("kpt_shape")), shapes)
    parts: dict[Split, list[Annotation]] = {}
    for key in ("train", "val", "test"):
        if values.get(key) and (images := _images(file, root, key, values[key])):
            parts[SPLITS[key]] = _annotations(images, form, root)
    if not parts:
        raise JobError(f"{file} names no images under train, val or test in {root}; correct path, train and val")
    return Annotated(labels, parts)


def _keypoint_shape(file: Path, shape: object) -> tuple[int, ...]:
    match shape:
        case None:
            return ()
        case [int(points), 2 | 3 as values] if points > 0:
            return points, values
    raise JobError(f"{file}: kpt_shape must be a number of points and 2 or 3 values each, got {shown(shape)}")


def _names(file: Path, names: object) -> tuple[str, ...]:
    """A list of names, or a mapping of numbers to names."""
    if isinstance(names, Mapping):
        numbered = {int(key): str(name) for key, name in names.items() if str(key).isdecimal()}
        if len(numbered) == len(names) and sorted(numbered) == list(range(len(names))):
            return tuple(numbered[number] for number in range(len(names)))
    elif isinstance(names, list) and names:
        return tuple(map(str, names))
    raise JobError(f"{file}: names must be a list of class names, or numbers from 0 with names; got {shown(names)}")


def _root(file: Path, path: object) -> Path:
    """`path` is relative to the file or to the working directory; if it was moved, the data is beside the file."""
    if path is None:
        return file.parent
    places = (file.parent / str(path), Path(str(path)))
    return next((place for place in places if os.path.isdir(place)), file.parent)  # noqa: PTH112


def _images(file: Path, root: Path, key: str, value: Any) -> list[Path]:
    """From folders, or text files that list images. Validation and training images must exist, a test part need not."""
    found: list[Path] = []
    for name in value if isinstance(value, list) else [value]:
        # Roboflow writes `../train/images` for a folder beside the file.
        places = [root / str(name), root / str(name).removeprefix("../"), file.parent / str(name)]
        # Unlike a path's own method, this is false for names that no file can have.
        place = next((one for one in places if os.path.exists(one)), None)  # noqa: PTH110
        if place is None:
            if key == "test":
                continue
            raise JobError(f"{file}: {key} is {shown(name)}, and there is no {places[0]}; correct it")
        found += images_below(place) if place.is_dir() else _listed(place, root)
    return found


def _listed(file: Path, root: Path) -> list[Path]:
    lines = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    return [file.parent / line if line.startswith("./") else root / line for line in lines]


def _annotations(images: Sequence[Path], form: _Form, root: Path) -> list[Annotation]:
    faults = Faults(str(root), "repair these lines: class, x and y of the centre, width, height")
    files = {image: _label_file(image) for image in images}
    if images and not any(file.is_file() for file in files.values()):
        raise JobError(f"{root}: no image has a file of labels, such as {files[images[0]]}; put labels/ beside images/")
    found = []
    for image, file in files.items():
        target, outlines = _objects(file, form, faults)
        found.append(Annotation(image, target, str(file), None, True, outlines))
    faults.refuse()
    return found


def _label_file(image: Path) -> Path:
    """The last folder `images` becomes `labels`; without one, the labels are beside the image."""
    parts = list(image.parts)
    if "images" in parts[:-1]:
        place = len(parts) - 1 - parts[::-1].index("images", 1)
        parts[place] = "labels"
    return Path(*parts).with_suffix(".txt")


class _Line(NamedTuple):
    """An object: its class, box (x1, y1, x2, y2), and the polygon or the keypoints of its line, if it has any."""

    label: int
    corners: list[float]
    polygon: npt.NDArray[np.float64] | None = None
    keypoints: list[float] | None = None


def _objects(file: Path, form: _Form, faults: Faults) -> tuple[Objects, tuple[Outline, ...] | None]:
    """The objects, and their outlines if asked for. None without a file: YOLO has none for an image without objects."""
    found: list[_Line] = []
    lines = read_text(file).splitlines() if file.is_file() else []
    seen: set[str] = set()
    for number, line in enumerate(map(str.strip, lines), 1):
        # Equal lines are one object, as in Ultralytics.
        if line and line not in seen:
            seen.add(line)
            with faults.at(f"{file.name}, line {number}"):
                one = _object(line.split(), form)
                # Boxes without an area are left out.
                if one.corners[0] < one.corners[2] and one.corners[1] < one.corners[3]:
                    found.append(one)
    target = objects([one.corners for one in found], [one.label for one in found])
    if form.shapes == "masks" and all(one.polygon is not None for one in found):
        return target, tuple([one.polygon] for one in found if one.polygon is not None)
    if form.shapes == "keypoints" and found:
        return with_keypoints(target, [one.keypoints for one in found], None), None
    return target, None


def _object(words: Sequence[str], form: _Form) -> _Line:
    labels = form.labels
    try:
        label, values = float(words[0]), np.array([float(word) for word in words[1:]])
    except ValueError:
        raise BadAnnotation(f"{shown(' '.join(words))} has a word that is not a number") from None
    if not label.is_integer() or not 0 <= label < (len(labels) or _MOST_CLASSES):
        known = f"from 0 to {len(labels) - 1}" if labels else "a whole number from 0"
        raise BadAnnotation(f"the class {words[0]} is not {known}")
    keypoints = None
    if form.keypoints and len(values) == 4 + math.prod(form.keypoints):
        points, values = values[4:].reshape(form.keypoints), values[:4]
        refuse_beyond_image(points[:, :2])
        is_labelled = points[:, 2:] if form.keypoints[1] == 3 else np.ones((len(points), 1))
        keypoints = np.concatenate([points[:, :2], is_labelled], axis=1).reshape(-1).tolist()
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        raise BadAnnotation(f"there are {len(words)} numbers, and a box has 5, a polygon an odd number from 7")
    refuse_beyond_image(values)
    if len(values) > 4:
        polygon = values.reshape(-1, 2)
        return _Line(int(label), [*polygon.min(axis=0).tolist(), *polygon.max(axis=0).tolist()], polygon)
    x, y, width, height = values.tolist()
    corners = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    return _Line(int(label), corners, None, keypoints)
