"""A graph's tensors as its file declares them, held against what the model's specification promises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Signature:
    """A graph's tensors as the file declares them: whole shapes, -1 for every size that is not fixed."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def check_names(model: Path, have: Signature, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Whether the file has the tensors that the specification promises. Raises BundleError."""
    for ours, theirs in ((inputs, have.inputs), (outputs, have.outputs)):
        if [(t.name, t.dtype) for t in ours] != [(t.name, t.dtype) for t in theirs]:
            raise BundleError(
                f"{model}: the specification says {[(t.name, t.dtype) for t in ours]}, "
                f"the file has {[(t.name, t.dtype) for t in theirs]}; export the model again"
            )
