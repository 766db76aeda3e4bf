"""Networks that are hard in INT8, trained for a minute on drawn characters: export keeps their accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.models.bundle import open_bundle
from convoy.models.train import train
from convoy.models.train_options import TrainOptions
from tests.support.torch_threads import one_torch_thread

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

FEW = "glyphs:120"
TEST_IMAGES = 62 * 31


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.mark.parametrize(("name", "epochs"), [("wide_range_hardswish", 6)])
def test_int8_keeps_the_accuracy_of_a_network_that_is_hard_for_it(tmp_path: Path, name: str, epochs: int) -> None:
    weights = tmp_path / f"{name}.safetensors"
    train(TrainOptions(FEW, weights, name, epochs=epochs, data_root=tmp_path))
    options = ExportOptions(
        f"zoo:{name}",
        name,
        weights=weights,
        calibrate=FEW,
        evaluate=FEW,
        precisions="fp32,int8",
        max_batch=8,
        store=tmp_path / "store",
        data_root=tmp_path,
    )
    fp32, *variants = open_bundle(export_bundle(options)).manifest.variants
    assert fp32.accuracy is not None
    assert fp32.accuracy.images == TEST_IMAGES
    # On typefaces that it never saw; by chance it would be 0.016.
    assert fp32.accuracy.top1 > 0.7
    good = 0
    for int8 in variants:
        assert int8.accuracy is not None
        assert int8.audit is not None
        lost, share = int8.accuracy.loss_points, int8.audit.eight_bit_share
        print(f"{name}, {int8.file}: {lost} points lost, {share} in 8 bits; {int8.reason}")
        # What loses more than the budget does not serve.
        assert lost <= 1.0 or not int8.serve
        good += lost <= 1.0 and (share or 0.0) >= 0.8
    assert good
