"""Latencies: of a busy machine, of every engine that may serve, and measured again on request."""

from __future__ import annotations

import importlib.util
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export_fixtures import export, make_quick, options, save_graph, write_images
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from report_fixtures import full_manifest
from rich.console import Console
from test_export_report import Page

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.machine import find_cpu
from convoy.app.engines.openvino import OpenVinoEngine
from convoy.app.engines.parts import Landed, Shapes
from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.export.assemble import remeasure
from convoy.export.command import export_bundle, run
from convoy.export.options import ExportOptions
from convoy.export.profiling import profile
from convoy.export.profiling.profile import CpuReading, CpuWatch, shares_of_others, taken_s
from convoy.export.progress import SILENT
from convoy.export.report.page import render
from convoy.export.report.verdict import verdict_of
from convoy.models.bundle import (
    BUSY_MARK,
    BUSY_SHARE,
    MANIFEST,
    REPORT,
    BuilderVerdict,
    Interval,
    LatencyTable,
    Manifest,
    Variant,
    open_bundle,
    read_manifest,
    seal,
)
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.store import Store

STAT = """cpu  600 0 60 900 0 0 0 0 0 0
cpu0 100 20 30 700 50 3 4 5 6 7
cpu1 500 0 30 200 0 0 0 0 0 0
cpu10 9999 0 0 0 0 0 0 0 0 0
intr 12345 0
"""


def test_what_is_taken_is_all_but_idling_of_the_cpus_that_are_ours():
    assert taken_s(STAT, {0}, 100) == pytest.approx(1.62)
    assert taken_s(STAT, {1}, 100) == pytest.approx(5.30)
    assert taken_s(STAT, {0, 1}, 1000) == pytest.approx(0.692)
    assert taken_s("cpu0 100 0 0 50 0", {0}, 100) == 1  # of an old kernel
    for text, cpus in ((STAT, {0, 2}), ("", {0}), ("cpu0 many", {0})):
        with pytest.raises(ValueError, match=r"."):
            taken_s(text, cpus, 100)


def readings(*steps: tuple[float, float, float]) -> list[CpuReading]:
    """From seconds of clock, of others and of our own between each two."""
    found = [CpuReading(100.0, 7000.0, 40.0)]
    for seconds, others_s, own_s in steps:
        last = found[-1]
        found.append(CpuReading(last.at_s + seconds, last.all_s + others_s + own_s, last.own_s + own_s))
    return found


def test_others_that_find_room_beside_us_take_nothing_of_ours():
    steps = readings((1, 6, 2), (1, 7, 1))
    assert shares_of_others(steps, cpus=8, budget=2) == pytest.approx([0, 0.5])
    assert shares_of_others(steps, cpus=8, budget=8) == pytest.approx([0.75, 0.875])


def test_a_short_time_is_judged_with_its_neighbours():
    # Ticks of a hundredth of a second: 20 ms alone could look half busy by one of them.
    found = shares_of_others(readings((1, 0, 1), (0.02, 0.01, 0.01), (1, 0, 1)), cpus=1, budget=1)
    assert found[1] < 0.01
    assert shares_of_others(readings((0.02, 0.01, 0.01)), cpus=1, budget=1) == pytest.approx([0.5])


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(-1, 50), st.floats(0, 50)), min_size=1, max_size=10))
def test_a_share_is_one_whatever_the_counters_say(steps):
    found = shares_of_others(readings(*steps), cpus=4, budget=2)
    assert len(found) == len(steps)
    assert all(0 <= share <= 1 for share in found)


def test_a_watch_tells_of_each_two_looks_and_of_none_where_nothing_is_told(tmp_path, monkeypatch):
    cpus = sorted(os.sched_getaffinity(0))
    stat, now_s = tmp_path / "stat", [5.0]
    ticks = os.sysconf("SC_CLK_TCK")

    def write(busy_s: float) -> None:
        stat.write_text("".join(f"cpu{cpu} {round(busy_s * ticks)} 0 0 0 0 0 0 0 0 0\n" for cpu in cpus))

    monkeypatch.setattr(profile, "cpu_budget", lambda: len(cpus))
    monkeypatch.setattr(profile.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(profile.time, "process_time", lambda: 0.0)
    write(10)
    watch = CpuWatch(stat)
    for busy_s in (10, 11):
        now_s[0] += 1
        write(busy_s)
        watch.look()
    assert watch.busy_shares(3) == [0, 1]
    assert CpuWatch(tmp_path / "none").busy_shares(1) == []
    gone = CpuWatch(stat)
    stat.unlink()
    gone.look()
    assert gone.busy_shares(2) == [None]


def with_share(manifest: Manifest, share: float | None) -> Manifest:
    """The first point of every table was measured with so much taken by others."""

    def busier(table: LatencyTable | None) -> LatencyTable | None:
        if table is None:
            return None
        return replace(table, points=(replace(table.points[0], others_share=share), *table.points[1:]))

    return replace(manifest, variants=tuple(replace(one, latency=busier(one.latency)) for one in manifest.variants))


def test_the_report_marks_them_and_says_what_to_do():
    page = Page(render(with_share(full_manifest(), 0.63)))
    words = " ".join(page.text.split())
    assert f"17.6 {BUSY_MARK}" in words
    assert f"2.35 {BUSY_MARK}" in words
    assert "while other processes used up to 63 % of the CPUs" in words
    assert "convoy export --remeasure" in words
    assert "fp32.onnx, batch 1: 17.600 ms, while others took 63 % of the CPUs" in words
    assert [given for _, given in page.tags if given.get("class") == "warning"]


@pytest.mark.parametrize("share", [None, 0.0, BUSY_SHARE])
def test_figures_of_a_quiet_machine_have_no_mark(share):
    text = Page(render(with_share(full_manifest(), share))).text
    assert BUSY_MARK not in text
    assert "--remeasure" not in text
    assert ("not known" in text) or share is not None


# --- measured again ---


@pytest.fixture
def exported(tmp_path, monkeypatch):
    make_quick(monkeypatch, tmp_path / "cache")
    data = str(write_images(tmp_path / "images"))
    return export_bundle(options(tmp_path, calibrate=data, evaluate=data, precisions="int8"))


def measures(monkeypatch, speedup: Interval, share: float = 0.0) -> None:
    """Whatever is measured again is so fast, on a machine of which others take so much."""

    def measured(candidates, progress):
        reference, *others = real(candidates, progress)
        tables = [reference, *(table and replace(table, speedup=speedup) for table in others)]
        return tuple(
            table and replace(table, points=tuple(replace(point, others_share=share) for point in table.points))
            for table in tables
        )

    real = profile.measure_latencies
    monkeypatch.setattr(profile, "measure_latencies", measured)


def again(folder, tmp_path) -> tuple[Manifest, str, object]:
    console = Console(file=io.StringIO(), width=400)
    new = run(ExportOptions(remeasure=folder, store=tmp_path / "elsewhere"), console)
    return open_bundle(new).manifest, console.file.getvalue(), new  # type: ignore[attr-defined]


@pytest.mark.parametrize(("speedup", "serves"), [(Interval(3, 2.9, 3.1), True), (Interval(0.5, 0.4, 0.6), False)])
def test_what_serves_is_decided_again(tmp_path, exported, monkeypatch, speedup, serves):
    measures(monkeypatch, speedup)
    before = open_bundle(exported)
    manifest, shown, folder = again(exported, tmp_path)
    assert folder == exported.parent / "2"
    int8, gpu = manifest.variant("int8-cpu.onnx"), manifest.variant("int8-trt.onnx")
    assert int8.serve == serves
    assert f"{speedup.median:.2f} times the speed of fp32" in int8.reason
    assert int8.latency.speedup == speedup
    assert gpu == before.manifest.variant("int8-trt.onnx")
    assert f"{speedup.median:.2f}x" in shown
    # All else is as it was, and the version that was measured is untouched.
    assert open_bundle(exported) == before
    for name in before.manifest.files:
        if name != REPORT:
            assert manifest.files[name] == before.manifest.files[name]
    assert manifest.variants[0].accuracy == before.manifest.variants[0].accuracy
    assert (manifest.mistakes, manifest.findings) == (before.manifest.mistakes, before.manifest.findings)
    assert manifest.provenance.remeasured_at > before.manifest.provenance.created_at
    page = (folder / REPORT).read_text()
    assert "latencies measured again" in page
    assert page == render(replace(manifest, files={n: r for n, r in manifest.files.items() if n != REPORT}))


def rewritten(folder, **changes: object) -> None:
    """The int8 variant says something else, under a seal that fits."""
    manifest = open_bundle(folder).manifest
    variants = tuple(
        replace(one, **changes) if one.precision == "int8" else one
        for one in manifest.variants  # type: ignore[arg-type]
    )
    (folder / MANIFEST).write_bytes(seal(replace(manifest, variants=variants)))


def test_speed_does_not_serve_what_is_wrong_or_what_the_builder_refused(tmp_path, exported, monkeypatch):
    measures(monkeypatch, Interval(3, 2.9, 3.1))
    refusal = BuilderVerdict("TensorRT for RTX 1.7", False, (), reason="no such kernel")
    rewritten(exported, passes_gate=False, proof="loses 9 points", builder=refusal)
    manifest, *_ = again(exported, tmp_path)
    assert not manifest.variant("int8-cpu.onnx").serve
    assert manifest.variant("int8-cpu.onnx").reason == "loses 9 points"
    rewritten(exported, passes_gate=True, proof="loses nothing", builder=refusal)
    manifest, *_ = again(exported, tmp_path)
    assert manifest.variant("int8-cpu.onnx").serve
    assert not manifest.variant("int8-trt.onnx").serve
    assert manifest.variant("int8-trt.onnx").reason.startswith("refused by TensorRT for RTX 1.7: no such kernel")


def test_what_cannot_be_measured_again_is_one_line(tmp_path, exported):
    with pytest.raises(UsageError, match=r"there is no folder .*; pass a version's, such as store/NAME/1"):
        again(tmp_path / "nowhere", tmp_path)
    with pytest.raises(JobError, match=r"manifest.json.*export the model again"):
        again(exported.parent, tmp_path)
    rewritten(exported, passes_gate=None)
    with pytest.raises(JobError, match=r"an older version of Convoy exported it.*export the model again"):
        again(exported, tmp_path)
    body = json.loads((exported / MANIFEST).read_text())
    body["scores"] = "changed"
    (exported / MANIFEST).write_text(json.dumps(body))
    with pytest.raises(JobError, match=r"was modified after it was written"):
        again(exported, tmp_path)
    assert [one.name for one in exported.parent.iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "SOURCE is missing"),
        ({"remeasure": "x", "source": "zoo:simple_cnn"}, "nothing beside it but --store and --sign; leave out SOURCE"),
        ({"remeasure": "x", "accuracy_budget_points": 2.0, "max_batch": 2}, "leave out --accuracy-budget, --max-batch"),
    ],
)
def test_calls_that_do_not_fit_together_are_refused(given, words):
    with pytest.raises(UsageError, match=words):
        ExportOptions(**given)


GAINS = {
    "much faster": Interval(2, 1.9, 2.1),
    "perhaps faster": Interval(1.1, 0.9, 1.3),
    "slower": Interval(0.5, 0.4, 0.6),
}


@pytest.fixture
def engines_exported(tmp_path, monkeypatch) -> Path:
    """A bundle's folder, of a file of tensors."""
    make_quick(monkeypatch)
    monkeypatch.setattr("convoy.export.sources.onnx_plain.accepted", lambda variants, *_: tuple(variants))
    weights = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["seen"]), helper.make_node("Relu", ["seen"], ["y"])]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name, size in (("x", 4), ("y", 3))
    ]
    save_graph(tmp_path / "net.onnx", nodes, values[:1], values[1:], [numpy_helper.from_array(weights, "w")])
    return export(tmp_path, tmp_path / "net.onnx").folder


def changed(folder: Path, fp32: Variant, *others: Variant) -> Manifest:
    manifest = replace(read_manifest(folder), variants=(fp32, *others))
    (folder / MANIFEST).write_bytes(seal(manifest))
    return manifest


def served(folder: Path, monkeypatch: pytest.MonkeyPatch, *, races: bool = False) -> LoadedModel:
    def race(engines: object) -> None:
        pytest.fail("what was measured is measured again")

    if not races:
        monkeypatch.setattr("convoy.app.loading.proving.race", race)
    (stored,) = Store(folder.parent.parent).versions("net")
    return load(stored, LoadOptions("auto", threads=cpu_budget(), max_batch=None, machine=find_cpu()))


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
def test_every_engine_of_the_cpu_is_measured_under_the_name_that_it_serves_under(
    tmp_path, engines_exported, monkeypatch
):
    (fp32,) = read_manifest(engines_exported).variants
    (other,) = fp32.other_latencies
    assert other.speedup is not None
    assert fp32.refused_by == {}
    (proved,) = served(engines_exported, monkeypatch).engines
    assert proved.info.device_fingerprint in (one.device_fingerprint for one in fp32.latencies)
    assert "fastest on this device at export" in proved.reason
    (again,) = read_manifest(remeasure(engines_exported, tmp_path / "again", SILENT)).variants
    for variant in (fp32, again):
        assert [one.library.partition(" ")[0] for one in variant.latencies] == ["onnxruntime", "openvino"]


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
@pytest.mark.parametrize("gain", GAINS)
def test_the_report_names_the_engine_that_serves(engines_exported, monkeypatch, gain):
    (fp32,) = read_manifest(engines_exported).variants
    other = replace(fp32.other_latencies[0], speedup=GAINS[gain])
    manifest = changed(engines_exported, replace(fp32, other_latencies=(other,)))
    model = served(engines_exported, monkeypatch)
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


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
def test_what_was_measured_elsewhere_is_measured_again_and_it_is_told_why(engines_exported, monkeypatch):
    (fp32,) = read_manifest(engines_exported).variants
    assert fp32.latency is not None
    there = replace(fp32.latency, device_fingerprint="Another CPU / 64 cores / 64 threads / onnxruntime 1.0")
    changed(engines_exported, replace(fp32, latency=there, other_latencies=()))
    (proved,) = served(engines_exported, monkeypatch, races=True).engines
    if proved.info.engine == "openvino":
        assert "measured at start, because export did not measure fp32.onnx in openvino" in proved.reason
    else:
        told = "because export measured it on Another CPU / 64 cores / 64 threads / onnxruntime 1.0, but this is "
        assert told in proved.reason
        assert proved.info.device_fingerprint in proved.reason


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
def test_an_engine_that_answers_otherwise_is_told_of_and_does_not_serve(tmp_path, engines_exported, monkeypatch):
    """OpenVINO is made to answer a hundredth too much, at export alone."""
    execute = OpenVinoEngine._execute

    def wrong(engine: OpenVinoEngine, shapes: Shapes, samples: int) -> list[Landed]:
        landed = execute(engine, shapes, samples)
        for one in landed:
            one.array[:] *= 1.01
        return landed

    monkeypatch.setattr(OpenVinoEngine, "_execute", wrong)
    bundle = export(tmp_path, tmp_path / "net.onnx", store=tmp_path / "wrong")
    monkeypatch.setattr(OpenVinoEngine, "_execute", execute)
    manifest = bundle.manifest
    (fp32,) = manifest.variants
    ((library, why),) = fp32.refused_by.items()
    assert library.startswith("openvino ")
    assert "differs from the original file by 0.01" in why
    assert fp32.other_latencies == ()
    assert f"fp32.onnx is not served in {library} there" in render(manifest)
    model = served(bundle.folder, monkeypatch)
    assert [one.info.engine for one in model.engines] == ["onnxruntime-cpu"]
    assert any("differs from the original file" in one for one in model.skipped)


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
def test_why_a_file_does_not_load_names_no_folder(tmp_path, engines_exported, monkeypatch):
    def broken(engine: OpenVinoEngine, model: Path, *given: object) -> str:
        raise BundleError(f"{model}: OpenVINO cannot load it (no such operator)")

    monkeypatch.setattr(OpenVinoEngine, "_open", broken)
    (fp32,) = export(tmp_path, tmp_path / "net.onnx", store=tmp_path / "broken").manifest.variants
    assert list(fp32.refused_by.values()) == ["fp32.onnx: OpenVINO cannot load it (no such operator)"]
