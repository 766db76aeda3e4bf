"""Boxes as COCO's results, which pycocotools and evaluation tools read.

The format is that of https://cocodataset.org/#format-results.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from convoy.app.pictures.documents import Document
from convoy.models.answers import Detection

# JSON numbers above 2**53 lose digits in JavaScript, so longer names stay text.
_MOST_DIGITS = 15


def coco_records(found: Iterable[Detection], image_id: int | str) -> list[Document]:
    """One record per object, in order. `bbox` is the left edge, the top edge, width and height, in pixels.

    `segmentation` has run lengths or polygons, and `keypoints` x, y and the score of each point, 1 without scores.
    """
    return [_record(one, image_id) for one in found]


def _record(one: Detection, image_id: int | str) -> Document:
    x1, y1, x2, y2 = one.box
    record: Document = {
        "image_id": image_id,
        "category_id": one.class_id,
        "bbox": [x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)],
        "score": one.score,
    }
    if one.mask is not None:
        record["segmentation"] = one.mask.document()
    elif one.polygons is not None:
        record["segmentation"] = one.polygons
    if one.keypoints:
        record["keypoints"] = [
            value for x, y, score in one.keypoints for value in (x, y, 1 if score is None else score)
        ]
    return record


def image_id_of(name: str, position: int) -> int | str:
    """The file's name without folders and suffix, as a number where it is one; `position` for a file without a name.

    `000000397133.jpg` is 397133, as in COCO's own annotations.
    """
    stem = PurePosixPath(name.replace("\\", "/")).stem
    if stem.isascii() and stem.isdigit() and len(stem) <= _MOST_DIGITS:
        return int(stem)
    return stem or position
