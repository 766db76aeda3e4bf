"""What a server says of its models. Plain data; an image's classes are `app.python.records`'s."""

from __future__ import annotations

from dataclasses import dataclass


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
