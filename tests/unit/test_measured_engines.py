"""What export measured on this machine is what serves here: at once, in the engine that the report names."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from export_fixtures import make_quick
from onnx import TensorProto, helper, numpy_helper

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.machine import find_cpu
from convoy.app.engines.openvino import OpenVinoEngine
from convoy.app.engines.parts import Landed, Shapes
from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.export.assemble import remeasure
from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.export.progress import SILENT
from convoy.export.report.page import render
from convoy.export.report.verdict import verdict_of
from convoy.models.bundle import MANIFEST, Interval, Manifest, Variant, read_manifest, seal
from convoy.models.errors import BundleError
from convoy.models.store import Store

pytestmark = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
GAINS = {
    "much faster": Interval(2, 1.9, 2.1),
    "perhaps faster": Interval(1.1, 0.9, 1.3),
    "slower": Interval(0.5, 0.4, 0.6),
}


@pytest.fixture
def exported(tmp_path, monkeypatch) -> Path:
    """A bundle's folder, of a file of tensors."""
    make_quick(monkeypatch)
    monkeypatch.setattr("convoy.export.sources.onnx_plain.accepted", lambda variants, *_: tuple(variants))
    weights = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["seen"]), helper.make_node("Relu", ["seen"], ["y"])]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name, size in (("x", 4), ("y", 3))
    ]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], [numpy_helper.from_array(weights, "w")])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "net.onnx"
    )
    options = ExportOptions(str(tmp_path / "net.onnx"), "net", store=tmp_path / "store", max_batch=4)
    return export_bundle(options)


def changed(folder: Path, fp32: Variant, *others: Variant) -> Manifest:
    manifest = replace(read_manifest(folder), variants=(fp32, *others))
    (folder / MANIFEST).write_bytes(seal(manifest))
    return manifest


def served(folder: Path, monkeypatch: pytest.MonkeyPatch, *, races: bool = False) -> LoadedModel:
    def race(engines: object) -> None:
        pytest.fail("what was measured is measured again")

    if not races:
        monkeypatch.setattr("convoy.app.loading.choice.race", race)
    (stored,) = Store(folder.parent.parent).versions("net")
    return load(stored, LoadOptions("auto", threads=cpu_budget(), max_batch=None, machine=find_cpu()))


def test_every_engine_of_the_cpu_is_measured_under_the_name_that_it_serves_under(exported, monkeypatch):
    (fp32,) = read_manifest(exported).variants
    (other,) = fp32.other_latencies
    assert [one.library.partition(" ")[0] for one in fp32.latencies] == ["onnxruntime", "openvino"]
    assert other.speedup is not None
    assert fp32.refused_by == {}
    (proved,) = served(exported, monkeypatch).engines
    assert proved.info.device_fingerprint in (one.device_fingerprint for one in fp32.latencies)
    assert "fastest on this device when it was exported" in proved.reason


@pytest.mark.parametrize("gain", GAINS)
def test_the_report_names_the_engine_that_serves(exported, monkeypatch, gain):
    (fp32,) = read_manifest(exported).variants
    other = replace(fp32.other_latencies[0], speedup=GAINS[gain])
    manifest = changed(exported, replace(fp32, other_latencies=(other,)))
    model = served(exported, monkeypatch)
    (proved,) = model.engines
    is_other = gain == "much faster"
    assert proved.info.engine == ("openvino" if is_other else "onnxruntime-cpu")
    assert proved.latency == (other if is_other else fp32.latency).points
    assert any("was not faster than" in why for why in model.skipped)
    sentence = verdict_of(manifest).sentence
    told = "fp32.onnx in OpenVINO, 2.00 times as fast as fp32 in ONNX Runtime on the export machine (1.90 to 2.10)"
    assert (told in sentence) == is_other
    assert ("OpenVINO" in sentence) == is_other
    assert f"fp32.onnx in {other.library}" in render(manifest)


def test_what_was_measured_elsewhere_is_measured_again_and_it_is_told_why(exported, monkeypatch):
    (fp32,) = read_manifest(exported).variants
    assert fp32.latency is not None
    there = replace(fp32.latency, device_fingerprint="Another CPU / 64 cores / 64 threads / onnxruntime 1.0")
    changed(exported, replace(fp32, latency=there, other_latencies=()))
    (proved,) = served(exported, monkeypatch, races=True).engines
    if proved.info.engine == "openvino":
        assert "measured at start-up, because export did not measure fp32.onnx in openvino" in proved.reason
    else:
        told = "because export measured it on Another CPU / 64 cores / 64 threads / onnxruntime 1.0, and this is "
        assert told in proved.reason
        assert proved.info.device_fingerprint in proved.reason


def test_an_engine_that_answers_otherwise_is_told_of_and_does_not_serve(tmp_path, exported, monkeypatch):
    """OpenVINO is made to answer a hundredth too much, at export alone."""
    execute = OpenVinoEngine._execute

    def wrong(engine: OpenVinoEngine, shapes: Shapes, samples: int) -> list[Landed]:
        landed = execute(engine, shapes, samples)
        for one in landed:
            one.array[:] *= 1.01
        return landed

    monkeypatch.setattr(OpenVinoEngine, "_execute", wrong)
    options = ExportOptions(str(tmp_path / "net.onnx"), "net", store=tmp_path / "wrong", max_batch=4)
    folder = export_bundle(options)
    monkeypatch.setattr(OpenVinoEngine, "_execute", execute)
    manifest = read_manifest(folder)
    (fp32,) = manifest.variants
    ((library, why),) = fp32.refused_by.items()
    assert library.startswith("openvino ")
    assert "differs from the original file by 0.01" in why
    assert fp32.other_latencies == ()
    assert f"fp32.onnx is not served in {library} there" in render(manifest)
    model = served(folder, monkeypatch)
    assert [one.info.engine for one in model.engines] == ["onnxruntime-cpu"]
    assert any("differs from the original file" in one for one in model.skipped)


def test_why_a_file_does_not_load_names_no_folder(tmp_path, exported, monkeypatch):
    def broken(engine: OpenVinoEngine, model: Path, *given: object) -> str:
        raise BundleError(f"{model}: OpenVINO cannot load it (no such operator)")

    monkeypatch.setattr(OpenVinoEngine, "_open", broken)
    options = ExportOptions(str(tmp_path / "net.onnx"), "net", store=tmp_path / "broken", max_batch=4)
    (fp32,) = read_manifest(export_bundle(options)).variants
    assert list(fp32.refused_by.values()) == ["fp32.onnx: OpenVINO cannot load it (no such operator)"]


def test_measuring_again_measures_every_engine(exported, tmp_path):
    again = read_manifest(remeasure(exported, tmp_path / "store", SILENT)).variants[0]
    assert [one.library.partition(" ")[0] for one in again.latencies] == ["onnxruntime", "openvino"]
