"""Which engine serves on a GPU, and what is said of the others: TensorRT, ONNX Runtime on CUDA, the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.app.engines.base import Engine, run_arrays
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cpu import has_int8_dot_product
from convoy.app.engines.machine import Machine
from convoy.app.engines.measure import Rounds
from convoy.app.loading.load import LoadedModel, LoadOptions, ServedBefore, load
from convoy.app.loading.proving import race
from convoy.models.bundle import MANIFEST, read_manifest, seal
from convoy.models.errors import BundleError
from convoy.models.store import DEMO_STORE, Store
from tests.support import onnx_models
from tests.support.fake_cuda import DEVICES_UNAVAILABLE, OUT_OF_MEMORY, UNKNOWN_ERROR, FakeGpu
from tests.support.fake_onnxruntime import FakeSession
from tests.support.gpu_machine import GpuBench


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The digits, with FP16 and INT8 files for GPUs that may serve."""
    folder = tmp_path / "store" / "digits" / "1"
    shutil.copytree(DEMO_STORE / "digits" / "1", folder)
    manifest = read_manifest(folder)
    assert {"fp16.onnx", "int8-trt.onnx"} <= {variant.file for variant in manifest.variants}
    variants = tuple(replace(variant, serve=True) for variant in manifest.variants)
    (folder / MANIFEST).write_bytes(seal(replace(manifest, variants=variants)))
    return tmp_path / "store"


@pytest.fixture
def bench() -> GpuBench:
    return GpuBench.of(FakeGpu("Fake H200"))


def options(bench: GpuBench, tmp_path: Path, **given: object) -> LoadOptions:
    base = LoadOptions("auto", threads=1, max_batch=4, machine=bench.machine, plan_cache=tmp_path / "plans")
    return replace(base, **given)  # type: ignore[arg-type]


def loaded(store: Path, options: LoadOptions) -> LoadedModel:
    return load(Store(store).versions("digits")[0], options)


def engines(model: LoadedModel) -> list[tuple[str, str, str]]:
    infos = [proved.engine.info for proved in model.engines]
    return [(info.engine, info.precision, info.device) for info in infos]


def test_without_a_plan_the_fallback_serves_at_once_and_the_plans_are_wished_for(store, bench, tmp_path):
    model = loaded(store, options(bench, tmp_path))
    assert engines(model) == [("onnxruntime-cuda", "fp16", "cuda:0")]
    assert [wish.variant.file for wish in model.wishes] == ["fp16.onnx", "int8-trt.onnx", "fp8.onnx"]
    assert any("no plan for compute capability 9.0 (Fake H200) and TensorRT" in reason for reason in model.skipped), (
        model.skipped
    )


def test_a_plan_whose_bytes_changed_is_not_loaded_and_says_so(store, bench, tmp_path):
    bench.build(loaded(store, options(bench, tmp_path)).wishes[0], tmp_path / "plans")
    (plan,) = (tmp_path / "plans").rglob("*.plan")
    plan.write_bytes(plan.read_bytes().replace(b"4096", b"4097"))
    model = loaded(store, options(bench, tmp_path))
    assert engines(model) == [("onnxruntime-cuda", "fp16", "cuda:0")]
    assert any("does not match the sha256" in reason for reason in model.skipped)
    assert [wish.variant.file for wish in model.wishes] == ["fp16.onnx", "int8-trt.onnx", "fp8.onnx"]


@pytest.mark.parametrize(("int8_ns", "precision"), [(1e6, "int8"), (4e6, "fp16")])
def test_int8_serves_only_where_it_is_faster(store, bench, tmp_path, int8_ns, precision, monkeypatch):
    for wish in loaded(store, options(bench, tmp_path)).wishes:
        bench.build(wish, tmp_path / "plans")
    took_ms = {"fp16": 3.0, "int8": int8_ns / 1e6, "fp8": 3.0}
    monkeypatch.setattr("convoy.app.engines.measure.Probe.run_ms", lambda probe: took_ms[probe.engine.info.precision])
    assert engines(loaded(store, options(bench, tmp_path))) == [("tensorrt", precision, "cuda:0")]


def test_without_a_driver_the_cpu_serves_and_an_engine_that_was_asked_for_fails_clearly(store):
    machine = Machine(no_gpu="no usable NVIDIA driver: error 35")
    model = loaded(store, LoadOptions("auto", 1, 4, machine=machine))
    assert engines(model)[0][::2] == ("onnxruntime-cpu", "cpu")
    for engine in ("tensorrt", "onnxruntime-cuda"):
        assert f"{engine}: no usable NVIDIA driver: error 35" in model.skipped
    for engine in ("tensorrt", "cuda"):
        with pytest.raises(BundleError, match=f"--engine {engine}: no usable NVIDIA driver: error 35"):
            loaded(store, LoadOptions("auto", 1, 4, engine=engine, machine=machine))


def test_tensorrt_by_name_wants_a_plan_and_cuda_by_name_looks_for_none(store, bench, tmp_path):
    with pytest.raises(
        BundleError, match=r"no plan for compute capability 9\.0.*--engine auto serves while it builds the plan"
    ):
        loaded(store, options(bench, tmp_path, engine="tensorrt"))
    bench.build(loaded(store, options(bench, tmp_path)).wishes[0], tmp_path / "plans")
    model = loaded(store, options(bench, tmp_path, engine="cuda"))
    assert engines(model) == [("onnxruntime-cuda", "fp16", "cuda:0")]
    assert model.wishes == ()


def test_a_device_without_room_hands_the_model_to_the_cpu_and_keeps_nothing(store, tmp_path):
    bench = GpuBench.of(FakeGpu(total_bytes=200 << 20))
    model = loaded(store, options(bench, tmp_path))
    assert engines(model)[0][0] == "onnxruntime-cpu"
    assert any("MiB must stay free" in reason for reason in model.skipped)
    assert bench.cuda.live_device_blocks == 0


def test_every_gpu_gets_an_engine(store, tmp_path):
    bench = GpuBench.of(FakeGpu("Fake H200"), FakeGpu("Fake H200"))
    model = loaded(store, options(bench, tmp_path))
    assert [device for _, _, device in engines(model)] == ["cuda:0", "cuda:1"]
    bench.build(model.wishes[0], tmp_path / "plans")
    assert [engine for engine, _, _ in engines(loaded(store, options(bench, tmp_path)))] == ["tensorrt"] * 2


def test_a_precision_by_name_is_that_file_and_int8_never_runs_in_onnxruntime_on_a_gpu(store, bench, tmp_path):
    model = loaded(store, options(bench, tmp_path, precision="fp32"))
    assert engines(model) == [("onnxruntime-cuda", "fp32", "cuda:0")]
    # Made on a processor with 8-bit dot products; one without adds in 16 bits, which overflow, and the canary says so.
    wrong_here = pytest.raises(BundleError, match=r"int8-cpu\.onnx: output 'logits' is off by")
    with nullcontext() if has_int8_dot_product() else wrong_here:
        model = loaded(store, options(bench, tmp_path, precision="int8"))
        assert engines(model)[0][0] == "onnxruntime-cpu"
    with pytest.raises(BundleError, match="there is no int8 variant"):
        loaded(store, options(bench, tmp_path, precision="int8", engine="cuda"))
    bench.onnxruntime.loads = False
    with pytest.raises(BundleError, match=r"no fp16 variant for the CPU.*onnxruntime-cuda on cuda:0.*did not load"):
        loaded(store, options(bench, tmp_path, precision="fp16"))


# The first calls on a device, and those that opening an engine begins with.
FIRST_CALLS = (
    *("cudaGetDeviceProperties", "cudaDeviceGetPCIBusId", "cudaSetDevice", "cudaThreadExchangeStreamCaptureMode"),
    *("cudaDeviceSynchronize", "cudaMemGetInfo", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags"),
    *("cudaMalloc", "cudaHostAlloc", "cudaMemsetAsync", "cudaStreamSynchronize", "cudaMemcpyAsync", "cudaEventRecord"),
    *("cudaEventSynchronize", "cudaEventElapsedTime", "cudaDriverGetVersion"),
)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        *zip(FIRST_CALLS, cycle((DEVICES_UNAVAILABLE, OUT_OF_MEMORY, UNKNOWN_ERROR)), strict=False),
        *(("cudaSetDevice", status) for status in (OUT_OF_MEMORY, DEVICES_UNAVAILABLE)),
    ],
)
def test_a_gpu_that_never_worked_is_left_out_with_a_reason_and_the_next_device_serves(
    store, tmp_path, call, status, caplog
):
    broken = {call: status}
    bench = GpuBench.of(FakeGpu("Bad", broken=broken), FakeGpu("Fake H200"))
    model = loaded(store, options(bench, tmp_path))
    is_bad = call != "cudaDriverGetVersion"  # which no engine here needs
    assert [device for _, _, device in engines(model)] == ["cuda:1"] if is_bad else ["cuda:0", "cuda:1"]
    if is_bad:
        assert [why for why in model.skipped if "cuda:0: " in why and f"(CUDA error {status})" in why], model.skipped
    if call == "cudaSetDevice":
        assert any("cuda:0 is not used" in record.getMessage() for record in caplog.records)

    alone = GpuBench.of(FakeGpu("Fake H200"))
    alone.cuda.gpus[0].broken.update(broken)
    model = loaded(store, options(alone, tmp_path))
    if call not in ("cudaDriverGetVersion", "cudaGetDeviceProperties", "cudaDeviceGetPCIBusId"):
        assert engines(model)[0][2] == "cpu"
        assert any("cuda:0" in why and f"(CUDA error {status})" in why for why in model.skipped), model.skipped


def test_a_gpu_that_was_held_by_another_process_serves_the_next_model(store, bench, tmp_path):
    bench.cuda.gpus[0].broken["cudaSetDevice"] = DEVICES_UNAVAILABLE
    assert engines(loaded(store, options(bench, tmp_path)))[0][2] == "cpu"
    bench.cuda.gpus[0].broken.clear()
    assert engines(loaded(store, options(bench, tmp_path)))[0][2] == "cuda:0"


def test_a_gpu_that_breaks_while_the_first_engine_is_opened_is_left_out_for_good(store, tmp_path):
    bench = GpuBench.of(FakeGpu("Fake H200"), FakeGpu("Bad"))

    def break_second(options: Mapping[str, str]) -> None:
        if options["device_id"] == "1":
            bench.cuda.gpus[1].broken |= dict.fromkeys(("cudaStreamSynchronize", "cudaDeviceSynchronize"), 700)

    bench.onnxruntime.refuses = break_second
    for _ in range(2):
        model = loaded(store, options(bench, tmp_path))
        assert [device for _, _, device in engines(model)] == ["cuda:0"]
        assert any("cuda:1" in why and "illegal memory access" in why for why in model.skipped)
        for proved in model.engines:
            proved.engine.close()
        bench.cuda.gpus[1].broken.clear()  # these bindings may have a new context, but the libraries do not know it
    assert bench.machine.gpus[1].lost


@pytest.mark.parametrize("bug_in", ["choose", "_Walk._leave_for_later", "_Walk._prove", "LoadedModel"])
def test_whatever_ends_a_load_nothing_that_was_opened_stays_open(store, tmp_path, monkeypatch, bug_in):
    bench = GpuBench.of(FakeGpu("Fake H200"), FakeGpu("Fake H200"))
    serving = loaded(store, options(bench, tmp_path))
    bench.machine.gpus[1].has_served = True
    for proved in serving.engines:
        proved.engine.close()
    before = bench.cuda.live
    bench.machine.gpus[1].lost = "it fell off the bus"
    with pytest.raises(BundleError, match=r"cuda:1 can no longer be used by this process \(it fell off"):
        loaded(store, options(bench, tmp_path))
    assert bench.cuda.live == before

    bench.machine.gpus[1].lost = ""

    class Confused(BaseException):
        """Whatever ends a thread."""

    def confused(*given: object, **named: object) -> None:
        raise Confused

    monkeypatch.setattr(f"convoy.app.loading.load.{bug_in}", confused)
    with pytest.raises(Confused):
        loaded(store, options(bench, tmp_path))
    assert bench.cuda.live == before


def test_where_a_plan_is_to_come_a_model_that_cannot_be_captured_serves_in_a_session_for_each_size(
    store, bench, tmp_path
):
    def refuse() -> None:
        raise RuntimeError("a node synchronises")

    bench.onnxruntime.while_capturing = refuse
    model = loaded(store, options(bench, tmp_path))
    assert engines(model) == [("onnxruntime-cuda", "fp16", "cuda:0")]
    assert [way["enable_cuda_graph"] for way in bench.onnxruntime.opened] == ["1", "0", "0", "0"]
    assert [one.variant.file for one in model.untried] == ["fp16.onnx"]
    builds = bench.onnxruntime.plan_builds
    images = np.zeros((4, 8, 8, 1), np.uint8)
    for samples in (1, 4, 2, 1, 4):
        run_arrays(model.engines[0].engine, {"images": images[:samples]})
    assert bench.onnxruntime.plan_builds == builds


def test_where_a_plan_is_to_come_a_model_whose_graph_answers_wrongly_is_served_without_graphs(
    store, bench, tmp_path, monkeypatch
):
    compute = FakeSession._compute

    def wrong_in_graphs(session: FakeSession, binding: Any) -> None:
        compute(session, binding)
        if session.options["enable_cuda_graph"] == "1":
            for bound in binding.outputs.values():
                bound.array(bench.cuda)[...] *= -1

    monkeypatch.setattr(FakeSession, "_compute", wrong_in_graphs)
    model = loaded(store, options(bench, tmp_path))
    assert engines(model) == [("onnxruntime-cuda", "fp16", "cuda:0")]
    assert [way["enable_cuda_graph"] for way in bench.onnxruntime.opened] == ["1", "0", "0", "0"]
    assert [one.variant.file for one in model.untried] == ["fp16.onnx"]


def test_a_bare_model_in_half_precision_keeps_its_tensor_cores_and_one_of_free_sizes_the_cpu(bench, tmp_path):
    for name, write in (("half", onnx_models.halved), ("full", onnx_models.add_sub)):
        write(tmp_path / "store" / name / "1" / "model.onnx")
        model = load(Store(tmp_path / "store").versions(name)[0], options(bench, tmp_path))
        assert [engine for engine, _, _ in engines(model)] == ["onnxruntime-cuda"]
        assert bench.onnxruntime.opened[-1].get("use_tf32") == ("0" if name == "full" else None)
    onnx_models.mean(tmp_path / "store" / "mean" / "1" / "model.onnx")
    model = load(Store(tmp_path / "store").versions("mean")[0], options(bench, tmp_path))
    assert [engine for engine, _, _ in engines(model)] == ["onnxruntime-cpu"]
    assert any("no fixed size" in reason for reason in model.skipped)


@pytest.fixture
def shift(tmp_path: Path) -> Path:
    """A bare model that adds one."""
    onnx_models.shift(tmp_path / "bare" / "shift" / "1" / "model.onnx", 1.0)
    return tmp_path / "bare"


def loaded_shift(store: Path, options: LoadOptions) -> LoadedModel:
    return load(Store(store).versions("shift")[0], options)


def test_a_bare_model_that_a_gpu_answers_otherwise_than_the_cpu_is_not_served_from_there(shift, bench, tmp_path):
    def disturb(arrays: Mapping[str, np.ndarray]) -> None:
        for array in arrays.values():
            array *= 1.5  # always the same, so that no engine ever contradicts itself

    bench.onnxruntime.spoils = disturb
    model = loaded_shift(shift, options(bench, tmp_path))
    assert engines(model) == [("onnxruntime-cpu", "fp32", "cpu")]
    assert any("cuda:0" in reason and "its output differs from the CPU's" in reason for reason in model.skipped)
    assert not bench.cuda.live_device_blocks
    with pytest.raises(BundleError, match=r"--engine cuda cannot serve it .*its output differs from the CPU's"):
        loaded_shift(shift, options(bench, tmp_path, engine="cuda"))


def test_a_bare_model_that_fails_on_one_gpu_is_served_by_the_other(shift, tmp_path, monkeypatch):
    bench = GpuBench.of(FakeGpu("Fake H200"), FakeGpu("Fake H200"))

    def measured(engines: list[Engine]) -> list[Rounds]:
        if engines[0].info.device == "cuda:0":
            raise EngineFailure("it fell over")
        return race(engines)

    monkeypatch.setattr("convoy.app.loading.proving.race", measured)
    model = loaded_shift(shift, options(bench, tmp_path))
    assert engines(model) == [("onnxruntime-cuda", "fp32", "cuda:1")]
    assert any("cuda:0" in reason and "it fell over" in reason for reason in model.skipped)


def test_a_bare_model_says_why_tensorrt_does_not_serve_it(shift, bench, tmp_path):
    assert any("tensorrt: a bare model" in why for why in loaded_shift(shift, options(bench, tmp_path)).skipped)
    with pytest.raises(BundleError, match=r"--engine tensorrt cannot serve it .*a bare model.*export it as a bundle"):
        loaded_shift(shift, options(bench, tmp_path, engine="tensorrt"))


def test_what_serves_for_good_is_tuned_first_and_that_is_remembered(store, bench, tmp_path):
    bench.onnxruntime.takes_ns = lambda samples, way: 1e6 if way["cudnn_conv_algo_search"] == "EXHAUSTIVE" else 2e6
    assert loaded(store, options(bench, tmp_path, engine="cuda")).untried == ()
    trials = len(bench.onnxruntime.opened)
    assert trials > 4
    model = loaded(store, options(bench, tmp_path))  # with a plan to come, but there is nothing to wait for
    assert model.untried == ()
    assert [way["cudnn_conv_algo_search"] for way in bench.onnxruntime.opened[trials:]] == ["EXHAUSTIVE"]


def test_what_served_from_a_gpu_before_serves_alone_again_and_what_is_missing_is_still_wished_for(
    store, bench, tmp_path, monkeypatch
):
    for wish in loaded(store, options(bench, tmp_path)).wishes[:2]:
        bench.build(wish, tmp_path / "plans")
    took_ms = {"fp16": 3.0, "int8": 1.0}
    monkeypatch.setattr("convoy.app.engines.measure.Probe.run_ms", lambda probe: took_ms[probe.engine.info.precision])
    before = ServedBefore("cuda:0", "tensorrt", "fp16.onnx")
    again = loaded(store, options(bench, tmp_path, before=(before,)))
    assert engines(again) == [("tensorrt", "fp16", "cuda:0")]
    best = loaded(store, options(bench, tmp_path))
    assert engines(best) == [("tensorrt", "int8", "cuda:0")]
    assert [wish.variant.file for wish in again.wishes] == [wish.variant.file for wish in best.wishes] == ["fp8.onnx"]
    assert again.untried == best.untried
