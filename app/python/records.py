"""What the engine in a Python program says of its models. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.models.spec import ModelSpec


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
