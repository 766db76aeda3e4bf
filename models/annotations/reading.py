"""Finds out in which form a data set has its boxes or masks, and reads it as a `Dataset`.

A part of the data is read only as far as it is used: a thousand images of a hundred thousand for calibration.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from convoy.models.annotations.coco import annotation_files, read_coco
from convoy.models.annotations.masks import check_mask, has_masks, read_masks
from convoy.models.annotations.records import (
    Annotated,
    Annotation,
    BadAnnotation,
    Faults,
    Shapes,
    Split,
    in_pixels,
    objects,
)
from convoy.models.annotations.voc import ANNOTATIONS, IMAGES, read_voc
from convoy.models.annotations.yolo import has_label_files, read_yolo, yaml_of
from convoy.models.datasets import source_labels
from convoy.models.errors import ImageError, JobError
from convoy.models.geometry import Extent
from convoy.models.image_files import read_image_file
from convoy.models.samples import Dataset, Objects, Part, Sample, split_by_content

_EXIF_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)


def is_annotated(source: str) -> bool:
    """Whether a data set has boxes or masks. Raises JobError for a folder that cannot be read."""
    return source_labels(source) is None and _reader(Path(source)) is not None


def _reader(source: Path, *, prefers_masks: bool = False) -> Callable[[Path], Annotated] | None:
    if source.suffix.lower() == ".json" and source.is_file():
        return read_coco
    if source.suffix.lower() in (".yaml", ".yml") and source.is_file():
        return read_yolo
    if not source.is_dir():
        return None
    if prefers_masks and has_masks(source):
        return read_masks
    if annotation_files(source):
        return read_coco
    if yaml_of(source) or has_label_files(source):
        return read_yolo
    if (source / IMAGES).is_dir() and (source / ANNOTATIONS).is_dir():
        return read_voc
    return read_masks if has_masks(source) else None


def annotated_labels(source: str) -> tuple[str, ...]:
    """The names of the classes in the data's order; empty if it has only numbers. Raises JobError."""
    return _read(source).labels


def _read(source: str, shapes: Shapes = "none", *, prefers_masks: bool = False) -> Annotated:
    reader = _reader(Path(source), prefers_masks=prefers_masks)
    assert reader is not None, "only annotated data has annotations; this is a bug"
    # The others have only boxes, or a mask of the whole image.
    if reader is read_coco:
        return read_coco(Path(source), shapes)
    return read_yolo(Path(source), shapes) if reader is read_yolo else reader(Path(source))


def load_annotated(
    source: str, *, most_calibrated: int, is_split: bool, shapes: Shapes = "none", prefers_masks: bool = False
) -> Dataset:
    """The parts for calibration and for evaluation; nothing is trained here.

    Calibrated are at most `most_calibrated` images of the training part, evenly spaced, and evaluated is the test part,
    or else the validation part. Data without parts is split by content, a fifth for evaluation, or is both parts whole
    unless `is_split`. `shapes` are what to read in addition to boxes, if the data has it. If a folder has boxes and
    masks of whole images, boxes are read unless `prefers_masks`.

    Raises JobError, which names what is wrong with annotations and images.
    """
    whole = _read(source, shapes, prefers_masks=prefers_masks)
    name = Path(source).resolve().name
    split = _parts(whole)
    if split is not None:
        calibrated, evaluated = split
        thinned = _thinned(calibrated, most_calibrated)
        return Dataset(
            name, whole.labels, {"train": (), **_loaded(source, {"calibration": thinned, "test": evaluated})}
        )
    every = [annotation for own in whole.parts.values() for annotation in own]
    if not every:
        raise JobError(f"{source} has no annotated images; add some")
    samples = _loaded(source, {"test": every})["test"]
    if not is_split:
        return Dataset(name, whole.labels, {"train": (), "calibration": samples, "test": samples})
    parts = split_by_content(samples)
    calibration = (*parts["train"], *parts["calibration"])
    return Dataset(name, whole.labels, {"train": (), "calibration": calibration, "test": parts["test"]})


def _parts(whole: Annotated) -> tuple[Sequence[Annotation], Sequence[Annotation]] | None:
    """Those for calibration and for evaluation; None if the data has only one part."""
    parts: Mapping[Split, Sequence[Annotation]] = {split: own for split, own in whole.parts.items() if own}
    evaluated = parts.get("test") or parts.get("val")
    calibrated = parts.get("train") or (parts.get("val") if "test" in parts else None)
    return (calibrated, evaluated) if calibrated and evaluated else None


def _thinned(annotations: Sequence[Annotation], most: int) -> Sequence[Annotation]:
    if len(annotations) <= most:
        return annotations
    return [annotations[index] for index in np.linspace(0, len(annotations) - 1, most).astype(int)]


def _loaded(source: str, parts: Mapping[Part, Sequence[Annotation]]) -> dict[Part, tuple[Sample, ...]]:
    faults = Faults(source)
    found: dict[Part, tuple[Sample, ...]] = {}
    for part, own in parts.items():
        samples = [_sample(annotation, faults) for annotation in own]
        found[part] = tuple(sample for sample in samples if sample is not None)
    faults.refuse()
    return found


def _sample(annotation: Annotation, faults: Faults) -> Sample | None:
    """None if its annotation or image file is wrong. An image that does not decode has no objects."""
    try:
        encoded = read_image_file(annotation.image)
    except ImageError as error:
        faults.found.append(str(error))
        return None
    sha256, size = hashlib.sha256(encoded).hexdigest(), _upright_size(encoded)
    try:
        return Sample(annotation.image.name, -1, sha256, annotation.image, _target(annotation, size))
    except BadAnnotation as error:
        faults.found.append(f"{annotation.where}: {error}")
        return None


def _target(annotation: Annotation, size: Extent | None) -> Objects | Path:
    """Raises BadAnnotation."""
    if isinstance(annotation.target, Path):
        if size is not None:
            check_mask(annotation.target, size)
        return annotation.target
    return objects((), ()) if size is None else in_pixels(annotation, size)


def _upright_size(encoded: bytes) -> Extent | None:
    """Width and height as a viewer shows the image; None if it has none."""
    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            width, height = opened.size
            is_turned = opened.getexif().get(_EXIF_ORIENTATION) in _TURNED
    except Exception:  # the decoder says what is wrong with it
        return None
    return (height, width) if is_turned else (width, height)
