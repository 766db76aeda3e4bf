"""Boxes from YOLO's text files: a line per object with its class, centre, width and height as shares of the image.

`data.yaml` names classes and parts, as Ultralytics documents it (https://docs.ultralytics.com/datasets/detect/); a
folder with `images/` and `labels/` does without. Polygons of segmentation labels become the boxes around them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convoy.models.annotations.records import (
    SPLITS,
    Annotated,
    Annotation,
    BadAnnotation,
    Faults,
    Split,
    entries,
    images_below,
    listed_labels,
    objects,
    read_text,
    refuse_beyond_image,
    shown,
    split_of,
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


def read_yolo(source: Path) -> Annotated:
    """A folder, or its `data.yaml`. Raises JobError."""
    file = source if source.is_file() else yaml_of(source)
    if file is not None:
        return _described(file)
    labels = listed_labels((source, source / "labels"))
    parts = {split: images for split, images in _folders(source).items() if images}
    return Annotated(labels, {split: _annotations(images, labels, source) for split, images in parts.items()})


def _folders(root: Path) -> dict[Split, list[Path]]:
    """The images by part, from the names of folders."""
    found: dict[Split, list[Path]] = {}
    for folder in (root, root / "images"):
        for entry in entries(folder):
            if entry.is_dir() and (split := split_of(entry.name)):
                found[split] = images_below(entry)
    return found or {"all": images_below(root / "images")}


def _described(file: Path) -> Annotated:
    try:
        values = read_yaml(file).values
    except UsageError as error:
        raise JobError(str(error).replace("--config ", "")) from error
    labels = _names(file, values.get("names"))
    root = _root(file, values.get("path"))
    parts: dict[Split, list[Annotation]] = {}
    for key in ("train", "val", "test"):
        if values.get(key) and (images := _images(file, root, key, values[key])):
            parts[SPLITS[key]] = _annotations(images, labels, root)
    if not parts:
        raise JobError(f"{file} names no images under train, val or test in {root}; correct path, train and val")
    return Annotated(labels, parts)


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


def _annotations(images: Sequence[Path], labels: Sequence[str], root: Path) -> list[Annotation]:
    faults = Faults(str(root), "repair these lines: class, x and y of the centre, width, height")
    files = {image: _label_file(image) for image in images}
    if images and not any(file.is_file() for file in files.values()):
        raise JobError(f"{root}: no image has a file of labels, such as {files[images[0]]}; put labels/ beside images/")
    found = [Annotation(image, _objects(file, labels, faults), str(file), None, True) for image, file in files.items()]
    faults.refuse()
    return found


def _label_file(image: Path) -> Path:
    """The last folder `images` becomes `labels`; without one, the labels are beside the image."""
    parts = list(image.parts)
    if "images" in parts[:-1]:
        place = len(parts) - 1 - parts[::-1].index("images", 1)
        parts[place] = "labels"
    return Path(*parts).with_suffix(".txt")


def _objects(file: Path, labels: Sequence[str], faults: Faults) -> Objects:
    """None without a file: YOLO has none for an image without objects."""
    boxes: list[list[float]] = []
    classes: list[int] = []
    lines = read_text(file).splitlines() if file.is_file() else []
    seen: set[str] = set()
    for number, line in enumerate(map(str.strip, lines), 1):
        # Equal lines are one object, as in Ultralytics.
        if line and line not in seen:
            seen.add(line)
            with faults.at(f"{file.name}, line {number}"):
                label, corners = _object(line.split(), labels)
                classes.append(label)
                boxes.append(corners)
    return objects(boxes, classes)


def _object(words: Sequence[str], labels: Sequence[str]) -> tuple[int, list[float]]:
    try:
        label, values = float(words[0]), np.array([float(word) for word in words[1:]])
    except ValueError:
        raise BadAnnotation(f"{shown(' '.join(words))} has a word that is not a number") from None
    if not label.is_integer() or not 0 <= label < (len(labels) or _MOST_CLASSES):
        known = f"from 0 to {len(labels) - 1}" if labels else "a whole number from 0"
        raise BadAnnotation(f"the class {words[0]} is not {known}")
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        raise BadAnnotation(f"there are {len(words)} numbers, and a box has 5, a polygon an odd number from 7")
    refuse_beyond_image(values)
    if len(values) > 4:
        points = values.reshape(-1, 2)
        return int(label), [*points.min(axis=0).tolist(), *points.max(axis=0).tolist()]
    x, y, width, height = values.tolist()
    return int(label), [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
