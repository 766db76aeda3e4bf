"""What may be asked of a picture over any wire, by the task of its model, and the document that answers it.

Knows no wire. What takes long here runs in a thread, in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import orjson

from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.answering import BOXES, CLASS_MAP, Wanted, why_no_predictions
from convoy.app.pictures.class_map import SegmentedPicture, run_lengths
from convoy.app.pictures.predictor import MOST_TOP_K, Predicted, check_threshold, check_top_k, wanted_classes
from convoy.models.errors import InvalidRequest
from convoy.models.tasks import Task

Document = dict[str, Any]


def check_takes_pictures(served: Served) -> None:
    """Raises InvalidRequest, and says what to do instead."""
    why = why_no_predictions(served.spec)
    if why is not None:
        name, version = served.key.model, served.key.version
        raise InvalidRequest(f"'{name}' {why}; send tensors to /v2/models/{name}/versions/{version}/infer")


def wanted_of(served: Served, top_k: object, threshold: object) -> Wanted:
    """What is wanted of a picture; both as they came, numbers or text, or None. Raises InvalidRequest."""
    return _WANTED[served.spec.task](served, top_k, threshold)


def answer_document(wanted: Wanted, predicted: Predicted) -> Document:
    """What was found in one picture, and where the time went."""
    return {wanted.answering.key: predicted.found, "timing_ms": predicted.timing.document()}


def envelope(served: Served) -> Document:
    """Who answers."""
    return {"model": served.key.model, "version": str(served.key.version)}


def _wanted_classes(served: Served, top_k: object, threshold: object) -> Wanted:
    least = _threshold(threshold, served)
    return wanted_classes(_top_k(top_k), least)


def _wanted_boxes(served: Served, top_k: object, threshold: object) -> Wanted:
    least = _threshold(threshold, served)
    return Wanted(BOXES, _top_k(top_k), least)


def _wanted_map(served: Served, top_k: object, threshold: object) -> Wanted:
    for word, given in (("top_k", top_k), ("threshold", threshold)):
        if given is not None:
            name = served.key.model
            raise InvalidRequest(f"{word} is for classes and boxes, and '{name}' gives a class map; leave it away")
    return Wanted(CLASS_MAP, finish=_map_document)


# By the task of the model. All raise InvalidRequest.
_WANTED: dict[Task, Callable[[Served, object, object], Wanted]] = {
    "classify": _wanted_classes,
    "multilabel": _wanted_classes,
    "segment": _wanted_map,
    "detect": _wanted_boxes,
}


def _threshold(given: object, served: Served) -> float | None:
    if given is None:
        return None
    threshold = math.nan
    if isinstance(given, str | int | float) and not isinstance(given, bool):
        with suppress(ValueError):
            threshold = float(given)
    return check_threshold(threshold, given, served)


def _top_k(given: object) -> int | None:
    if isinstance(given, str):
        is_number = given.isascii() and given.isdigit()
        digits = given.lstrip("0") if is_number else ""
        return check_top_k(int(digits or 0) if len(digits) <= len(str(MOST_TOP_K)) else MOST_TOP_K, given)
    return None if given is None else check_top_k(given, given)


def _map_document(found: SegmentedPicture) -> orjson.Fragment:
    """Written by itself, so that the event loop has only to put it into the rest of the answer."""
    height, width = found.class_map.shape
    counts = run_lengths(found.class_map, [one.class_id for one in found.classes])
    classes = [
        {**asdict(one), "rle": {"size": [height, width], "counts": runs}}
        for one, runs in zip(found.classes, counts, strict=True)
    ]
    document = {"height": height, "width": width, "unseen_share": found.unseen_share, "classes": classes}
    return orjson.Fragment(orjson.dumps(document))
