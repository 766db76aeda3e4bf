"""Is a graph's first dimension a batch? Found out by running it, because a dynamic size alone proves nothing:
a model may well take the mean over it.

Used by the server for models that come without a manifest, and by export for graphs made elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from convoy.app.batch import EngineFailure
from convoy.app.engines.onnx_tensors import run_arrays_on
from convoy.app.engines.onnxruntime import first_line, open_session
from convoy.app.engines.signature import Signature
from convoy.models.spec import TensorSpec
from convoy.models.tensors import as_numbers, random_values

PROOF_ROWS = 3
# Kernels may sum a batch in another order than a single row.
_TOLERANCE = 1e-4
# Two units in the last place: what was summed in FP32 may be rounded to either side.
_TOLERANCE_OF_HALVES = {np.dtype("f2"): 2**-9, np.dtype("V2"): 2**-6}


def objection_to_batching(path: Path, signature: Signature, threads: int, *, original: Path | None = None) -> str:
    """Why the first dimension is not a batch, or nothing when it is: three rows together and each alone.

    `signature` is that of the graph in `path`, first dimensions included. With `original`, a graph of the same
    tensors that takes one row at a time, the rows alone are its answers, so that a rewritten graph is also
    proved to be the same model. Raises BundleError for a file that does not load.
    """
    try:
        together, alone = _together_and_alone(path, signature, threads, original or path, are_indices=False)
    except EngineFailure:
        try:
            together, alone = _together_and_alone(path, signature, threads, original or path, are_indices=True)
        except EngineFailure as failure:
            return f"a random batch of {PROOF_ROWS} does not run ({failure})"
    for row, answers in enumerate(alone):
        for name, values in answers.items():
            if not _same(together[name][row : row + 1], values):
                return f"row {row} of a batch of {PROOF_ROWS} differs from the row run alone in output {name!r}"
    return ""


def _together_and_alone(
    path: Path, signature: Signature, threads: int, original: Path, *, are_indices: bool
) -> tuple[Mapping[str, np.ndarray], list[Mapping[str, np.ndarray]]]:
    """The answers to a random batch, and those of `original` to each of its rows. Raises EngineFailure."""
    rows = {
        spec.name: random_rows(np.random.default_rng(3 + i), spec, are_indices=are_indices)
        for i, spec in enumerate(signature.inputs)
    }
    singles = [{name: array[row : row + 1] for name, array in rows.items()} for row in range(PROOF_ROWS)]
    return _answers(path, threads, [rows])[0], _answers(original, threads, singles)


def random_rows(
    generator: np.random.Generator, spec: TensorSpec, rows: int = PROOF_ROWS, *, are_indices: bool = False
) -> np.ndarray:
    """Values as `random_values` has them, [rows, ...]; free sizes behind the first one are its example's."""
    return random_values(generator, spec, (rows, *spec.drawn_shape[1:]), are_indices=are_indices)


def _answers(path: Path, threads: int, batches: list[dict[str, np.ndarray]]) -> list[Mapping[str, np.ndarray]]:
    # Not through the engine: here a failure is an answer, which nobody should read about in the log.
    session = open_session(path, threads, quiet=True)
    try:
        return [run_arrays_on(session, batch) for batch in batches]
    except Exception as error:  # onnxruntime's errors share no base class
        raise EngineFailure(first_line(error)) from error


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape:
        return False
    if left.dtype == object:
        return np.array_equal(left, right)
    tolerance = _TOLERANCE_OF_HALVES.get(left.dtype, _TOLERANCE)
    left, right = as_numbers(left), as_numbers(right)
    return bool(np.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True))
