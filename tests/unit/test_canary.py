from __future__ import annotations

import numpy as np
import pytest

from convoy.app.engines.batch import EngineFailure
from convoy.app.loading.proving import CanaryCheck, CanaryFailed
from convoy.models.bundle import Canary, Variant
from convoy.models.spec import TensorSpec
from tests.support.fake_engine import Arrays, FakeEngine


def engine(max_batch_size: int = 4, **options: object) -> FakeEngine:
    x, y = TensorSpec("x", "FP32", (3,)), TensorSpec("y", "FP32", (3,))
    return FakeEngine((x,), (y,), max_batch_size=max_batch_size, **options)  # type: ignore[arg-type]


def check(rows: int = 6, tolerance: float = 1e-3) -> CanaryCheck:
    values = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + 1
    return CanaryCheck(Canary({"x": values}, {"y": values.copy()}), tolerance, batched=True)


@pytest.mark.parametrize(("samples", "runs"), [(None, 2), (1, 1)])
def test_the_right_answer_passes_in_batches_that_fit_or_of_some_samples_while_serving(
    samples: int | None, runs: int
) -> None:
    sound = engine(max_batch_size=4)
    check(rows=6).run(sound, samples=samples)
    assert sound.runs == runs


@pytest.mark.parametrize("off_by", [0.01, np.nan, np.inf])
def test_one_wrong_row_or_a_failure_fails_and_a_small_error_passes(off_by: float) -> None:
    def wrong(arrays: Arrays) -> tuple[np.ndarray]:
        answer = arrays[0].copy()
        answer[-1, 0] *= 1 + off_by
        return (answer,)

    with pytest.raises(CanaryFailed, match="'y' is off by"):
        check().run(engine(run_rows=wrong))
    check(tolerance=0.1).run(engine(run_rows=lambda arrays: (arrays[0] * 1.05,)))

    def fail(_: Arrays) -> tuple[np.ndarray]:
        raise EngineFailure("broken")

    with pytest.raises(CanaryFailed, match="broken"):
        check().run(engine(run_rows=fail))


def test_a_model_may_answer_nan_as_long_as_it_goes_on_doing_so() -> None:
    strange = engine(run_rows=lambda arrays: (arrays[0] * np.float32([np.nan, np.inf, 1.0]),))
    canary = CanaryCheck.of_first_answer(strange)
    canary.run(strange)
    with pytest.raises(CanaryFailed):
        canary.run(engine())
    with pytest.raises(CanaryFailed):
        canary.run(engine(run_rows=lambda arrays: (arrays[0] * np.float32([np.nan, np.inf, 1.1]),)))


def test_a_model_without_a_batch_has_a_canary_too() -> None:
    x = TensorSpec("x", "INT32", (-1, 3))
    whole = FakeEngine((x,), (TensorSpec("y", "INT32", (-1, 3)),), max_batch_size=0, run_rows=lambda arrays: arrays)
    canary = CanaryCheck.of_first_answer(whole)
    canary.run(whole)
    assert canary.canary.inputs["x"].shape == (1, 3)


@pytest.mark.parametrize(("scale", "passes"), [(1e-7, True), (1.0, False)])
def test_a_probability_of_next_to_nothing_may_be_rounded_to_nothing(scale: float, passes: bool) -> None:
    values = np.array([[0.2, 0.1, 0.3]] * 3, np.float32) * np.float32(scale)
    variant = Variant("fp16.onnx", "fp16", "cuda", True, "", 1e-4, None, None)
    rounded = engine(run_rows=lambda arrays: (np.zeros_like(arrays[0]),))
    asked = CanaryCheck.of_variant(Canary({"x": values}, {"y": values.copy()}), variant)
    if passes:
        asked.run(rounded)
    else:
        with pytest.raises(CanaryFailed, match="'y' is off by 1"):
            asked.run(rounded)
    # Numbers that are no shares are held to their own size, however small it is.
    below = Canary({"x": -values}, {"y": -values})
    with pytest.raises(CanaryFailed, match="'y' is off by 1"):
        CanaryCheck.of_variant(below, variant).run(rounded)
