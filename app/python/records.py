"""What the engine in a Python program gives back. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.app.edge.scores import Prediction
from convoy.app.edge.timing import Timing
from convoy.models.errors import RequestError
from convoy.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Classification:
    """One image's classes, best first, or why there are none.

    `timing_ms` is None where there is an `error`, and `predictions` is empty.
    """

    model: str
    version: int
    predictions: tuple[Prediction, ...]
    timing_ms: Timing | None = None
    error: RequestError | None = None

    @property
    def best(self) -> Prediction:
        """The best class. Raises the image's error where it has one, and ModelFailed where no class was asked for."""
        if self.error is not None:
            raise self.error
        return self.predictions[0]


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A version that answers, and what runs it: `engine`, `precision` and `device` as `/stats` names them.

    `spec` has its inputs, outputs, labels, preprocessing and the largest batch.
    """

    name: str
    version: int
    spec: ModelSpec
    engine: str
    precision: str
    device: str
    reason: str
