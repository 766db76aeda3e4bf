"""Where export measured nothing, the server measures, and chooses by export's own rule."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.models.bundle import MANIFEST, Interval, LatencyPoint, LatencyTable, read_manifest, seal
from convoy.models.store import DEMO_STORE, Store
from tests.support.stores import make_int8_right_everywhere


def table(batch_ms: float, speedup: Interval | None = None) -> LatencyTable:
    return LatencyTable("here", (LatencyPoint(1, batch_ms, batch_ms, batch_ms),), speedup=speedup)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Store:
    """The digits, exported on another machine, where both variants paid."""
    shutil.copytree(DEMO_STORE / "digits" / "1", tmp_path / "digits" / "1")
    path = tmp_path / "digits" / "1" / MANIFEST
    manifest = read_manifest(path.parent)
    variants = tuple(
        replace(variant, serve=True, latency=table(1, Interval(2, 2, 2)))
        for variant in manifest.variants
        if variant.file in ("fp32.onnx", "int8-cpu.onnx")
    )
    path.write_bytes(seal(replace(manifest, variants=variants)))
    make_int8_right_everywhere(path.parent)
    return Store(tmp_path)


def loaded(store: Store) -> LoadedModel:
    return load(store.versions("digits")[0], LoadOptions("auto", threads=1, max_batch=None))


@pytest.mark.parametrize(
    ("speedup", "precision"), [(Interval(1.5, 1.4, 1.6), "int8"), (Interval(1.5, 1.01, 2.2), "fp32")]
)
def test_int8_serves_only_where_it_is_faster_beyond_doubt(elsewhere, monkeypatch, speedup, precision):
    measured = (table(3), table(2, speedup))
    monkeypatch.setattr("convoy.app.loading.proving.measure_in_turns", lambda engines, pace: measured)
    (proved,) = loaded(elsewhere).engines
    assert proved.engine.info.precision == precision
    assert proved.latency == measured[precision == "int8"].points
    assert "measured at start-up" in proved.reason


def test_measuring_at_start_begins_with_one_sample_and_doubles(elsewhere):
    (proved,) = loaded(elsewhere).engines
    sizes = [point.batch_size for point in proved.latency]
    # On a machine that is busy with something else, the largest are left out.
    assert sizes == [1, 2, 4, 8, 16, 32, 64][: max(1, len(sizes))]
