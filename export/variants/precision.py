"""The variants, one row each. A new precision is one new file and one new row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from convoy.app.engines.cpu import has_bf16
from convoy.app.engines.machine import find_cpu
from convoy.app.engines.table import ROWS, Row
from convoy.export.variants.calibrate import Conversion
from convoy.export.variants.halves import convert_to_bf16, convert_to_fp16
from convoy.export.variants.pairs import FOR_OPENVINO, FOR_TENSORRT, FP8, gains_from_pairs
from convoy.export.variants.quantize import quantize_for_cpu
from convoy.models.bundle import Precision, Target
from convoy.models.errors import UsageError

# Writes a file from the prepared fp32 graph. Returns what was left in higher precision by rule, with reasons.
Make = Callable[[Conversion, Path], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one variant is made. `make` is None for the fp32 graph itself."""

    file: str
    precision: Precision
    target: Target
    make: Make | None

    @property
    def name(self) -> str:
        """The variant's name for people, such as `int8-cpu`."""
        return self.file.removesuffix(".onnx")

    @property
    def row(self) -> Row | None:
        """The engine of this machine's CPU that will serve the variant; None if it is for another device."""
        if self.precision == "bf16" and not has_bf16():
            return None
        rows = [row for row in ROWS if not row.is_on_gpus and self.target in row.targets]
        return next((row for row in rows if row.probe(find_cpu())[0]), None)

    @property
    def other_rows(self) -> tuple[Row, ...]:
        """Other engines of this machine's CPU that may serve the variant as well."""
        if self.row is None:
            return ()
        rows = [row for row in ROWS if not row.is_on_gpus and row is not self.row and row.probe(find_cpu())[0]]
        return tuple(row for row in rows if self.precision == "fp32" or self.target in row.targets)

    @property
    def is_default(self) -> bool:
        """Whether it is made by default. What only OpenVINO runs is made if that is possible."""
        return self.target != "openvino" or self.row is not None

    @property
    def has_eight_bits(self) -> bool:
        """Whether layers may have to be kept in higher precision, one by one, to be good enough."""
        return self.precision in ("int8", "fp8")


REFERENCE = Recipe("fp32.onnx", "fp32", "cpu", None)
INT8_CPU = Recipe("int8-cpu.onnx", "int8", "cpu", quantize_for_cpu)
INT8_OPENVINO = Recipe("int8-openvino.onnx", "int8", "openvino", FOR_OPENVINO.quantize)
RECIPES = (
    REFERENCE,
    Recipe("bf16.onnx", "bf16", "openvino", convert_to_bf16),
    Recipe("fp16.onnx", "fp16", "cuda", convert_to_fp16),
    INT8_CPU,
    INT8_OPENVINO,
    Recipe("int8-trt.onnx", "int8", "tensorrt", FOR_TENSORRT.quantize),
    Recipe("fp8.onnx", "fp8", "tensorrt", FP8.quantize),
)


def select(precisions: str | None, *, can_calibrate: bool) -> tuple[Recipe, ...]:
    """The rows to make for `--precisions`, always with the reference.

    None selects all that can be made. Raises UsageError for an unknown precision, or for one that was named and needs
    images that were not given.
    """
    if precisions is None:
        return tuple(recipe for recipe in RECIPES if recipe.make is None or (can_calibrate and recipe.is_default))
    known = sorted({recipe.precision for recipe in RECIPES})
    asked = {part.strip() for part in precisions.split(",")}
    unknown = sorted(asked - set(known))
    if unknown:
        raise UsageError(f"--precisions {unknown[0]!r} is unknown; choose from {','.join(known)}")
    chosen = tuple(recipe for recipe in RECIPES if recipe is REFERENCE or recipe.precision in asked)
    # Of several files of one precision, those that can be proved here are enough.
    chosen = tuple(recipe for recipe in chosen if recipe is not INT8_OPENVINO or recipe.is_default)
    if not can_calibrate and any(recipe.make for recipe in chosen):
        named = " and ".join(sorted(asked - {"fp32"}))
        raise UsageError(
            f"{named} need{'s' * (' ' not in named)} real images to find the ranges of values; pass --calibrate "
            "DATASET or --precisions fp32 (--allow-random-calibration uses noise, which costs speed and accuracy)"
        )
    return chosen


def without_needless_pairs(recipes: Sequence[Recipe], graph: Path) -> tuple[Recipe, ...]:
    """If everything between layers has 8-bit kernels, one INT8 file serves both CPU engines."""
    if INT8_OPENVINO not in recipes or gains_from_pairs(onnx.load(str(graph), load_external_data=False).graph):
        return tuple(recipes)
    return tuple(recipe for recipe in recipes if recipe is not INT8_OPENVINO)
