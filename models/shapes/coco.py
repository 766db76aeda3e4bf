"""A set of pictures as files: COCO annotations, and masks of class numbers.

    images/train-00000.png            the pictures of both parts
    masks/train-00000.png             grey, the class of each pixel: 0 is the background, then the classes in order
    annotations/instances_train.json  COCO, with boxes and run-length masks; so for instances_val.json

Format: https://cocodataset.org/#format-data; categories are numbered from 1, as the classes of masks are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from convoy.models.errors import JobError
from convoy.models.samples import encode_png
from convoy.models.shapes.drawing import Picture, pictures
from convoy.models.shapes.shape_set import SHAPE_PARTS, SHAPES, ShapePart, ShapeSet


def write_folder(folder: Path, wanted: ShapeSet) -> None:
    """Write a set. The same set gives the same bytes with the same Pillow and zlib.

    Raises JobError if the folder exists or the disk refuses a file.
    """
    try:
        folder.mkdir(parents=True)
        for name in ("images", "masks", "annotations"):
            (folder / name).mkdir()
        for part in SHAPE_PARTS:
            _write_part(folder, part, wanted)
    except FileExistsError as error:
        raise JobError(f"{error.filename} already exists; choose a new folder") from error
    except OSError as error:
        raise JobError(f"cannot write {folder}: {error.strerror}; free space there or choose another place") from error


def _write_part(folder: Path, part: ShapePart, wanted: ShapeSet) -> None:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, picture in enumerate(pictures(wanted, part)):
        name = f"{part}-{number:05}.png"
        (folder / "images" / name).write_bytes(encode_png(picture.pixels))
        (folder / "masks" / name).write_bytes(_grey_png(picture.mask))
        images.append({"id": number + 1, "file_name": name, "width": wanted.px, "height": wanted.px})
        for annotation in _annotations(picture):
            annotations.append({"id": len(annotations) + 1, "image_id": number + 1, **annotation})
    categories = [{"id": number, "name": name, "supercategory": "shape"} for number, name in enumerate(SHAPES, start=1)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    text = json.dumps(document, indent=1) + "\n"
    (folder / "annotations" / f"instances_{part}.json").write_text(text, encoding="utf-8")


def _annotations(picture: Picture) -> Iterator[dict[str, Any]]:
    for index, (kind, box) in enumerate(zip(picture.classes.tolist(), picture.boxes.tolist(), strict=True), start=1):
        x1, y1, x2, y2 = box
        visible = picture.instances == index
        yield {
            "category_id": kind + 1,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": int(visible.sum()),
            "iscrowd": 0,
            "segmentation": {"size": list(visible.shape), "counts": run_lengths(visible)},
        }


def run_lengths(mask: npt.NDArray[np.bool_]) -> list[int]:
    """COCO's uncompressed run lengths of a mask [H, W]: column by column, of 0 and 1 in turn, beginning with 0."""
    flat = mask.T.ravel().astype(np.int8)
    changes = np.flatnonzero(np.diff(flat, prepend=np.int8(0)))
    lengths: list[int] = np.diff(changes, prepend=0, append=len(flat)).tolist()
    return lengths


def _grey_png(mask: npt.NDArray[np.uint8]) -> bytes:
    file = BytesIO()
    Image.fromarray(mask).save(file, "PNG", compress_level=1)
    return file.getvalue()
