"""Masks of segmentation: `images/` and `masks/` with a PNG of class numbers for each image, 255 where none counts."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

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
    split_of,
)
from convoy.models.geometry import Extent
from convoy.models.image_files import read_image_file

IMAGES, MASKS = "images", "masks"
# Of a class, or of a pixel without one.
_MODES = ("L", "P", "1", "I", "I;16")


def has_masks(root: Path) -> bool:
    """Whether the folder, or its part for training or validation, has `images/` and `masks/`."""
    return any(
        (folder / IMAGES).is_dir() and any((folder / MASKS).rglob("*.png"))
        for folder in (root, *(root / name for name in SPLITS))
    )


def read_masks(root: Path) -> Annotated:
    """`images/` and `masks/`, or these in or above `train/` and `val/`. Raises JobError."""
    labels = listed_labels([root])
    parts: dict[Split, list[Annotation]] = {}
    for folder, name in ((root, MASKS), (root / MASKS, "")):
        for entry in entries(folder):
            inside = entry / name
            if (split := split_of(entry.name)) and inside.is_dir():
                images = entry / IMAGES if name else root / IMAGES / entry.name
                parts[split] = _annotations(images, inside)
    return Annotated(labels, parts or {"all": _annotations(root / IMAGES, root / MASKS)})


def _annotations(images: Path, masks: Path) -> list[Annotation]:
    faults = Faults(str(masks), "add or rename the files")
    stems = {str(mask.relative_to(masks).with_suffix("")): mask for mask in sorted(masks.rglob("*.png"))}
    found = []
    for image in images_below(images):
        name = image.relative_to(images)
        with faults.at(str(name)):
            mask = stems.get(str(name.with_suffix("")))
            if mask is None:
                raise BadAnnotation(f"there is no mask {name.with_suffix('.png')}")
            found.append(Annotation(image, mask, str(mask)))
    faults.refuse()
    return found


def check_mask(mask: Path, size: Extent) -> None:
    """Check form and size without decoding. Raises BadAnnotation."""
    try:
        with Image.open(mask) as opened:
            mode, found = opened.mode, opened.size
    except Exception as error:  # Pillow raises nearly anything for a broken file
        raise BadAnnotation(f"the mask {mask} cannot be read ({error})") from error
    if mode not in _MODES:
        raise BadAnnotation(f"the mask {mask} has {mode} pixels; save class numbers as a grey or palette PNG")
    if found != size:
        raise BadAnnotation(
            f"the mask {mask} is {found[0]}x{found[1]}, and the image {size[0]}x{size[1]}; make them equal"
        )


def read_mask(mask: Path) -> npt.NDArray[np.uint8]:
    """The class numbers [height, width]. Raises BadAnnotation."""
    try:
        with Image.open(io.BytesIO(read_image_file(mask))) as opened:
            values = np.asarray(opened)
    except Exception as error:  # as above
        raise BadAnnotation(f"the mask {mask} cannot be read ({error})") from error
    if values.ndim != 2 or values.min(initial=0) < 0 or values.max(initial=0) > 255:
        raise BadAnnotation(f"the mask {mask} must have class numbers from 0 to 254, and 255 for no class")
    return values.astype(np.uint8)
