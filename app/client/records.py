"""What a server says of its models. Plain data; what it says of an image is `app.python.records`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from convoy.app.python.records import Classification, Detections, Segmentation

# What is in an image, by the task of the model that was asked.
Sight: TypeAlias = Classification | Segmentation | Detections


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A version of a model on a server: `state` is the protocol's (READY, LOADING, UNAVAILABLE), `reason` why."""

    name: str
    version: int
    state: str
    reason: str

    @property
    def is_ready(self) -> bool:
        return self.state == "READY"
