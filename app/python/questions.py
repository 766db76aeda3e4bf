"""What a Python program asks of an image, and the record that it gets: one class for each kind of question."""

from __future__ import annotations

from typing import Any, Generic

from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.answering import (
    ANSWERING,
    BOXES,
    CLASS_MAP,
    CLASSES,
    Answering,
    SegmentedPicture,
    Wanted,
    why_no_predictions,
)
from convoy.app.pictures.predictor import Predicted, check_threshold, check_top_k, wanted_classes
from convoy.app.python.records import Classification, Detections, ImageAnswer, Segmentation
from convoy.app.scheduling.request import ModelKey
from convoy.models.errors import InvalidRequest, RequestError

_ASKED_BY: dict[Answering, str] = {CLASSES: "predict", CLASS_MAP: "segment", BOXES: "detect"}


class Question(Generic[ImageAnswer]):
    """Asked of every image of a call alike: the best `top_k` of what reaches `threshold`."""

    answering: Answering
    record: type[Any]

    def __init__(self, top_k: int | None = None, threshold: float | None = None) -> None:
        """Raises InvalidRequest."""
        self._top_k = None if top_k is None else check_top_k(top_k, top_k)
        self._threshold = threshold

    def wanted(self, served: Served) -> Wanted:
        """The same as a wire asks. Raises InvalidRequest where the version does not answer this."""
        name, spec, threshold = served.key.model, served.spec, self._threshold
        why = why_no_predictions(spec)
        if why is not None:
            raise InvalidRequest(f"'{name}' {why}; give tensors to infer()")
        own = ANSWERING[spec.task]
        if own is not self.answering:
            raise InvalidRequest(f"'{name}' has the task {spec.task!r}; ask it with {_ASKED_BY[own]}()")
        if threshold is not None:
            threshold = check_threshold(threshold, threshold, served)
        if own is CLASSES:
            return wanted_classes(self._top_k, threshold)
        return Wanted(own, self._top_k, threshold)

    def answer(self, key: ModelKey, predicted: Predicted) -> ImageAnswer:
        """The record of what was found."""
        answer: ImageAnswer = self.record(key.model, key.version, tuple(predicted.found), predicted.timing)
        return answer

    def failure(self, key: ModelKey, error: RequestError) -> ImageAnswer:
        """The record of an image that has no answer."""
        answer: ImageAnswer = self.record(key.model, key.version, error=error)
        return answer


class WhichClasses(Question[Classification]):
    answering, record = CLASSES, Classification


class WhichBoxes(Question[Detections]):
    answering, record = BOXES, Detections


class WhichPixels(Question[Segmentation]):
    answering, record = CLASS_MAP, Segmentation

    def answer(self, key: ModelKey, predicted: Predicted) -> Segmentation:
        found: SegmentedPicture = predicted.found
        shown = (found.class_map, tuple(found.classes), found.unseen_share)
        return Segmentation(key.model, key.version, *shown, predicted.timing)
