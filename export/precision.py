"""Which variants there are: one row each. A new precision is one new file and one new row.

Knows file names, precisions, targets and makers. Knows nothing of how a maker works or whether it pays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from export.data import ImageSet
from export.progress import Progress
from export.quantize import quantize_for_cpu
from models.bundle import Precision, Target
from models.errors import UsageError


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one variant comes to be.

    `make(fp32, target, calibration, progress)` writes the file from the fp32 graph; None for the graph itself.
    """

    file: str
    precision: Precision
    target: Target
    make: Callable[[Path, Path, ImageSet, Progress], None] | None


REFERENCE = Recipe("fp32.onnx", "fp32", "cpu", None)
RECIPES = (
    REFERENCE,
    Recipe("int8-cpu.onnx", "int8", "cpu", quantize_for_cpu),
)


def select(precisions: str | None, *, can_calibrate: bool) -> tuple[Recipe, ...]:
    """The rows to make for `--precisions`; the reference is always among them.

    None takes all that can be made. Raises UsageError for a precision that is not known, or that was asked
    for by name and needs images that were not given.
    """
    if precisions is None:
        return tuple(recipe for recipe in RECIPES if recipe.make is None or can_calibrate)
    known = {recipe.precision for recipe in RECIPES}
    asked = {part.strip() for part in precisions.split(",")}
    unknown = sorted(asked - known)
    if unknown:
        raise UsageError(
            f"--precisions {unknown[0]!r} is not made by this version; choose from {','.join(sorted(known))}"
        )
    chosen = tuple(recipe for recipe in RECIPES if recipe is REFERENCE or recipe.precision in asked)
    if not can_calibrate and any(recipe.make for recipe in chosen):
        raise UsageError("int8 needs real images to find its ranges; pass --calibrate DATASET, or --precisions fp32")
    return chosen
