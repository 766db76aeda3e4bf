"""The document that a server answers an image with, as a record; the same on both wires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from convoy.app.calls.timing import Timing
from convoy.app.client.errors import NOT_A_SERVER
from convoy.app.client.records import Sight
from convoy.app.pictures.answering import Detection
from convoy.app.pictures.class_map import ClassShare
from convoy.app.pictures.scores import Prediction
from convoy.app.python.records import Classification, Detections, Segmentation
from convoy.models.errors import RequestError
from convoy.models.geometry import UNSEEN


def sight_of(document: Any) -> Sight:
    """Raises RequestError where it is none."""
    try:
        timing = Timing(*(float(document["timing_ms"][stage]) for stage in Timing._fields))
        model, version = str(document["model"]), int(document["version"])
        if "detections" in document:
            boxes = tuple(
                Detection(_box(row["box"]), int(row["class_id"]), row["label"], float(row["score"]))
                for row in document["detections"]
            )
            return Detections(model, version, boxes, timing)
        if "segmentation" in document:
            found = document["segmentation"]
            classes = tuple(
                ClassShare(int(row["class_id"]), row["label"], float(row["share"])) for row in found["classes"]
            )
            return Segmentation(model, version, _class_map(found), classes, float(found["unseen_share"]), timing)
        predictions = tuple(
            Prediction(int(row["class_id"]), row["label"], float(row["score"])) for row in document["predictions"]
        )
        return Classification(model, version, predictions, timing)
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"the answer is not a prediction; {NOT_A_SERVER}") from None


def _box(corners: Sequence[float]) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = map(float, corners)
    return x1, y1, x2, y2


def _class_map(found: dict[str, Any]) -> np.ndarray:
    """uint8 [height, width] of COCO's run lengths, which go down the columns. Raises ValueError for what fits not."""
    height, width = int(found["height"]), int(found["width"])
    columns = np.full(height * width, UNSEEN, np.uint8)
    for row in found["classes"]:
        counts = np.asarray(row["rle"]["counts"], np.int64)
        is_of_class = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
        np.putmask(columns, is_of_class.reshape(columns.shape), int(row["class_id"]))
    return np.ascontiguousarray(columns.reshape(width, height).T)
