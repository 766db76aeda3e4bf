"""Two of the hard networks, trained for a minute on fewer characters, through training, export and their row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.export.cache import StepCache
from convoy.export.hard_networks.rows import HardRow
from convoy.export.hard_networks.trial import HardNetwork, TrialPlace, try_network
from convoy.models.bundle import open_bundle
from tests.support.torch_threads import one_torch_thread

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

FEW = "glyphs:120"
TEST_IMAGES = 62 * 31


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def tried(folder: Path, name: str, epochs: int) -> HardRow:
    place = TrialPlace(folder, FEW, data_root=folder, cache=StepCache(folder / "cache"))
    row = try_network(HardNetwork(name, epochs), place, lambda progress: None)
    print(row)
    assert row.epochs == epochs
    assert row.images == TEST_IMAGES
    assert row.accuracy is not None
    assert row.loss_points is not None
    assert row.loss_bound_points is not None
    # On faces that it never saw; by chance it would be 0.016.
    assert row.accuracy > 0.7
    assert row.loss_bound_points >= row.loss_points
    # What loses more than the budget is told of and does not serve.
    int8 = open_bundle(folder / "store" / name / "1").manifest.variant(row.file)
    assert int8.accuracy is not None
    assert int8.accuracy.loss_points == row.loss_points
    assert row.loss_points <= 1.0 or not int8.serve
    assert row.speedup is not None
    assert {row.engine, row.fp32_engine} <= {"onnxruntime-cpu", "openvino"}
    return row


def test_ghostnet(tmp_path: Path) -> None:
    row = tried(tmp_path, "ghostnet", epochs=5)
    assert row.loss_points is not None
    assert row.loss_points <= 1.0
    assert row.int8_share is not None
    assert row.int8_share >= 0.8


def test_a_network_whose_channels_lie_three_decades_apart(tmp_path: Path) -> None:
    row = tried(tmp_path, "wide_range_hardswish", epochs=6)
    assert row.speedup is not None
    before = (tmp_path / "wide_range_hardswish.safetensors").stat()
    # Weights that are there are measured again and not learned anew.
    place = TrialPlace(tmp_path, FEW, data_root=tmp_path, cache=StepCache(tmp_path / "cache"))
    again = try_network(HardNetwork("wide_range_hardswish", 99), place, lambda progress: None)
    assert (tmp_path / "wide_range_hardswish.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    assert (again.epochs, again.accuracy, again.loss_points) == (row.epochs, row.accuracy, row.loss_points)
