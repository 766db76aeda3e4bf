"""Bare models whose tensors are of half precision, of which numpy knows only one kind: batched where rows are alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convoy.app.engines.base import run_arrays
from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.models.store import Store
from tests.support import onnx_models

DTYPES = {"BF16": np.dtype("V2"), "FP16": np.dtype("f2")}


def loaded(store: Path) -> LoadedModel:
    return load(Store(store).versions("net")[0], LoadOptions("auto", 1, None))


def given(dtype: str, values: np.ndarray) -> np.ndarray:
    if dtype == "FP16":
        return values.astype("f2")
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").view("V2")


@pytest.mark.parametrize("dims", [("batch", 4), ("batch", 3, "height", "width")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_batched_and_each_row_is_right(tmp_path: Path, dtype: str, dims: onnx_models.Dims) -> None:
    onnx_models.in_halves(tmp_path / "net" / "1" / "model.onnx", dtype, dims)
    model = loaded(tmp_path)
    assert model.spec.max_batch_size == 32
    sides = tuple(size if isinstance(size, int) else 8 for size in dims[1:])
    rows = np.arange(5, dtype="f4").reshape(5, *(1 for _ in sides)) * np.ones(sides, "f4")
    engine = model.engines[0].engine
    answers = run_arrays(engine, {"x": given(dtype, rows)})["y"]
    assert answers.tobytes() == given(dtype, np.arange(5, dtype="f4")).tobytes()
    engine.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_that_mixes_its_rows_is_not(tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    onnx_models.in_halves(tmp_path / "net" / "1" / "model.onnx", dtype, mixes=True)
    with caplog.at_level("INFO", "convoy"):
        model = loaded(tmp_path)
    assert model.spec.max_batch_size == 0
    assert "differs from the row run alone" in caplog.text
    model.engines[0].engine.close()
