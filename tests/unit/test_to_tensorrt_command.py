"""`python -m convoy.export.to_tensorrt`: what it prints, how it exits, and what it does without."""

from __future__ import annotations

import builtins
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from convoy.app.engines.tensorrt_library import TENSORRT, load_builder
from convoy.export.tensorrt.library import find_gpu
from convoy.export.to_tensorrt import main
from convoy.models.errors import JobError
from convoy.models.plans import BuildEvent, Gpu
from convoy.models.records import from_jsonable
from tests.support.fake_cuda import NO_DEVICE, FakeCuda, FakeGpu
from tests.support.tensorrt_play import Scenario

ROOT = Path(__file__).parent.parent.parent
H200 = Gpu("NVIDIA H200", "9.0")
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


def test_without_tensorrt_the_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(JobError, match=r"^TensorRT is not installed; run pip install 'convoy-serve\[tensorrt\]' \("):
        load_builder(TENSORRT)


def test_a_tensorrt_whose_libraries_are_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_gpu_is_asked_for_its_name_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.export.tensorrt.library.load_runtime", lambda: FakeCuda(FakeGpu(H200.name)))
    assert find_gpu() == H200


def test_a_machine_without_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.driver_status = NO_DEVICE
    monkeypatch.setattr("convoy.export.tensorrt.library.load_runtime", lambda: cuda)
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
    assert done.stderr.startswith("to_tensorrt: TensorRT is not installed; run pip install 'convoy-serve[tensorrt]'")


def test_a_whole_build_imports_nothing_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    real = builtins.__import__

    def watched(name: str, *args: Any, **kwargs: Any) -> Any:
        imported.append(name.partition(".")[0])
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", watched)
    assert run() == 0
    assert not set(imported) & set(_BLOCKED)
