"""Find out dimensions that a graph leaves open by running it: sizes, and whether the first dimension is a batch.

The size at which a graph runs, such as height and width of a fully convolutional network, becomes the example of its
tensors (`TensorSpec.example`), which warm-up and measurements use. Only a run shows whether rows depend on each other:
they run alone and together, in batches of 2, 3 and the warm-up's sizes, about a dozen samples more than the warm-up.
The server needs it for models without a manifest, export for graphs made elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from convoy.app.engines.base import Signature
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.memory import growing_sizes
from convoy.app.engines.onnxruntime import open_session, run_arrays_on
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec, fits
from convoy.models.tensors import as_numbers, random_values

# Multiples of 32, at which image networks are trained. The first size that runs is used, because it is the cheapest.
TRIED_PX = (32, 64, 96, 128, 224, 256, 384, 512)
PROOF_ROWS = 3  # the minimum number of a batch's rows to compare with rows alone
# Of an output's largest value. Kernels may sum a batch in another order than a single row.
_TOLERANCE = {"FP16": 4e-3, "BF16": 3e-2}


@dataclass(frozen=True, slots=True)
class Size:
    """Height and width in pixels."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


def is_free(spec: TensorSpec) -> bool:
    """Whether a size after the first dimension is dynamic. `spec` has the whole shape."""
    return -1 in spec.shape[1:]


def is_free_image(spec: TensorSpec) -> bool:
    """Whether that can be the height or width of an image."""
    return is_free(spec) and len(spec.shape) >= 4  # a batch of [channels, height, width]


def with_examples(path: Path, signature: Signature, threads: int, wanted: Size | None = None) -> Signature:
    """Add examples for dynamic sizes, at `wanted` or the first of several sizes at which the graph runs.

    Shapes are whole, with the first dimension; in an example, a dynamic first dimension is 1. Returns the signature
    unchanged if nothing is dynamic, or if the graph runs at none of the sizes. Raises BundleError for a file that does
    not load.
    """
    if not any(map(is_free, signature.inputs)):
        return signature
    session = open_session(path, threads)
    for inputs in _candidates(signature.inputs, wanted):
        shapes = _shapes_of_outputs(session, signature, inputs)
        if shapes is not None:
            return Signature(inputs, tuple(map(_with_example, signature.outputs, shapes)))
    return signature


def _with_example(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    # The declared shapes of outputs may be wrong; the library only warns about that.
    return replace(spec, example=shape) if is_free(spec) and fits(shape, spec.shape) else spec


def at_size(specs: tuple[TensorSpec, ...], size: Size) -> tuple[TensorSpec, ...]:
    """Set the example of dynamic images to this size; the last dynamic dimension is the width."""
    return tuple(replace(spec, example=_sized(spec, size)) if is_free_image(spec) else spec for spec in specs)


def sizes_that_run(path: Path, signature: Signature, threads: int, more: int = 2) -> tuple[Size, ...]:
    """The size of the signature's examples and up to `more` others at which the graph runs, oblong ones first.

    Empty if no image size is dynamic, or the signature has no examples.
    """
    images = [spec for spec in signature.inputs if is_free_image(spec) and spec.example]
    if not images:
        return ()
    first, session, found = size_of(images[0]), open_session(path, threads), list[Size]()
    is_one = sum(size < 0 for size in images[0].shape[1:]) == 1
    for size in other_sizes(first)[2 * is_one :]:
        if len(found) < more and _shapes_of_outputs(session, signature, at_size(signature.inputs, size)) is not None:
            found.append(size)
    return (first, *found)


def size_of(spec: TensorSpec) -> Size:
    """The example's height and width; if only one of them is dynamic, it stands for both."""
    free = [example for size, example in zip(spec.shape[1:], spec.example[1:], strict=True) if size < 0]
    return Size(free[0], free[-1])


def other_sizes(first: Size) -> tuple[Size, ...]:
    """Larger sizes: higher, wider and, for networks that need squares, square. Each is a multiple of 32 away."""
    height, width = first.height, first.width
    oblong = Size(height + 32, width), Size(height, width + 64)
    return (*oblong, Size(height + 32, width + 32), Size(height + 64, width + 64))


def _candidates(specs: tuple[TensorSpec, ...], wanted: Size | None) -> Iterator[tuple[TensorSpec, ...]]:
    """Inputs with examples, the likely ones first: images of some size; other inputs with one element."""
    ones, *squares = (
        tuple(replace(spec, example=_sized(spec, Size(px, px))) if is_free(spec) else spec for spec in specs)
        for px in (1, *TRIED_PX)
    )
    if any(map(is_free_image, specs)):
        for size in [wanted] if wanted is not None else [Size(px, px) for px in TRIED_PX]:
            yield at_size(ones, size)
    if wanted is None:
        yield from (ones, *squares)


def _sized(spec: TensorSpec, size: Size) -> tuple[int, ...]:
    """Replace dynamic sizes by the height, and the last one by the width."""
    example = [abs(spec.shape[0]), *(size.height if own < 0 else own for own in spec.shape[1:])]
    example[max(axis for axis, own in enumerate(spec.shape) if own < 0)] = size.width
    return tuple(example)


def _shapes_of_outputs(
    session: Any, signature: Signature, inputs: tuple[TensorSpec, ...]
) -> list[tuple[int, ...]] | None:
    """The shapes of outputs for inputs of these examples, or None if the graph does not run."""
    generator = np.random.default_rng(3)
    arrays = {spec.name: random_values(generator, spec, spec.drawn_shape) for spec in inputs}
    try:
        outputs = run_arrays_on(session, arrays)
    except EngineFailure:
        return None
    shapes = [tuple(outputs[spec.name].shape) for spec in signature.outputs]
    # An empty output proves nothing: the input was smaller than the network's kernels.
    return shapes if all(map(all, shapes)) else None


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Why the first dimension is not a batch, or empty if it is. `is_open` means that it could not be decided."""

    objection: str = ""
    is_open: bool = False


def check_rows(
    path: Path, signature: Signature, threads: int, *, largest: int = PROOF_ROWS, original: Path | None = None
) -> RowCheck:
    """Check that each row of a batch, up to `largest`, gets the same answer as alone.

    `signature` is that of the graph in `path`, with first dimensions. If `original` is given, a graph with the same
    tensors that takes one row at a time, its answers are the reference, which also proves that a rewritten graph is the
    same model. Raises BundleError for a file that does not load, and if the largest batch does not fit into memory.
    """
    # Not through the engine, which would log failures that are answers here.
    together = open_session(path, threads)
    alone = together if original is None else open_session(original, threads)
    # Up to 8 different rows; a larger batch repeats them in random order.
    found = _rows_that_run(alone, signature, min(8, max(PROOF_ROWS, largest)))
    if isinstance(found, str):
        return RowCheck(f"a single row does not run ({found})", is_open=True)
    try:
        return _Proof(together, signature, found, may_round=original is None).check(largest)
    except EngineFailure as failure:
        raise BundleError(f"{path}: {failure}") from failure


def random_rows(
    generator: np.random.Generator, spec: TensorSpec, rows: int = PROOF_ROWS, *, are_indices: bool = False
) -> np.ndarray:
    """Random rows [rows, ...] of `random_values`; dynamic sizes after the first are the example's."""
    return random_values(generator, spec, (rows, *spec.drawn_shape[1:]), are_indices=are_indices)


class _Rows(NamedTuple):
    """Rows that run alone, their answers, and which outputs are reproducible."""

    inputs: dict[str, np.ndarray]
    answers: list[dict[str, np.ndarray]]
    steady: tuple[str, ...]


def _rows_that_run(session: Any, signature: Signature, count: int) -> _Rows | str:
    """Rows of the first kind with which the graph runs, or why the first kind does not run."""
    failure = ""
    for inputs in _kinds_of_rows(signature, count):
        singles = [{name: array[row : row + 1] for name, array in inputs.items()} for row in range(count)]
        try:
            answers = [run_arrays_on(session, single) for single in singles]
            again = run_arrays_on(session, singles[0])
        except EngineFailure as error:
            failure = failure or str(error)
            continue
        steady = [name for name, first in answers[0].items() if _is_same(first, again[name])]
        return _Rows(inputs, answers, tuple(steady))
    return failure


def _kinds_of_rows(signature: Signature, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Kinds of rows: random numbers, small numbers that fit every lookup table, zeros."""
    for are_indices in (False, True):
        drawn = {
            spec.name: random_rows(np.random.default_rng(3 + index), spec, count, are_indices=are_indices)
            for index, spec in enumerate(signature.inputs)
        }
        yield {name: _varied(array) for name, array in drawn.items()}
        yield drawn
    yield {
        name: np.full_like(array, b"0") if array.dtype == object else np.zeros_like(array)
        for name, array in drawn.items()
    }


def _varied(array: np.ndarray) -> np.ndarray:
    """Random fractions of both signs and several magnitudes: saturated scores would hide differences."""
    if array.dtype.kind != "f":
        return array
    varied = array.copy()
    varied[2::4] -= 50
    varied[3::4] -= 50
    varied[1::2] /= 100
    return varied


class _Proof:
    """Compares batches of one graph with its rows alone."""

    def __init__(self, session: Any, signature: Signature, rows: _Rows, *, may_round: bool) -> None:
        self._session, self._rows, self._may_round = session, rows, may_round
        self._dtypes = {spec.name: spec.dtype for spec in signature.outputs}

    def check(self, largest: int) -> RowCheck:
        """Raises EngineFailure if a batch is not expected to fit into memory."""
        steady = self._rows.steady
        if not steady:
            return RowCheck(
                "its output differs from run to run, so the check of its rows is not possible", is_open=True
            )
        objections = chain(
            map(self._objection_to_shapes, steady), map(self._objection_to_batch, _batches_to_try(largest))
        )
        return RowCheck(next(filter(None, objections), ""))

    def _objection_to_shapes(self, name: str) -> str:
        shapes = {answers[name].shape for answers in self._rows.answers}
        if any(shape[:1] != (1,) for shape in shapes):
            return f"output {name!r} of a single row has the shape {list(shapes.pop())}, without a first dimension of 1"
        return f"the shape of output {name!r} depends on the values of a row" if len(shapes) > 1 else ""

    def _objection_to_batch(self, size: int) -> str:
        # Each row once, then some again in random order.
        distinct = len(self._rows.answers)
        more = np.random.default_rng(size).integers(0, distinct, max(0, size - distinct))
        order = np.concatenate([np.arange(min(size, distinct)), more])
        try:
            together = self._run(order)
        except EngineFailure as failure:
            return f"a batch of {size} does not run ({failure})"
        objections = (self._objection_to_output(order, name, together[name]) for name in self._rows.steady)
        return next(filter(None, objections), "")

    def _objection_to_output(self, order: np.ndarray, name: str, found: np.ndarray) -> str:
        alone, size = np.concatenate([answers[name] for answers in self._rows.answers]), len(order)
        if found.shape != (size, *alone.shape[1:]):
            return f"output {name!r} of a batch of {size} has the shape {list(found.shape)}"
        row, away = _worst(found, alone, order)
        # Tolerances: for another order of the same sums, and for arithmetic. Half-precision graphs may differ by up to
        # 2 %; then `_stands_alone` decides.
        limit, arithmetic, unit = 0.0, 1e-2, "elements"
        if _is_fractional(alone):
            limit, arithmetic, unit = _TOLERANCE.get(self._dtypes[name], 1e-4), 2e-2, "largest value"
        if away <= limit or (self._may_round and away <= arithmetic and self._stands_alone(order, found, name)):
            return ""
        return (
            f"row {row} of a batch of {size} differs from the row run alone in output {name!r} (by {away:.2g} of "
            f"its {unit})"
        )

    def _stands_alone(self, order: np.ndarray, found: np.ndarray, name: str) -> bool:
        """Whether a row's answer stays the same if every other row of the batch changes."""
        for kept in (0, 1):
            changed = order.copy()
            changed[1 - kept :: 2] = (changed[1 - kept :: 2] + 1) % len(self._rows.answers)
            if not _is_same(found[kept::2], self._run(changed)[name][kept::2]):
                return False
        return True

    def _run(self, order: np.ndarray) -> dict[str, np.ndarray]:
        return run_arrays_on(self._session, {name: array[order] for name, array in self._rows.inputs.items()})


def _batches_to_try(largest: int) -> Iterator[int]:
    """The batches that fit into memory. Raises EngineFailure for one that does not."""
    for size in growing_sizes(largest):
        if size > 1:
            yield size
        if size == PROOF_ROWS + 1:
            yield PROOF_ROWS


def _is_fractional(array: np.ndarray) -> bool:
    return array.dtype.kind in "fV"


def _is_same(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether arrays are equal, except for the order of sums in threads."""
    if left.shape != right.shape:
        return False
    # Batches of one size run through the same kernels.
    limit = 1e-6 if _is_fractional(left) else 0.0
    return _worst(left, right, np.arange(len(left)))[1] <= limit


def _worst(found: np.ndarray, expected: np.ndarray, order: np.ndarray) -> tuple[int, float]:
    """The row with the largest difference from `expected[order]`, and that difference.

    For fractions it is relative to the largest expected value; otherwise it is the share of elements that differ.
    """
    # In pieces of a million elements, so that the comparison takes little memory.
    step = max(1, (1 << 20) // max(1, found[:1].size))
    largest = _largest(expected) if _is_fractional(expected) else 0.0
    away = [
        _away(found[start : start + step], expected[order[start : start + step]], largest)
        for start in range(0, len(found), step)
    ]
    each = np.concatenate(away) if away else np.zeros(1)
    return int(each.argmax()), float(each.max())


def _away(found: np.ndarray, expected: np.ndarray, largest: float) -> np.ndarray:
    """The difference of each row; infinite if only one of two values is a number."""
    if not _is_fractional(expected):
        return (
            np.asarray(found != expected, np.float64).reshape(len(found), -1).mean(axis=1)
            if found.size
            else np.zeros(1)
        )
    left, right = (as_numbers(one).astype(np.float64) for one in (found, expected))
    is_number = np.isfinite(left) & np.isfinite(right)
    is_same = (left == right) | (np.isnan(left) & np.isnan(right))
    away = np.abs(np.where(is_number, left, 0.0) - np.where(is_number, right, 0.0)) / (largest or _largest(left) or 1.0)
    each = np.where(is_same, 0.0, np.where(is_number, away, np.inf))
    return np.asarray(each.reshape(len(each), -1).max(axis=1, initial=0.0))


def _largest(array: np.ndarray) -> float:
    numbers = as_numbers(array)
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))
