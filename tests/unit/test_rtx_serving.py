"""Plans of TensorRT for RTX on a GPU: found, compiled once, kept, measured against what else can serve."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.app.engines.base import run_arrays
from convoy.app.engines.jobs import Job
from convoy.app.engines.machine import Library
from convoy.app.engines.tensorrt import TensorRtEngine
from convoy.app.lifecycle.upgrades import prove_plan
from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.app.loading.proving import NotProved
from convoy.models.bundle import (
    MANIFEST,
    Precision,
    open_bundle,
    read_manifest,
    seal,
)
from convoy.models.errors import BundleError
from convoy.models.plans import BuildOptions, PlanTarget
from convoy.models.store import DEMO_STORE, Store
from tests.support.fake_cuda import STREAM_CAPTURE_UNSUPPORTED, FakeGpu
from tests.support.gpu_machine import GpuBench
from tests.support.rtx_run import Jit

# For `make test`: some seconds together.
pytestmark = pytest.mark.slow

NO_LIBRARY = Library(None, "it is not installed")
SIZES = (1, 2, 4)
RTX = "tensorrt-rtx"


@pytest.fixture(autouse=True)
def _measures_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.app.loading.proving.MEASURING_BUDGET_S", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The digits, with FP16 and INT8 files for GPUs that may serve, and no other reduced ones."""
    folder = tmp_path / "store" / "digits" / "1"
    shutil.copytree(DEMO_STORE / "digits" / "1", folder)
    manifest = read_manifest(folder)
    variants = tuple(replace(variant, serve=True) for variant in manifest.variants if variant.precision != "fp8")
    (folder / MANIFEST).write_bytes(seal(replace(manifest, variants=variants)))
    return tmp_path / "store"


def bench_of(*gpus: FakeGpu, **missing: Library) -> GpuBench:
    """GPUs with TensorRT for RTX alone, unless `onnxruntime` or `tensorrt` are not said to be missing."""
    bench = GpuBench.of(*(gpus or (FakeGpu("NVIDIA L4", (8, 9)),)), rtx=True)
    return bench if not missing else replace_machine(bench, **missing)


def replace_machine(bench: GpuBench, **libraries: Library) -> GpuBench:
    bench.machine = replace(bench.machine, **libraries)
    return bench


@pytest.fixture
def bench() -> GpuBench:
    return bench_of(tensorrt=NO_LIBRARY)


class Start:
    """One server after the other on the same store and plan cache."""

    def __init__(self, store: Path, bench: GpuBench) -> None:
        self.store, self.bench = store, bench
        self.plans = store.parent / "plans"
        self.bundle = open_bundle(store / "digits" / "1")

    def options(self, **given: object) -> LoadOptions:
        base = LoadOptions("fp16", threads=1, max_batch=4, machine=self.bench.machine, plan_cache=self.plans)
        return replace(base, **given)  # type: ignore[arg-type]

    def load(self, **given: object) -> LoadedModel:
        return load(Store(self.store).versions("digits")[0], self.options(**given))

    def job(self, **given: object) -> Job:
        options = self.options(**given)
        batch = options.max_batch
        assert batch is not None
        return Job.of_bundle(self.bundle, batch, options.precision, options.machine, options.plan_cache)

    def build_ahead(
        self,
        *capabilities: str,
        sizes: tuple[int, ...] = SIZES,
        precision: Precision = "fp16",
        file: str = "fp16.onnx",
        version: str | None = None,
    ) -> Path:
        """What `convoy build` leaves; the plan's path."""
        version = version or str(self.bench.rtx.module().__version__)
        target = PlanTarget("tensorrt-rtx", version, capabilities)
        options = BuildOptions(precision, sizes, profiles="range")
        return self.bench.build_for(self.bundle.path(file), target, options, self.plans).path

    def compile(self, model: LoadedModel) -> None:
        """What `convoy.app.lifecycle.upgrades` does of the first wish, until the plan would take over."""
        prove_plan(self.job(), model.wishes[0]).engine.close()

    def compiled_by(self, model: LoadedModel) -> list[int]:
        close(model)
        done = list(self.bench.rtx.jit.compiled)
        self.bench.rtx.jit.compiled.clear()
        return done

    def kernels(self) -> list[Path]:
        return sorted(self.plans.rglob("*.kernels"))


def close(model: LoadedModel) -> None:
    for proved in model.engines:
        proved.engine.close()


@pytest.fixture
def start(store: Path, bench: GpuBench) -> Start:
    return Start(store, bench)


def engines(model: LoadedModel) -> list[tuple[str, str, str]]:
    infos = [proved.engine.info for proved in model.engines]
    return [(info.engine, info.precision, info.device) for info in infos]


# No plan


@pytest.mark.parametrize(
    ("capability", "targets"),
    [((8, 9), ("8.9",)), ((9, 0), ()), ((8, 7), ()), ((7, 5), ("7.5",)), ((12, 1), ("12.1",))],
)
def test_without_a_plan_the_fallback_serves_and_one_for_this_device_is_wished_for(store, capability, targets):
    start = Start(store, bench_of(FakeGpu("NVIDIA X", capability), tensorrt=NO_LIBRARY))
    model = start.load()
    assert engines(model) == [("onnxruntime-cuda", "fp16", "cuda:0")]
    assert [(wish.library, wish.key.target.capabilities) for wish in model.wishes] == [(RTX, targets)]
    assert model.wishes[0].options == BuildOptions("fp16", SIZES, profiles="range")
    assert any(why.startswith("tensorrt-rtx on cuda:0: fp16.onnx: no plan for") for why in model.skipped), model.skipped
    start.bench.build(model.wishes[0], start.plans)
    start.compile(model)
    assert engines(start.load()) == [(RTX, "fp16", "cuda:0")]


def test_what_no_plan_can_be_for_is_not_wished_for(store):
    """It would be built, and refused, at every start."""
    model = Start(store, bench_of(FakeGpu("Tesla V100", (7, 0)), tensorrt=NO_LIBRARY)).load()
    assert model.wishes == ()
    assert any("is for compute capability 8.0 and later, not 7.0" in why for why in model.skipped), model.skipped


def test_rtx_by_name_without_a_plan_fails_and_says_how_to_get_one(start):
    with pytest.raises(BundleError, match=r"--engine rtx cannot serve it .*no plan for compute capability 8\.9"):
        start.load(engine="rtx")


# A plan that was built ahead


def serves_faster(monkeypatch: pytest.MonkeyPatch, took_ms: dict[str, float]) -> None:
    monkeypatch.setattr("convoy.app.engines.measure.Probe.run_ms", lambda probe: took_ms[probe.engine.info.engine])


# Cold and warm


def test_with_rtx_by_name_the_first_start_waits_and_the_second_does_not(start):
    start.build_ahead()
    assert sorted(start.compiled_by(start.load(engine="rtx"))) == [0, *SIZES], "each kernel once"
    assert start.compiled_by(start.load(engine="rtx")) == []


def test_without_onnxruntime_for_cuda_the_cpu_serves_meanwhile(store):
    start = Start(store, bench_of(tensorrt=NO_LIBRARY, onnxruntime=NO_LIBRARY))
    start.build_ahead()
    cold = start.load(precision="auto")
    assert engines(cold)[0][::2] == ("onnxruntime-cpu", "cpu")
    start.compile(cold)
    assert engines(start.load(precision="auto"))[0][0] == RTX


def test_a_start_that_would_compile_for_larger_batches_is_a_cold_one(start):
    """What one server left that ran small batches is not all that another needs."""
    start.build_ahead()
    start.compiled_by(start.load(engine="rtx", max_batch=1))
    cold = start.load(max_batch=4)
    assert engines(cold)[0][0] == "onnxruntime-cuda"
    assert start.compiled_by(cold) == []
    start.compile(cold)
    assert sorted(start.compiled_by(cold)) == [2, 4]
    for batch in (4, 1):
        assert start.compiled_by(start.load(max_batch=batch)) == []


def test_kernels_for_another_driver_or_gpu_are_another_file(store, monkeypatch):
    start = Start(store, bench_of(tensorrt=NO_LIBRARY))
    start.build_ahead()
    start.load(engine="rtx")
    monkeypatch.setattr("convoy.app.engines.plans._driver", lambda device: "another")
    assert start.load().wishes
    start.load(engine="rtx")
    monkeypatch.undo()
    start.bench = bench_of(FakeGpu("NVIDIA L40S", (8, 9)), tensorrt=NO_LIBRARY)
    assert start.load().wishes
    start.load(engine="rtx")
    assert len(start.kernels()) == 3


def test_the_drivers_own_version_counts(store, tmp_path, monkeypatch):
    start = Start(store, bench_of(tensorrt=NO_LIBRARY))
    start.build_ahead()
    told = tmp_path / "version"
    monkeypatch.setattr("convoy.app.engines.plans._DRIVER", told)
    for line in ("Kernel Module  580.65.06", "Open Kernel Module for x86_64  580.65.06", "Kernel Module  580.95.05"):
        told.write_text(f"NVRM version: NVIDIA UNIX {line}  Release Build\nGCC version: 12\n")
        start.load(engine="rtx")
    assert len(start.kernels()) == 2


def test_kernels_that_the_library_refuses_are_made_anew_and_replaced_whole(start):
    start.build_ahead()
    start.compiled_by(start.load(engine="rtx"))
    (kernels,) = start.kernels()
    good = kernels.read_bytes()
    kernels.write_bytes(b"half of it")
    assert sorted(start.compiled_by(start.load(engine="rtx"))) == [0, *SIZES]
    assert kernels.read_bytes() == good
    start.bench.rtx.jit.origin = "a later library"
    start.compiled_by(start.load(engine="rtx"))
    assert start.compiled_by(start.load()) == []
    assert not list(start.plans.rglob(".writing-*"))


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_kernels_that_others_may_write_are_not_used_nor_waited_for(start, mode, caplog):
    start.build_ahead()
    start.compiled_by(start.load(engine="rtx"))
    (kernels,) = start.kernels()
    kernels.chmod(mode)
    model = start.load()
    assert engines(model)[0][0] == "onnxruntime-cuda"
    assert start.compiled_by(model) == []
    start.compile(model)
    assert "other users can write to it" in caplog.text
    assert sorted(start.compiled_by(model)) == [0, *SIZES]
    assert kernels.stat().st_mode & 0o777 == 0o644
    assert start.compiled_by(start.load()) == []


def test_a_link_in_the_place_of_kernels_is_not_followed(start, tmp_path):
    start.build_ahead()
    start.load(engine="rtx")
    (kernels,) = start.kernels()
    kernels.rename(tmp_path / "elsewhere")
    kernels.symlink_to(tmp_path / "elsewhere")
    start.compiled_by(start.load(engine="rtx"))
    assert not kernels.is_symlink()


def full_disk(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_cache_that_cannot_be_written_costs_only_the_memory(start, monkeypatch, caplog):
    start.build_ahead()
    monkeypatch.setattr("convoy.models.plan_cache.tempfile.mkstemp", full_disk)
    monkeypatch.setattr("convoy.app.engines.cuda.trials.Path.write_text", full_disk, raising=False)
    with caplog.at_level(logging.INFO):
        model = start.load(engine="rtx")
    assert engines(model)[0][0] == RTX
    assert "No space left" in caplog.text
    assert sorted(start.compiled_by(model)) == [0, *SIZES], "once, and not again for every trial"
    assert start.kernels() == []
    assert start.load().wishes


# Several GPUs


def test_two_gpus_of_one_name_compile_once(store):
    start = Start(store, bench_of(FakeGpu("NVIDIA L4", (8, 9)), FakeGpu("NVIDIA L4", (8, 9)), tensorrt=NO_LIBRARY))
    start.build_ahead()
    model = start.load(engine="rtx")
    assert [device for _, _, device in engines(model)] == ["cuda:0", "cuda:1"]
    assert sorted(start.compiled_by(model)) == [0, *SIZES]
    assert len(start.kernels()) == 1


# Both libraries


@pytest.mark.parametrize("faster", [RTX, "tensorrt"])
def test_of_both_libraries_the_faster_serves_and_it_is_told_why_the_other_does_not(store, faster, monkeypatch):
    start = Start(store, bench_of())
    model = start.load()
    assert [wish.library for wish in model.wishes] == [RTX, "tensorrt"]
    for wish in model.wishes:
        start.bench.build(wish, start.plans)
    start.compile(model)
    close(model)
    del model
    assert not start.bench.cuda.live_device_blocks
    serves_faster(monkeypatch, {RTX: 2.0, "tensorrt": 2.0} | {faster: 1.0})
    model = start.load()
    assert engines(model) == [(faster, "fp16", "cuda:0")]
    other = "tensorrt" if faster == RTX else RTX
    assert f"{other} on cuda:0: fp16.onnx: it is not faster than {faster} in fp16" in model.skipped, model.skipped
    assert [one.variant.file for one in model.untried] == ["fp16.onnx"]
    assert start.bench.onnxruntime.opened, "at the first start"
    close(model)
    del model
    assert not start.bench.cuda.live_device_blocks


# Who captures


def captures_of(start: Start) -> list[Path]:
    return sorted(start.plans.rglob("*.captures"))


def test_who_captures_is_measured_once_and_remembered(start, monkeypatch):
    start.build_ahead()
    opened = watch_captures(monkeypatch)
    start.load(engine="rtx")
    assert sorted(set(opened)) == ["library", "own"]
    (memory,) = captures_of(start)
    memory.write_text(memory.read_text().replace('"chosen": "own"', '"chosen": "library"'))
    opened.clear()
    model = start.load()
    assert opened == ["library"]
    run_arrays(model.engines[0].engine, {"images": start.bundle.canary().inputs["images"][:3]})
    memory.write_text("{")
    opened.clear()
    start.load(engine="rtx")
    assert opened[:2] == ["own", "library"]


def watch_captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []

    class Watched(TensorRtEngine):
        def __init__(self, *args: object, **kwargs: object) -> None:
            opened.append(str(kwargs["captures"]))
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("convoy.app.engines.plans.TensorRtEngine", Watched)
    return opened


def test_what_the_library_captures_itself_is_alone_on_the_device_and_made_again_when_disturbed(start):
    start.build_ahead()
    cuda, disturbed = start.bench.machine.gpus[0].cuda, []

    def look() -> None:
        assert cuda._gate(0)._capturing is not None, "somebody may wait for the device meanwhile"
        if len(disturbed) < 2:  # who does not ask at the gate, such as another library
            disturbed.append(start.bench.cuda.cudaMalloc(1)[0])

    start.bench.rtx.while_capturing = look
    model = start.load(engine="rtx")
    assert engines(model)[0][0] == RTX
    assert disturbed == [STREAM_CAPTURE_UNSUPPORTED] * 2
    assert start.bench.cuda.broken_captures == 2
    close(model)


def test_where_nothing_can_be_captured_batches_are_enqueued(start):
    start.build_ahead()
    start.bench.rtx.can_capture = False
    model = start.load(engine="rtx")
    assert model.engines[0].engine.graphs == 0  # type: ignore[attr-defined]
    run_arrays(model.engines[0].engine, {"images": start.bundle.canary().inputs["images"][:3]})


# Precisions, names


def test_a_plan_that_answers_wrongly_or_does_not_load_does_not_serve_and_leaves_nothing(start):
    start.build_ahead()
    cold = start.load()
    job = start.job()
    start.bench.rtx.distorts = lambda array: -array
    with pytest.raises(NotProved, match="is off by"):
        prove_plan(job, cold.wishes[0])
    start.bench.rtx.distorts = lambda array: array
    start.bench.rtx.is_loadable = False
    with pytest.raises(NotProved, match="TensorRT for RTX does not load it"):
        prove_plan(job, cold.wishes[0])
    close(cold)
    del cold
    assert not start.bench.cuda.live_device_blocks


@pytest.mark.parametrize("when", ["create", "enqueue"])
def test_whatever_a_library_raises_costs_one_engine_and_is_told(start, monkeypatch, when):
    # What pytest keeps of the log has the frames, and with them what the library made.
    monkeypatch.setattr("convoy.app.loading.proving._log.exception", lambda *args: None)
    start.build_ahead()
    start.compiled_by(start.load(engine="rtx"))

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("pybind11 lost its temper")

    monkeypatch.setattr(Jit, when, broken)
    model = start.load()
    assert engines(model) == [("onnxruntime-cuda", "fp16", "cuda:0")]
    assert "tensorrt-rtx on cuda:0: fp16.onnx: RuntimeError: pybind11 lost its temper" in model.skipped
    close(model)
    del model
    assert not start.bench.cuda.live_device_blocks
