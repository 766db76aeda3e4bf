"""`convoy doctor` on machines with GPUs that are not there: devices, and which plans can serve on them."""

from __future__ import annotations

import io
import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from convoy.app.commands import doctor as doctor_command
from convoy.app.commands.doctor import diagnose
from convoy.app.engines.jobs import PlanRequest
from convoy.app.engines.machine import Library, Machine
from convoy.models.bundle import open_bundle
from convoy.models.onnx_digest import onnx_digest
from convoy.models.plans import BuildOptions, Gpu, plan_key, tensorrt_target
from convoy.models.store import DEMO_STORE
from tests.support.fake_cuda import DEVICES_UNAVAILABLE, OUT_OF_MEMORY, FakeGpu
from tests.support.gpu_machine import GpuBench

NO_GPU = Machine(no_gpu="cuda-python is not installed; run pip install 'convoy-serve[gpu]'")


@pytest.fixture
def bench() -> GpuBench:
    return GpuBench.of(FakeGpu("Fake H200"))


def build_plan(bench: GpuBench, cache: Path) -> None:
    """The demo's FP16 plan for the bench's first GPU."""
    bundle = open_bundle(DEMO_STORE / "digits" / "1")
    (variant,) = (one for one in bundle.manifest.variants if one.file == "fp16.onnx")
    onnx, options = bundle.path(variant.file), BuildOptions("fp16", (1, 4))
    gpu = Gpu("Fake H200", "9.0")
    key = plan_key(onnx_digest(onnx), tensorrt_target(bench.machine.tensorrt.module.__version__, gpu, options), options)
    bench.build(PlanRequest(bench.machine.gpus[0], onnx, variant, options, key), cache)


def why_not(machine: Machine, cache: Path) -> str:
    """What keeps the cache's only plan from serving there."""
    (plan,) = diagnose(machine, cache).plan_cache.plans
    return plan.why_not


def shown(machine: Machine, cache: Path, monkeypatch: pytest.MonkeyPatch, *, as_json: bool = False) -> str:
    monkeypatch.setattr(doctor_command, "find_machine", lambda: machine)
    console = Console(file=io.StringIO(), width=200)
    doctor_command.run(as_json, cache, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_gpu_is_shown_with_what_matters_for_engines(bench, tmp_path):
    diagnosis = diagnose(bench.machine, tmp_path)
    (gpu,) = diagnosis.gpu_devices
    assert (gpu.device, gpu.name, gpu.compute_capability, gpu.total_bytes) == ("cuda:0", "Fake H200", "9.0", 4 << 30)
    (words,) = diagnosis.gpus
    assert words.startswith("cuda:0: Fake H200, compute capability 9.0, 4.0 GiB, driver for CUDA ")
    assert [engine.usable for engine in diagnosis.engines] == [False, True, True, True, False]


def test_a_gpu_that_only_the_driver_sees_is_shown_beside_what_to_install_with_its_brackets(tmp_path, monkeypatch):
    answer = subprocess.CompletedProcess([], 0, "Some GPU, 580.1, 143771 MiB\n", "")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("subprocess.run", lambda *args, **options: answer)
    diagnosis = diagnose(NO_GPU, tmp_path)
    assert diagnosis.gpus == ("nvidia-smi shows Some GPU, 580.1, 143771 MiB",)
    assert diagnosis.gpu_note == NO_GPU.no_gpu
    assert "convoy-serve[gpu]" in shown(NO_GPU, tmp_path, monkeypatch)


def test_a_plan_for_this_gpu_serves_here_and_json_has_everything(bench, tmp_path, monkeypatch):
    assert diagnose(bench.machine, tmp_path / "none").plan_cache.plans == ()
    build_plan(bench, tmp_path)
    diagnosis = diagnose(bench.machine, tmp_path)
    (plan,) = diagnosis.plan_cache.plans
    assert (plan.model, plan.precision, plan.batch_sizes, plan.why_not) == ("fp16.onnx", "fp16", (1, 4), "")
    assert "fp16.onnx as fp16" in shown(bench.machine, tmp_path, monkeypatch)
    assert json.loads(shown(bench.machine, tmp_path, monkeypatch, as_json=True)) == json.loads(
        json.dumps(asdict(diagnosis))
    )


def test_a_plan_says_why_it_cannot_serve(bench, tmp_path):
    build_plan(bench, tmp_path)
    other_gpu = GpuBench.of(FakeGpu("Fake A100", (8, 0))).machine
    other_version = replace(bench.machine, tensorrt=Library(type("trt", (), {"__version__": "11.9.0"})))
    assert why_not(other_gpu, tmp_path) == "no GPU of this kind"
    assert why_not(other_version, tmp_path) == "TensorRT 11.9.0 is installed"
    assert why_not(NO_GPU, tmp_path) == "no GPU"
    (file,) = tmp_path.rglob("*.plan")
    file.write_bytes(b"something else")
    assert "does not match the sha256" in why_not(bench.machine, tmp_path)


def test_a_record_that_cannot_be_read_is_named(bench, tmp_path, monkeypatch):
    build_plan(bench, tmp_path)
    (record,) = tmp_path.rglob("trt*.json")
    record.write_text("{")
    inventory = diagnose(bench.machine, tmp_path).plan_cache
    assert inventory.plans == ()
    assert "cannot be read" in inventory.unreadable[0]
    assert f"not a plan: {record}: cannot be read" in shown(bench.machine, tmp_path, monkeypatch)


@pytest.mark.parametrize("call", ["cudaGetDeviceProperties", "cudaSetDevice", "cudaDeviceSynchronize"])
def test_a_gpu_that_does_not_work_is_shown_with_the_reason_and_the_others_serve(call, tmp_path, monkeypatch):
    bad = FakeGpu("Bad", broken={call: DEVICES_UNAVAILABLE})
    machine = GpuBench.of(bad, FakeGpu("Fake H200")).machine
    diagnosis = diagnose(machine, tmp_path)
    assert [gpu.device for gpu in diagnosis.gpu_devices] == ["cuda:1"]
    assert any(told.startswith("cuda:0 cannot be used: cuda") and "error 46" in told for told in diagnosis.gpus)
    assert {one.engine: one.usable for one in diagnosis.engines}["onnxruntime-cuda"]
    assert "cuda:0 cannot be used" in " ".join(shown(machine, tmp_path, monkeypatch).split())
    json.loads(shown(machine, tmp_path, monkeypatch, as_json=True))


def test_where_no_gpu_works_no_engine_for_gpus_is_said_to(tmp_path):
    bad = FakeGpu("Bad", broken={"cudaSetDevice": OUT_OF_MEMORY})
    diagnosis = diagnose(GpuBench.of(bad).machine, tmp_path)
    assert diagnosis.gpu_devices == ()
    assert any("cuda:0 cannot be used" in told and "error 2" in told for told in diagnosis.gpus)
    assert not {one.engine: one.usable for one in diagnosis.engines}["onnxruntime-cuda"]
