"""What a Python program asks of an image, and the record that it gets: one class for each kind of question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic

from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.answering import ANSWERING, BOXES, CLASS_MAP, CLASSES, Answering, Wanted, why_no_predictions
from convoy.app.pictures.class_map import SegmentedPicture
from convoy.app.pictures.predictor import Predicted, check_threshold, check_top_k, wanted_classes
from convoy.app.python.records import Classification, Detections, ImageAnswer, Segmentation
from convoy.app.scheduling.request import ModelKey
from convoy.models.errors import InvalidRequest, RequestError

_ASKED_BY: dict[Answering, str] = {CLASSES: "predict", CLASS_MAP: "segment", BOXES: "detect"}


class Question(ABC, Generic[ImageAnswer]):
    """Asked of every image of a call alike."""

    answering: Answering

    def wanted(self, served: Served) -> Wanted:
        """As the wires ask it. Raises InvalidRequest where the version does not answer this."""
        name, spec = served.key.model, served.spec
        why = why_no_predictions(spec)
        if why is not None:
            raise InvalidRequest(f"'{name}' {why}; give tensors to infer()")
        own = ANSWERING[spec.task]
        if own is not self.answering:
            raise InvalidRequest(f"'{name}' has the task {spec.task!r}; ask it with {_ASKED_BY[own]}()")
        return self._wanted(served)

    @abstractmethod
    def _wanted(self, served: Served) -> Wanted: ...

    @abstractmethod
    def answer(self, key: ModelKey, predicted: Predicted) -> ImageAnswer:
        """The record of what was found."""

    @abstractmethod
    def failure(self, key: ModelKey, error: RequestError) -> ImageAnswer:
        """The record of an image that has no answer."""


class _Ranked(Question[ImageAnswer]):
    """The best `top_k` of what reaches `threshold`."""

    def __init__(self, top_k: int | None, threshold: float | None) -> None:
        """Raises InvalidRequest."""
        self._top_k = None if top_k is None else check_top_k(top_k, top_k)
        self._threshold = threshold

    def _checked_threshold(self, served: Served) -> float | None:
        threshold = self._threshold
        return None if threshold is None else check_threshold(threshold, threshold, served)


class WhichClasses(_Ranked[Classification]):
    answering = CLASSES

    def _wanted(self, served: Served) -> Wanted:
        return wanted_classes(self._top_k, self._checked_threshold(served))

    def answer(self, key: ModelKey, predicted: Predicted) -> Classification:
        return Classification(key.model, key.version, tuple(predicted.found), predicted.timing)

    def failure(self, key: ModelKey, error: RequestError) -> Classification:
        return Classification(key.model, key.version, (), error=error)


class WhichBoxes(_Ranked[Detections]):
    answering = BOXES

    def _wanted(self, served: Served) -> Wanted:
        return Wanted(BOXES, self._top_k, self._checked_threshold(served))

    def answer(self, key: ModelKey, predicted: Predicted) -> Detections:
        return Detections(key.model, key.version, tuple(predicted.found), predicted.timing)

    def failure(self, key: ModelKey, error: RequestError) -> Detections:
        return Detections(key.model, key.version, error=error)


class WhichPixels(Question[Segmentation]):
    answering = CLASS_MAP

    def _wanted(self, served: Served) -> Wanted:
        return Wanted(CLASS_MAP)

    def answer(self, key: ModelKey, predicted: Predicted) -> Segmentation:
        found: SegmentedPicture = predicted.found
        classes = tuple(found.classes)
        return Segmentation(
            key.model,
            key.version,
            found.class_map,
            classes,
            found.unseen_share,
            timing_ms=predicted.timing,
        )

    def failure(self, key: ModelKey, error: RequestError) -> Segmentation:
        return Segmentation(key.model, key.version, error=error)
