"""Where export measured nothing, the server measures, and chooses by export's own rule."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from convoy.app.engines.machine import CPU_ONLY, Library, Machine
from convoy.app.engines.measure import Rounds
from convoy.app.engines.openvino import load_openvino
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


def loaded(store: Store, machine: Machine = CPU_ONLY) -> LoadedModel:
    return load(store.versions("digits")[0], LoadOptions("auto", threads=1, max_batch=None, machine=machine))


def takes(monkeypatch: pytest.MonkeyPatch, *engines_ms: list[float]) -> None:
    """What three rounds of one sample take in each engine."""
    rounds = Rounds(1, np.array(engines_ms))
    monkeypatch.setattr("convoy.app.loading.proving.run_in_turns", lambda engines, pace: [rounds])


@pytest.mark.parametrize(("int8_ms", "precision"), [([1.9, 2.0, 2.1], "int8"), ([1.4, 2.0, 2.98], "fp32")])
def test_int8_serves_only_where_it_is_faster_beyond_doubt(elsewhere, monkeypatch, int8_ms, precision):
    takes(monkeypatch, [3.0] * 3, int8_ms)
    (proved,) = loaded(elsewhere).engines
    assert proved.engine.info.precision == precision
    assert [point.median_ms for point in proved.latency] == [3.0 if precision == "fp32" else 2.0]
    assert "measured at start-up" in proved.reason


@pytest.mark.parametrize(
    ("openvino_int8_ms", "serves"),
    [(0.999, ("openvino", "fp32")), (1.5, ("openvino", "fp32")), (0.5, ("openvino", "int8"))],
)
def test_a_less_exact_one_has_to_beat_the_best_of_the_more_exact_whichever_engine_that_is(
    elsewhere, monkeypatch, openvino_int8_ms, serves
):
    pytest.importorskip("openvino")
    took_ms = {
        ("onnxruntime-cpu", "fp32"): 2.0,
        ("onnxruntime-cpu", "int8"): 0.998,
        ("openvino", "fp32"): 1.0,
        ("openvino", "int8"): openvino_int8_ms,
    }
    monkeypatch.setattr(
        "convoy.app.engines.measure.Probe.run_ms",
        lambda probe: took_ms[probe.engine.info.engine, probe.engine.info.precision],
    )
    (proved,) = loaded(elsewhere, machine=replace(CPU_ONLY, openvino=Library(load_openvino()))).engines
    assert (proved.engine.info.engine, proved.engine.info.precision) == serves


def test_measuring_at_start_begins_with_one_sample_and_doubles(elsewhere):
    (proved,) = loaded(elsewhere).engines
    sizes = [point.batch_size for point in proved.latency]
    # On a machine that is busy with something else, the largest are left out.
    assert sizes == [1, 2, 4, 8, 16, 32, 64][: max(1, len(sizes))]
