"""A small inference with a known answer, which an engine must get right before it may serve.

Knows inputs, expected outputs and how far an engine may be off. Knows nothing of when it is run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from convoy.app.engines.base import Engine, run_arrays
from convoy.app.engines.batch import EngineFailure
from convoy.models.bundle import Canary, Variant
from convoy.models.tensors import as_numbers, random_values

# The exact graph on another CPU, with other kernels and another order of summation.
FP32_TOLERANCE = 1e-3
# A probability of a millionth is as good as none, and half precision has no other word for it.
LEAST_SHARE = 0.01


class CanaryFailed(Exception):
    """The engine gave a wrong answer, or none, to an input whose answer is known."""


@dataclass(frozen=True, slots=True)
class CanaryCheck:
    """Inputs, their expected outputs, and the largest relative error ||a - b|| / ||b|| allowed per sample.

    A class that leads by more than `sure_margin` times ||b|| must lead still; None: classes are not looked at. Of the
    outputs in `shares` a ||b|| below `LEAST_SHARE` counts as that much.
    """

    canary: Canary
    tolerance: float
    batched: bool
    sure_margin: float | None = None
    shares: frozenset[str] = frozenset()

    @staticmethod
    def of_variant(canary: Canary, variant: Variant, *, batched: bool = True) -> CanaryCheck:
        """A bundle's own canary; each variant may be as far off as it was when it was exported, and a bit.

        Where the model is not `batched`, the canary is one request, and its arrays have the whole shapes.
        """
        # A quantised variant rounds differently on another CPU, so it may be off by more than when it was exported.
        tolerance = max(FP32_TOLERANCE, 2.0 * variant.max_relative_error)
        shares = frozenset(name for name, values in canary.outputs.items() if _are_shares(values))
        return CanaryCheck(canary, tolerance, batched, max(FP32_TOLERANCE, variant.max_relative_error), shares)

    @staticmethod
    def of_first_answer(engine: Engine) -> CanaryCheck:
        """For a model without a canary: a seeded input, and this engine's own answer to it."""
        generator = np.random.default_rng(20)
        inputs = {spec.name: random_values(generator, spec, engine.whole_shape(spec, 1)) for spec in engine.inputs}
        outputs = run_arrays(engine, inputs)
        return CanaryCheck(Canary(inputs, outputs), FP32_TOLERANCE, engine.batched)

    @staticmethod
    def of_another_device(engine: Engine) -> CanaryCheck:
        """The same, for an engine of the same model on a device of another kind.

        Only numbers that are not whole: an index or a threshold's verdict may flip where two numbers nearly tie.
        """
        own = CanaryCheck.of_first_answer(engine)
        floats = {spec.name for spec in engine.outputs if np.issubdtype(spec.numpy_dtype, np.floating)}
        outputs = {name: array for name, array in own.canary.outputs.items() if name in floats}
        # Graphs in half precision round as well, on every device in its own way.
        return replace(own, canary=Canary(own.canary.inputs, outputs), tolerance=1e-2)

    def run(self, engine: Engine, *, samples: int | None = None) -> None:
        """Ask the engine, the first `samples` only where given. Raises CanaryFailed."""
        total = self.canary.samples if self.batched else 1
        wanted = min(total, samples or total)
        largest = engine.info.batch_sizes[-1]
        for start in range(0, wanted, largest):
            self._compare(engine, slice(start, min(wanted, start + largest)))

    def _compare(self, engine: Engine, rows: slice) -> None:
        inputs = {name: self._rows(array, rows) for name, array in self.canary.inputs.items()}
        try:
            outputs = run_arrays(engine, inputs)
        except EngineFailure as failure:
            raise CanaryFailed(f"the canary did not run: {failure}") from failure
        for name, expected in self.canary.outputs.items():
            rows_expected = self._rows(expected, rows)
            least_size = LEAST_SHARE if name in self.shares else 0.0
            error = _worst_relative_error(outputs[name], rows_expected, least_size, per_row=self.batched)
            if error > self.tolerance:
                raise CanaryFailed(f"output {name!r} is off by {error:.3g}, allowed is {self.tolerance:.3g}")
            if self.sure_margin is not None and _leader_changed(
                outputs[name], rows_expected, self.sure_margin, least_size
            ):
                raise CanaryFailed(f"output {name!r} has another first class where fp32 is sure of its own")

    def _rows(self, array: np.ndarray, rows: slice) -> np.ndarray:
        return array[rows] if self.batched else array


def _are_shares(outputs: np.ndarray) -> bool:
    """Whether these are probabilities, as far as values tell."""
    return np.issubdtype(outputs.dtype, np.floating) and bool(((outputs >= 0) & (outputs <= 1)).all())


def _worst_relative_error(got: np.ndarray, expected: np.ndarray, least_size: float, *, per_row: bool) -> float:
    """The largest ||got - expected|| / ||expected|| of any row; infinite where NaN or infinity stands elsewhere."""
    if got.shape != expected.shape:
        return float("inf")
    if expected.dtype == object:  # strings are the same or they are not
        return 0.0 if np.array_equal(got, expected) else float("inf")
    got, expected = as_numbers(got), as_numbers(expected)
    rows = len(expected) if per_row else 1
    left, right = (array.astype(np.float64).reshape(rows, -1) for array in (got, expected))
    # A bare model may answer NaN to a seeded input by design; then it must go on doing so.
    usual = np.isfinite(right)
    if not np.array_equal(left[~usual], right[~usual], equal_nan=True) or not np.isfinite(left[usual]).all():
        return float("inf")
    left, right = np.where(usual, left, 0.0), np.where(usual, right, 0.0)
    size = np.linalg.norm(right, axis=1)
    return float(np.max(np.linalg.norm(left - right, axis=1) / np.maximum(size, max(least_size, 1e-12)), initial=0.0))


def _leader_changed(got: np.ndarray, expected: np.ndarray, sure_margin: float, least_size: float) -> bool:
    """Whether in some row [classes] another class leads, although the expected one leads by more than the margin."""
    if expected.ndim != 2 or expected.shape[1] < 2 or not np.issubdtype(expected.dtype, np.floating):
        return False
    second, first = np.partition(expected.astype(np.float64), -2, axis=1)[:, -2:].T
    size = np.maximum(np.linalg.norm(expected.astype(np.float64), axis=1), least_size)
    is_sure = first - second > sure_margin * size
    return bool(np.any(is_sure & (got.argmax(axis=1) != expected.argmax(axis=1))))
