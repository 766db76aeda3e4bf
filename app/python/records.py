"""What the Python engine reports about its models, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A served version and what runs it: `engine`, `precision` and `device` as in `/stats`.

    `spec` has its inputs, outputs, labels, preprocessing and largest batch.
    """

    name: str
    version: int
    spec: ModelSpec
    engine: str
    precision: str
    device: str
    reason: str
