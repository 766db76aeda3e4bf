"""The experiments rehearsed on a GPU that is not there, and their verdicts on figures that are made up.

What the fakes answer proves nothing about a GPU; that every experiment comes to its end, asks for calls that the real
bindings have, and can come out either way, is what is tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.gpu.proof import parts, parts_rtx
from tests.gpu.proof.children import read_notes
from tests.gpu.proof.experiment import Bench, Experiment, NotMeasurable, Ran
from tests.gpu.proof.experiments import breakage, captures, cudart, networks, resets, sessions
from tests.gpu.proof.experiments.sessions import on_cpu, relative_error
from tests.support import gpu_machine
from tests.support.fake_asked import Asked, AskedRuntime
from tests.support.fake_cuda import FakeCuda, FakeGpu
from tests.unit.test_gpu_proof import few_digits, quick

SMALL = {"side": 32, "blocks": [1, 1, 1, 1], "width": 8, "classes": 10}
ROWS = {one.name: one for one in parts.EXPERIMENTS}
# Called on everything before anything else, and by name only.
UNCHECKED = ("cudaGetErrorString",)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Asked:
    fake = Asked(FakeGpu("Fake H200"))
    monkeypatch.setattr(cudart, "load_module", lambda: fake)

    def break_it(runtime: Any, kind: str) -> None:
        fake.sticky = 700

    monkeypatch.setattr(breakage, "launch", break_it)
    monkeypatch.setattr(resets, "launch", break_it)
    return fake


@pytest.fixture
def runtime(cuda: Asked, monkeypatch: pytest.MonkeyPatch) -> AskedRuntime:
    fake = AskedRuntime(cuda)
    monkeypatch.setattr(onnxruntime, "get_available_providers", fake.get_available_providers)
    for name in ("assignment", "convolutions", "graphs", "machine", "resets"):
        monkeypatch.setattr(f"tests.gpu.proof.experiments.{name}.load_onnxruntime", lambda: fake)
    return fake


def rehearsed(folder: Path, experiment: Experiment, **arguments: Any) -> Ran:
    """The experiment in this process, with smaller arguments."""
    notes = folder / "notes.jsonl"
    bench = Bench(notes, folder, experiment.limit_s)
    experiment.measure(bench, **{**experiment.arguments, **arguments})
    return replace(read_notes(notes.read_text() + '{"done": true}\n', 0, "", 1.0), ended="done")


SMALLER: Mapping[str, Mapping[str, Any]] = {
    "capture-and-device-wait": {},
    "capture-and-memory": {},
    "capture-and-waits": {},
    "reset-after-illegal-address": {},
    "reset-after-trap": {},
    "cpu-while-waiting": {"buffer_mib": 1, "long_s": 0.001},
    "page-locking": {"sizes_mib": [1, 2]},
    "bus-id": {},
    "provider-loads": {},
    "tf32-and-fp16": {"sizes": [1, 4], **SMALL},
    "tf32-and-fp32": {"sizes": [1, 4], **SMALL},
    "fused-bias": {"sizes": [1, 4], **SMALL},
    "search": {"sizes": [4], **SMALL},
    "size-changes": {"small": 1, "large": 4, **SMALL},
    "replay-after-captures": {"sizes": [1, 2, 4], **SMALL},
    "session-after-reset": SMALL,
    "close-after-break": SMALL,
    "disturbed-captures": {"attempts": 2, **SMALL},
}
# The fakes have no assignment to tell, no library's file and no house of their own.
ELSEWHERE = {
    *("machine", "provider-architectures", "gpu-tests", "shape-nodes"),
    *("benchmark", "benchmark-onnxruntime", "serve", "switch-interval"),
}


def test_every_experiment_is_rehearsed() -> None:
    rtx = {one.name for one in parts_rtx.RTX_EXPERIMENTS}  # in a file of their own
    assert set(SMALLER) | ELSEWHERE == set(ROWS) - rtx


@pytest.mark.parametrize("name", SMALLER)
def test_it_comes_to_its_end_and_is_judged(name: str, cuda: Asked, runtime: AskedRuntime, tmp_path: Path) -> None:
    ran = rehearsed(tmp_path, ROWS[name], **SMALLER[name])
    judgement = ROWS[name].judged(ran)
    assert ran.figures
    assert "not complete" not in judgement.told, judgement.told
    bindings = pytest.importorskip("cuda.bindings.runtime")
    for call, arguments in cuda.used.items():
        if call not in UNCHECKED:
            inspect.signature(getattr(bindings, call)).bind(*arguments)
    for name in vars(Asked.cudaStreamCaptureMode):
        assert hasattr(bindings.cudaStreamCaptureMode, name)
    for name in vars(Asked.cudaDeviceAttr):
        assert hasattr(bindings.cudaDeviceAttr, name)


def test_without_a_driver_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeCuda()
    fake.driver_status = 35
    monkeypatch.setattr(cudart, "load_module", lambda: fake)
    for name in SMALLER:
        with pytest.raises(NotMeasurable, match="no usable NVIDIA driver"):
            rehearsed(tmp_path, ROWS[name])


def test_a_runtime_without_the_provider_says_how_to_bring_one(cuda: Asked) -> None:
    if sessions.PROVIDER in onnxruntime.get_available_providers():
        pytest.skip("this one has it")
    with pytest.raises(NotMeasurable, match="CARRY=DIR"):
        sessions.load_onnxruntime()


def test_a_provider_that_does_not_load_is_told_with_the_loaders_words(
    cuda: Asked, runtime: AskedRuntime, tmp_path: Path
) -> None:
    runtime.loads = False
    row = ROWS["provider-loads"]
    judgement = row.judged(rehearsed(tmp_path, row))
    assert judgement.verdict == "otherwise"
    assert "libonnxruntime_providers_shared.so" in judgement.told
    with pytest.raises(NotMeasurable, match="does not load"):
        rehearsed(tmp_path, ROWS["tf32-and-fp16"], **SMALLER["tf32-and-fp16"])


def test_a_way_that_is_refused_costs_its_own_figures(cuda: Asked, runtime: AskedRuntime, tmp_path: Path) -> None:
    def refuse(options: Mapping[str, str]) -> None:
        if options["use_tf32"] == "0":
            raise RuntimeError("no plan for this convolution")

    runtime.refuses = refuse
    row = ROWS["tf32-and-fp16"]
    ran = rehearsed(tmp_path, row, **SMALLER[row.name])
    assert ran.facts["tf32 0 nhwc 1 fuse 0 graphs 0: refused"] == "no plan for this convolution"
    assert "tf32 1 nhwc 0 fuse 0 graphs 0 batch 4: ms" in ran.figures
    assert row.judged(ran).verdict == "otherwise"


def test_captures_collide_by_the_rules_of_the_fake(cuda: Asked, tmp_path: Path) -> None:
    row = ROWS["capture-and-waits"]
    ran = rehearsed(tmp_path, row, calls=["cudaEventSynchronize"])
    # A thread of its own mode is not concerned; another one is, and spoils the capture that is for all.
    where = "cudaEventSynchronize, capture {}, thread {}: {}"
    assert ran.figures[where.format("global", "thread-local", "call")] == 0
    assert ran.figures[where.format("global", "global", "call")] == 900
    assert ran.figures[where.format("global", "global", "capture")] == 901
    assert ran.figures["afterwards"] == 0
    assert row.judged(ran).verdict == "as expected"
    # The device-wide one must be noticed in every cell, which these are not.
    assert captures.judge_device_wide(ran).verdict == "otherwise"


def test_a_replay_that_writes_something_else_is_seen(cuda: Asked, tmp_path: Path) -> None:
    cuda.without_deeds = True
    ran = rehearsed(tmp_path, ROWS["capture-and-waits"], calls=["cudaMemGetInfo"])
    assert ran.figures["afterwards"] == -1
    assert ROWS["capture-and-waits"].judged(ran).verdict == "otherwise"


def test_a_reset_that_does_not_heal_is_told(cuda: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["reset-after-illegal-address"]
    assert row.judged(rehearsed(tmp_path, row)).verdict == "as expected"
    monkeypatch.setattr(cuda, "cudaDeviceReset", lambda: (700,), raising=False)
    (tmp_path / "notes.jsonl").unlink()
    ran = rehearsed(tmp_path, row)
    assert ran.figures["healed"] == 0
    assert row.judged(ran).verdict == "otherwise"


def test_a_session_that_is_refused_after_the_reset_is_what_was_expected(
    cuda: Asked, runtime: AskedRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS["session-after-reset"]
    was_reset: list[int] = []

    def refuse(options: Mapping[str, str]) -> None:
        if cuda.used.get("cudaDeviceReset") is not None:
            was_reset.append(1)
            raise RuntimeError("CUDA failure 709: context is destroyed")

    monkeypatch.setattr(runtime, "refuses", refuse)
    ran = rehearsed(tmp_path, row, **SMALLER[row.name])
    assert was_reset
    judgement = row.judged(ran)
    assert judgement.verdict == "as expected"
    assert "CUDA failure 709" in judgement.told
    assert row.judged(replace(ran, ended="crashed", how="SIGSEGV")).verdict == "as expected"


def test_a_wrong_replay_is_seen(cuda: Asked, runtime: AskedRuntime, tmp_path: Path) -> None:
    row = ROWS["replay-after-captures"]
    ran = rehearsed(tmp_path, row, **SMALLER[row.name])
    assert row.judged(ran).verdict == "as expected"
    worse = replace(ran, figures={**ran.figures, "lap 0 batch 1: error": 1e9})
    assert row.judged(worse).verdict == "otherwise"


def test_graphs_that_cannot_be_opened_on_the_gpu_alone(cuda: Asked, runtime: AskedRuntime, tmp_path: Path) -> None:
    ran = rehearsed(tmp_path, ROWS["shape-nodes"])
    errors = [error for name, error in ran.figures.items() if name.endswith(": error")]
    assert len(errors) == 2
    assert max(errors) < 1e-5


def made_up(**figures: float) -> Ran:
    return Ran("done", figures=figures)


def of_figures(figures: Mapping[str, float], **given: Any) -> Ran:
    return Ran("done", figures=dict(figures), **given)


BROKEN, UNBROKEN = ({"broken, cudaDeviceSynchronize": status} for status in (700.0, 0.0))
LAYOUTS = ("tf32 {} nhwc 0 fuse 0 graphs 0", "tf32 {} nhwc 1 fuse 0 graphs 0")


def timed(off_ms: float, on_ms: float, off_error: float = 1e-6, on_error: float = 5e-4) -> Ran:
    """Both layouts with use_tf32 0 and 1 at batch 32; channels first is half as fast."""
    figures = {}
    for slower, layout in zip((2, 1), LAYOUTS, strict=True):
        for tf32, ms, error in ((0, off_ms, off_error), (1, on_ms, on_error)):
            figures[f"{layout.format(tf32)} batch 32: ms"] = slower * ms
            figures[f"{layout.format(tf32)}: error"] = error
    return of_figures(figures)


@pytest.mark.parametrize(
    ("name", "ran", "verdict"),
    [
        ("tf32-and-fp16", timed(10.0, 4.0), "as expected"),
        ("tf32-and-fp16", timed(4.0, 4.0), "otherwise"),
        ("tf32-and-fp32", timed(10.0, 4.0), "as expected"),
        ("tf32-and-fp32", timed(10.0, 4.0, off_error=1e-3), "otherwise"),
        (
            "size-changes",
            of_figures(
                {
                    **{f"graphs 0 batch {n} alone: ms": 5.0 for n in (1, 32)},
                    **{f"graphs 0 batch {n} in turns: ms": 400.0 for n in (1, 32)},
                    **{f"graphs 1 batch {n} {how}: ms": 5.0 for n in (1, 32) for how in ("alone", "in turns")},
                }
            ),
            "as expected",
        ),
        ("session-after-reset", of_figures({**BROKEN, "after: error": 1e-6, "CUDA healed": 1.0}), "otherwise"),
        (
            "session-after-reset",
            Ran("crashed", "SIGABRT", {**BROKEN, "CUDA healed": 1.0}, steps=("a new session beside the old one",)),
            "as expected",
        ),
        ("session-after-reset", Ran("crashed", "SIGSEGV", steps=("writing the network",)), "otherwise"),
        ("session-after-reset", of_figures({**UNBROKEN, "CUDA healed": 1.0}, facts={"refusal": "x"}), "otherwise"),
        ("close-after-break", Ran("crashed", "SIGABRT", BROKEN, steps=("dropping the session",)), "as expected"),
        ("close-after-break", of_figures({**BROKEN, "the session was dropped": 1.0}), "otherwise"),
        ("close-after-break", Ran("crashed", "SIGSEGV"), "otherwise"),
        ("close-after-break", Ran("crashed", "SIGSEGV", UNBROKEN, steps=("dropping the session",)), "otherwise"),
        (
            "provider-architectures",
            of_figures({"capability": 100.0, "sm_90": 600.0, "sm_120": 317.0}),
            "otherwise",
        ),
        ("provider-architectures", of_figures({"capability": 90.0, "sm_90": 600.0}), "as expected"),
        ("benchmark", of_figures({"targets: pass": 6, "targets: FAIL": 0, "targets: unproved": 15, "rows": 9}), ""),
        ("benchmark", of_figures({"targets: pass": 6, "targets: FAIL": 1, "targets: unproved": 0, "rows": 9}), "no"),
        ("gpu-tests", of_figures({"passed": 30, "failed": 0, "skipped": 1}), ""),
        ("gpu-tests", of_figures({"passed": 0, "failed": 0, "skipped": 31}), "no"),
        ("serve", of_figures({"4 edges: images_per_s": 9e3, "4 edges: failed": 0}, facts={"4 edges": "x"}), ""),
        ("serve", of_figures({"4 edges: images_per_s": 9e3, "4 edges: failed": 2}, facts={"4 edges": "x"}), "no"),
    ],
)
def test_verdicts(name: str, ran: Ran, verdict: str) -> None:
    wanted = {"": "as expected", "no": "otherwise"}.get(verdict, verdict)
    assert ROWS[name].judged(ran).verdict == wanted, ROWS[name].judged(ran).told


# The networks


@pytest.mark.slow
def test_the_network_is_resnet_50(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(networks.resnet(tmp_path / "r.onnx", half=False, side=64)).graph
    assert sum(node.op_type == "Conv" for node in graph.node) == 53
    # torchvision's, less what BatchNorm has beyond a bias.
    assert sum(int(np.prod(one.dims)) for one in graph.initializer) == 25_530_472


def test_both_precisions_answer_alike(tmp_path: Path) -> None:
    batch = networks.pictures(2, 32)
    exact, half = (
        on_cpu(onnxruntime, networks.resnet(tmp_path / f"{half}.onnx", half=half, **SMALL), batch)
        for half in (False, True)
    )
    assert exact.shape == (2, 10)
    assert 0 < relative_error(half, exact) < 5e-3
    assert relative_error(exact * np.nan, exact) == 1e9


# The house's own


@pytest.mark.slow
def test_the_benchmark_runs_with_some_engines_and_takes_the_tests_from_part_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.gpu.proof import program
    from tests.gpu.proof.book import Book, concluded, write_book
    from tests.gpu.proof.records import read_proof
    from tests.gpu.proof.targets import DIGITS, ONNXRUNTIME

    bench = gpu_machine.GpuBench.of(FakeGpu("Fake H200", total_bytes=8 << 30))
    monkeypatch.setattr("convoy.app.engines.machine.find_machine", lambda: bench.machine)
    monkeypatch.setattr(program, "Ways", lambda **given: quick(makers={DIGITS: few_digits(DIGITS)}, **given))
    tests = of_figures({"passed": 41, "failed": 0, "skipped": 2, "seconds": 9.0}, facts={"note 1": "SKIPPED x"})
    write_book(Book(1, "Fake H200").with_outcome(concluded(ROWS["gpu-tests"], tests)), tmp_path)
    ran = rehearsed(tmp_path, ROWS["benchmark-onnxruntime"])
    assert ran.figures["rows"] > 0
    proof = read_proof(tmp_path / "results" / "fake-h200-onnxruntime.json")
    assert {row.setting.engine for row in proof.bare} == {ONNXRUNTIME}
    assert proof.tests is not None
    assert proof.tests.passed == 41
    assert "### Benchmark (onnxruntime)" in (tmp_path / "gpu-proof.md").read_text()
    assert "targets met" in ROWS["benchmark-onnxruntime"].judged(ran).told


@pytest.mark.slow
def test_the_switch_interval_is_tried_and_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    bench = gpu_machine.GpuBench.of(FakeGpu("Fake H200", total_bytes=8 << 30))
    monkeypatch.setattr("convoy.app.engines.machine.find_machine", lambda: bench.machine)
    before_s = sys.getswitchinterval()
    ran = rehearsed(tmp_path, ROWS["switch-interval"], sizes=[1, 4], seconds=0.02, rounds=1)
    assert sys.getswitchinterval() == before_s
    assert set(ran.figures) == {f"batch {n}, {how}: images/s" for n in (1, 4) for how in ("default", "short")}
    assert "of the default's rate" in ROWS["switch-interval"].judged(ran).told
