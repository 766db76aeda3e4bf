"""convoy to-tensorrt: its builds, what it says of them, what it keeps, and the command."""

from __future__ import annotations

import builtins
import dataclasses
import fcntl
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from convoy.app.engines.tensorrt_library import TENSORRT, load_builder
from convoy.export.tensorrt.audit import check_audit, read_audit
from convoy.export.tensorrt.build import BuildJob, build_plan
from convoy.export.tensorrt.files import sole_builder
from convoy.export.tensorrt.library import find_gpu, resolve_target
from convoy.export.tensorrt.watch import BuildWatch
from convoy.export.to_tensorrt import main
from convoy.models.checkout import pip_install
from convoy.models.errors import JobError, UsageError
from convoy.models.plan_cache import find_plan
from convoy.models.plans import BuildEvent, BuildOptions, Gpu, Plan, PlanAudit, PlanPaths, timing_cache_path
from convoy.models.records import from_jsonable
from tests.support.fake_cuda import NO_DEVICE, FakeCuda, FakeGpu
from tests.support.fake_tensorrt import VERSIONS
from tests.support.tensorrt_play import FakeInput, Scenario

H200 = Gpu("NVIDIA H200", "9.0")


class Bench:
    def __init__(self, folder: Path, version: str) -> None:
        self.scenario = Scenario(version=version)
        self.onnx = folder / "fp16.onnx"
        self.onnx.write_bytes(b"a graph")
        self.cache = folder / "cache"
        self.options = BuildOptions("fp16", (1, 8))
        self.timing: Path | None = None
        self.limit_s: float | None = None
        self.now_s = 0.0
        self.while_waiting: Callable[[], None] = lambda: None
        self.events: list[BuildEvent] = []

    def build(self) -> Plan:
        return build_plan(self.job(), self.scenario.module(), self.watch())

    def job(self) -> BuildJob:
        module = self.scenario.module()
        target = resolve_target(TENSORRT, module, (), self.options, H200)
        return BuildJob(self.onnx, self.cache, self.options, target, H200.name, self.timing)

    def watch(self) -> BuildWatch:
        return BuildWatch(self.events.append, self.limit_s, lambda: self.now_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.while_waiting()

    def spend(self, seconds: float) -> None:
        self.now_s += seconds

    def notes(self) -> list[str]:
        return [event.text for event in self.events if event.kind == "note"]

    def plans(self) -> list[str]:
        return sorted(path.suffix for path in self.cache.rglob("*") if path.suffix in (".plan", ".json"))


@pytest.fixture(params=VERSIONS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(tmp_path, request.param)


def test_a_plan_is_built_audited_stored_and_found_again(bench: Bench) -> None:
    built = bench.build()
    assert built.data == b"an engine"
    assert built.record.audit.by_precision == {"fp16": 2, "fp32": 1}
    assert built.record.audit.moving == 1
    assert built.record.scratch_bytes == (1024, 2048)
    assert built.record.device_name == "NVIDIA H200"
    assert find_plan(bench.cache, built.record.key) == built
    assert bench.build() == built
    assert bench.scenario.builds == 1
    assert bench.scenario.parsed_path == str(bench.onnx)


def test_the_network_is_strongly_typed_and_fp32_is_really_fp32(bench: Bench) -> None:
    bench.build()
    flags = bench.scenario.module().NetworkDefinitionCreationFlag
    assert bench.scenario.network_flags == 1 << int(flags.STRONGLY_TYPED)
    assert bench.scenario.cleared == {"TF32"}


def test_there_is_one_static_profile_per_batch_size(bench: Bench) -> None:
    bench.scenario.inputs = (FakeInput("images", (-1, 8, 8, 3)), FakeInput("scale", (-1, 1)))
    bench.build()
    assert bench.scenario.profiles == [
        {"images": ((n, 8, 8, 3),) * 3, "scale": ((n, 1),) * 3} for n in bench.options.batch_sizes
    ]


def test_workspace_and_compatibility_reach_tensorrt(bench: Bench) -> None:
    bench.options = BuildOptions("fp16", (1,), 64, "same_compute_capability")
    built = bench.build()
    assert bench.scenario.pools == {"WORKSPACE": 64 << 20}
    assert bench.scenario.config.hardware_compatibility_level.name == "SAME_COMPUTE_CAPABILITY"
    assert built.record.key.target.gpu_name is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (FakeInput(shape=(1, 8, 8, 3)), "first size .* is fixed at 1, where .* batches of 1, 8; "),
        (FakeInput(shape=(-1, -1, 8, 3)), r"has shape \[-1, -1, 8, 3\]; fix all sizes but the first"),
        (FakeInput(shape=()), "is not a batch"),
        (FakeInput(is_shape_tensor=True), "is not a batch"),
    ],
)
def test_an_input_that_cannot_be_batched_is_refused(bench: Bench, given: FakeInput, message: str) -> None:
    bench.scenario.inputs = (given,)
    with pytest.raises(JobError, match=message):
        bench.build()


def test_the_time_limit_stops_the_build_and_keeps_what_was_measured(bench: Bench) -> None:
    bench.limit_s = 3.5
    bench.scenario.on_step = lambda: bench.spend(1.0)
    with pytest.raises(JobError, match=r"the build exceeded 3\.5 s; raise --time-limit-s"):
        bench.build()
    assert bench.plans() == []
    assert list(bench.cache.glob("timing-*.cache"))


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_plan_that_is_not_what_its_label_says_is_refused(bench: Bench, precision: str) -> None:
    bench.options = BuildOptions(precision, (1,))  # type: ignore[arg-type]
    bench.scenario.data_types = ("Float",) * 20 + ({"fp16": "Half", "int8": "Int8"}[precision],)
    with pytest.raises(JobError, match=rf"only 1 of 21 computing layers run in {precision}"):
        bench.build()
    assert bench.plans() == []


def test_an_inspector_that_needs_shapes_gets_them(bench: Bench) -> None:
    bench.scenario.is_silent_without_shapes = True
    assert bench.build().record.audit.by_precision == {"fp16": 2, "fp32": 1}
    assert bench.scenario.context_shapes == {"images": (1, 8, 8, 3)}


def test_a_plan_whose_types_nobody_tells_is_refused_unless_it_claims_nothing(bench: Bench) -> None:
    bench.scenario.data_types = ("N/A", "N/A")
    with pytest.raises(JobError, match="fp16 cannot be proved"):
        bench.build()
    bench.options = BuildOptions("fp32", (1,))
    assert bench.build().record.audit.by_precision == {"unknown": 2}


def test_an_engine_that_does_not_load_is_not_stored(bench: Bench) -> None:
    bench.scenario.is_loadable = False
    with pytest.raises(JobError, match="does not load"):
        bench.build()
    assert bench.plans() == []


def audited(*layers: Any) -> PlanAudit:
    return read_audit(json.dumps({"Layers": list(layers)}))


def layer(kind: str = "CaskConvolution", inputs: Any = (), outputs: Any = ()) -> dict[str, Any]:
    return {"Name": "n", "LayerType": kind, "Inputs": list(inputs), "Outputs": list(outputs)}


@pytest.mark.parametrize(
    ("tensor", "precision"),
    [
        ({"Format/Datatype": "Half"}, "fp16"),
        ({"Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}, "fp16"),
        ({"Format/Datatype": "Row major linear FP32 format"}, "fp32"),
        ({"Format/Datatype": "Float"}, "fp32"),
        ({"Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}, "int8"),
        ({"Format/Datatype": "Row major linear UInt8 format"}, "other"),
        ({"Format/Datatype": "Row major linear BFloat16 format"}, "bf16"),
        ({"Format/Datatype": "N/A due to dynamic shapes"}, "unknown"),
        ({"Format": "Row major linear FP32 format (kLINEAR)", "DataType": "Half"}, "fp16"),
        ({"Format": "Row major linear FP32 format (kLINEAR)", "DataType": "Float"}, "fp32"),
        ({"Format": "Row major linear FP16 format"}, "fp16"),
        ({"Format": "kHWC16", "DataType": "Int8"}, "int8"),
        ({}, "unknown"),
    ],
)
def test_each_wording_is_understood(tensor: dict[str, str], precision: str) -> None:
    assert audited(layer(outputs=[tensor])) == PlanAudit({precision: 1}, 0)


def test_layers_count_by_their_narrowest_side_if_they_compute_at_all() -> None:
    int8, half = [{"DataType": "Int8"}], [{"DataType": "Half"}]
    assert audited(layer(inputs=int8, outputs=half)) == PlanAudit({"int8": 1}, 0)
    # Moving and converting are no computing.
    assert audited(layer("Reformat", half, half), layer("NoOp", half, half)) == PlanAudit({}, 2)
    assert audited("conv1", "conv2") == PlanAudit({"unknown": 2}, 0)  # names without details


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"Layers": '])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="no list of layers"):
        read_audit(text)


def test_one_layer_in_ten_is_enough_and_less_is_not() -> None:
    with pytest.raises(JobError, match="cannot be proved"):
        check_audit(PlanAudit({}, 3), "fp16", "fp16.onnx")
    check_audit(PlanAudit({"fp16": 1, "fp32": 9}, 0), "fp16", "fp16.onnx")
    with pytest.raises(JobError, match="only 1 of 11"):
        check_audit(PlanAudit({"fp16": 1, "fp32": 10}, 0), "fp16", "fp16.onnx")


@pytest.mark.parametrize("name", ["plan", "record"])
def test_a_spoilt_plan_is_built_anew_and_the_reason_told(bench: Bench, name: str) -> None:
    first = bench.build()
    getattr(PlanPaths.of(bench.cache, first.record.key), name).write_bytes(b"{}")
    assert bench.build().data == first.data
    assert bench.scenario.builds == 2
    assert any("does not match" in note or "cannot be read" in note for note in bench.notes())
    assert isinstance(find_plan(bench.cache, first.record.key), Plan)


def test_what_is_built_beside_a_server_is_bounded_and_its_kernel_times_are_kept_from_others(bench: Bench) -> None:
    built = bench.build()
    path = timing_cache_path(bench.cache, built.record.key)
    for workspace_mb, beside_mb, used_mb in ((None, 700, 700), (64, 700, 64), (800, 700, 700), (None, 0, 1)):
        bench.options = BuildOptions("fp16", (1, 4), workspace_mb)
        shutil.rmtree(PlanPaths.of(bench.cache, built.record.key).folder)
        bench.scenario.pools = {}
        job = dataclasses.replace(bench.job(), beside_mb=beside_mb)
        built = build_plan(job, bench.scenario.module(), bench.watch())
        assert bench.scenario.pools == {"WORKSPACE": used_mb << 20}
        assert bench.scenario.timing_in_use == b"+", "what others have timed is of use"
        assert path.read_bytes() == b"+"
        assert f"built beside a server, with {used_mb} MiB of workspace at most" in built.record.notes


def test_kernel_times_are_kept_and_used_again(bench: Bench) -> None:
    built = bench.build()
    path = timing_cache_path(bench.cache, built.record.key)
    assert path.read_bytes() == b"+"
    bench.options = dataclasses.replace(bench.options, batch_sizes=(1, 8, 16))
    bench.build()
    assert bench.scenario.timing_in_use == b"+"
    assert path.read_bytes() == b"++"


def test_kernel_times_of_another_device_or_that_others_may_write_are_left_aside(bench: Bench, tmp_path: Path) -> None:
    bench.timing = tmp_path / "times.cache"
    bench.timing.write_bytes(b"of another device")
    bench.timing.chmod(0o666)
    bench.build()
    assert bench.scenario.timing_in_use == b"", "others may write it"
    bench.timing.write_bytes(b"of another device")
    bench.timing.chmod(0o644)
    shutil.rmtree(bench.cache)
    bench.scenario.takes_timing = lambda known: known == b""
    built = bench.build()
    assert bench.timing.read_bytes() == b"+"
    assert any("another TensorRT or device" in note for note in built.record.notes)


def test_a_second_builder_waits_and_takes_what_the_first_has_built(bench: Bench) -> None:
    first = bench.build()
    lock = os.open(PlanPaths.of(bench.cache, first.record.key).lock, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def finish_after_5_s() -> None:
        if bench.now_s > 5:
            fcntl.flock(lock, fcntl.LOCK_UN)

    bench.while_waiting = finish_after_5_s
    assert bench.build() == first
    assert bench.scenario.builds == 1
    assert "another builder is at work on this plan; waiting for it" in bench.notes()
    os.close(lock)


def test_waiting_for_another_builder_ends_with_the_time_limit(bench: Bench) -> None:
    first = bench.build()
    bench.limit_s = 60
    paths = PlanPaths.of(bench.cache, first.record.key)
    with sole_builder(bench.cache, paths, bench.watch()), pytest.raises(JobError, match="the build exceeded 60 s"):
        bench.build()


def test_what_a_killed_builder_left_is_cleared_away(bench: Bench) -> None:
    paths = PlanPaths.of(bench.cache, bench.build().record.key)
    leftover = paths.folder / f".writing-{paths.stem}-x"
    leftover.write_bytes(b"half an eng")
    bench.build()
    assert not leftover.exists()


def test_a_missing_model_is_a_wrong_call(bench: Bench) -> None:
    bench.onnx.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        bench.build()


def test_a_full_disk_leaves_no_plan_and_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("convoy.export.tensorrt.files.os.fsync", full)
    with pytest.raises(JobError, match="is full"):
        bench.build()
    assert bench.plans() == []
    assert not list(bench.cache.rglob(".writing-*"))


ROOT = Path(__file__).parent.parent.parent
Run = Callable[..., int]


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()


@pytest.fixture
def run(tmp_path: Path, scenario: Scenario) -> Run:
    onnx = tmp_path / "fp16.onnx"
    onnx.write_bytes(b"a graph")

    def call(*more: str) -> int:
        given = [str(onnx), "--plan-cache", str(tmp_path / "cache"), "--precision", "fp16", "--batch-sizes", "1,8"]
        return main([*given, "--library", "tensorrt", *more], lambda library: scenario.module(), lambda: H200)

    return call


def events(text: str) -> list[BuildEvent]:
    return [from_jsonable(BuildEvent, json.loads(line), "line") for line in text.splitlines()]


def test_every_line_is_an_event_and_the_last_one_is_the_plan(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json-progress") == 0
    *before, last = events(capsys.readouterr().out)
    assert last.kind == "done"
    assert Path(last.text).read_bytes() == b"an engine"
    assert {event.kind for event in before} == {"note", "progress"}


def test_people_get_the_outermost_phases_and_one_line_of_result(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    assert "Building (2 steps)" in out
    assert "Timing" not in out
    assert out.endswith(".plan (0.0 MB; computing layers: 2 fp16, 1 fp32)\n")


def test_a_file_that_is_refused_exits_with_3_and_says_why(
    run: Run, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.build_errors = ("no kernel",)
    assert run("--json-progress") == 3
    captured = capsys.readouterr()
    assert "no kernel" in captured.err
    assert events(captured.out)[-1].kind == "failed"
    assert "no kernel" in events(captured.out)[-1].text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch-sizes", "8,1"], "must ascend"),
        (["--batch-sizes", "a"], "is not a list of batch sizes"),
        (["--precision", "fp4"], "fp4"),
        (["--time-limit-s", "0"], "is not a number of seconds"),
        (["--time-limit-s", "nan"], "is not a number of seconds"),
        (["--workspace-mb", "0"], "at least 1 MiB"),
        (["--hardware-compatibility", "all"], "all"),
        (["--unknown"], "--unknown"),
    ],
)
def test_a_wrong_call_exits_with_2_and_one_line(
    run: Run, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*more) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_tensorrt_that_is_missing_or_whose_libraries_are_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(JobError, match=r"^TensorRT is not installed; run "):
        load_builder(TENSORRT)
    real = importlib.import_module

    def broken(name: str) -> ModuleType:
        if name == "tensorrt":
            raise ImportError("libnvinfer.so.11: cannot open shared object file")
        return real(name)

    monkeypatch.setattr("convoy.app.engines.tensorrt_library.importlib.import_module", broken)
    with pytest.raises(JobError, match=r"does not load \(libnvinfer\.so\.11"):
        load_builder(TENSORRT)


def test_a_version_that_lacks_something_is_named_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Scenario().module()
    del module.ICudaEngine.get_device_memory_size_for_profile_v2
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    with pytest.raises(JobError, match=r"TensorRT 11\.4\S* has no ICudaEngine\.get_device_memory_size_for_profile_v2"):
        load_builder(TENSORRT)


def test_the_gpu_is_asked_for_its_name_and_capability_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(FakeGpu(H200.name))
    monkeypatch.setattr("convoy.export.tensorrt.library.load_runtime", lambda: cuda)
    assert find_gpu() == H200
    cuda.driver_status = NO_DEVICE
    with pytest.raises(JobError, match=r"no GPU to build for: .*no CUDA-capable device is detected"):
        find_gpu()


_BLOCKED = ("rich", "typer", "fastapi", "prometheus_client", "onnx", "onnxruntime", "torch", "PIL", "pydantic")


def test_the_builder_needs_no_terminal_no_onnx_and_no_torch(tmp_path: Path) -> None:
    """In a fresh interpreter where those cannot be imported, it gets as far as asking for TensorRT."""
    code = (
        "import sys\n"
        f"for name in {(*_BLOCKED, 'tensorrt')!r}: sys.modules[name] = None\n"
        "from convoy.export.to_tensorrt import main\n"
        "sys.exit(main())"
    )
    (tmp_path / "m.onnx").write_bytes(b"a graph")
    options = [str(tmp_path / "m.onnx"), "--plan-cache", str(tmp_path), "--precision", "fp16", "--batch-sizes", "1"]
    options += ["--library", "tensorrt"]
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"to_tensorrt: TensorRT is not installed; run {pip_install('tensorrt')}")


def test_a_whole_build_imports_nothing_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    real = builtins.__import__

    def watched(name: str, *args: Any, **kwargs: Any) -> Any:
        imported.append(name.partition(".")[0])
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", watched)
    assert run() == 0
    assert not set(imported) & set(_BLOCKED)
