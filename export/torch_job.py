"""What the parent asks of the torch child and what it gets back: two records and five files in one folder.

    job.json, samples.safetensors  ->  model.onnx, reference.safetensors, outcome.json

Knows neither torch nor the child's ways; both sides import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

JOB = "job.json"
SAMPLES = "samples.safetensors"
ONNX = "model.onnx"
REFERENCE = "reference.safetensors"
OUTCOME = "outcome.json"
# The one tensor of each safetensors file.
TENSOR = "tensor"
INPUT_NAME = "images"
OUTPUT_NAME = "logits"

SourceKind = Literal["zoo", "torchvision", "file"]


@dataclass(frozen=True, slots=True)
class Job:
    """What to export, as plain data.

    `file` is the user's file and `name` its factory for kind "file"; otherwise `name` is a registry's.
    `classes` is None where the network knows by itself. `mean` and `std` apply to values in [0, 1]: with
    `uint8_front` the graph takes uint8 [N, H, W, C] and applies them, else float32 [N, C, H, W].
    """

    kind: SourceKind
    name: str
    file: str | None
    weights: str | None
    classes: int | None
    uint8_front: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_batch: int
    threads: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it: either `error`, one line for the user, or torch's version and the number of outputs."""

    error: str | None
    outputs: int
    torch_version: str


def some(names: list[str]) -> str:
    """The first few names, for a message of one line."""
    shown = ", ".join(names[:5]) or "none"
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def one_line(text: str, limit: int = 300) -> str:
    """The text with its line breaks and runs of blanks taken out, cut at `limit` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."
