"""ONNX Runtime on a GPU: what it is asked for, what is refused, and whose graphs are replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from convoy.app.engines.base import run_arrays
from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.cuda.engine import CudaEngine
from convoy.app.engines.onnxruntime_cuda import ConvolutionTuning
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec
from tests.support import fake_onnxruntime, onnx_models
from tests.support.fake_cuda import FakeCuda, FakeGpu
from tests.support.fake_onnxruntime import NODES_ON_CPU, PROVIDERS, Fail, placement
from tests.support.gpu_bench import TwoEngines


@pytest.fixture
def bench(tmp_path: Path) -> TwoEngines:
    return TwoEngines(tmp_path)


def refusing(error: Exception) -> Callable[[object], None]:
    def refuse(options: object) -> None:
        raise error

    return refuse


# Opening


def test_the_provider_is_asked_for_what_was_promised(bench: TwoEngines) -> None:
    engine = bench.open_onnxruntime(tuning=ConvolutionTuning("EXHAUSTIVE", nhwc=False, graphs=True))
    (options,) = bench.onnxruntime.opened
    assert int(options["user_compute_stream"]) == int(engine._computing)
    assert options["device_id"] == "0"
    assert options["cudnn_conv_algo_search"] == "EXHAUSTIVE"
    assert options["prefer_nhwc"] == "0"
    assert options["enable_cuda_graph"] == "1"
    assert options["use_tf32"] == "0"
    assert options["arena_extend_strategy"] == "kSameAsRequested"
    (session,) = bench.onnxruntime.sessions
    assert not session.can_fall_back


@pytest.mark.parametrize(("precision", "ns"), [("fp16", 1e6), ("fp32", 8e6)])
def test_only_full_precision_gives_up_tensor_cores(bench: TwoEngines, precision: str, ns: float) -> None:
    bench.onnxruntime.takes_ns, bench.onnxruntime.without_tensor_cores = lambda samples, options: 1e6, 8.0
    engine = bench.ready("onnxruntime", precision=precision)
    assert engine.run(bench.batch(2).parts).times.compute_ns == pytest.approx(ns)


# Where nodes run


@pytest.fixture
def resizing(bench: TwoEngines) -> TwoEngines:
    """A network that asks for its own size while it runs, as an upsampling to the size of another map does."""
    onnx_models.resized(bench.model)
    bench.inputs, bench.outputs = (TensorSpec("x", "FP32", (3, 4, 4)),), (TensorSpec("y", "FP32", (3, 8, 8)),)
    return bench


@pytest.mark.parametrize("graphs", [True, False])
def test_what_computes_with_sizes_may_be_on_the_cpu(resizing: TwoEngines, graphs: bool) -> None:
    placed = placement(str(resizing.model), frozenset())
    assert {node.op_type for provider, node in placed if provider != PROVIDERS[0]} == {"Shape", "Slice", "Concat"}
    images = np.random.default_rng(0).random((3, 3, 4, 4), np.float32)
    engine = resizing.ready("onnxruntime", graphs=graphs)
    assert np.array_equal(run_arrays(engine, {"x": images})["y"], images.repeat(2, axis=2).repeat(2, axis=3))


def test_a_node_that_sees_the_clients_values_may_not(resizing: TwoEngines) -> None:
    resizing.onnxruntime.lacking = frozenset({"Resize"})
    with pytest.raises(BundleError, match=r"node 'resize' \(Resize\) would run on CPUExecutionProvider.*--engine cpu"):
        resizing.open_onnxruntime(graphs=False)
    with pytest.raises(BundleError, match="all compute graph nodes have not been partitioned"):
        resizing.open_onnxruntime(graphs=True)
    assert resizing.cuda.live.total() == 0


def test_of_nodes_without_a_name_every_one_of_their_kind_must_be_harmless(resizing: TwoEngines) -> None:
    onnx_models.resized(resizing.model, named=False)
    assert resizing.ready("onnxruntime", graphs=False)
    resizing.onnxruntime.lacking = frozenset({"Resize"})
    with pytest.raises(BundleError, match=r"a node \(Resize\) would run on"):
        resizing.open_onnxruntime(graphs=False)


@pytest.mark.parametrize(("op_type", "may"), [("Gather", True), ("Conv", False)])
def test_of_nodes_that_onnxruntime_adds_only_what_arranges_is_taken_for_sizes(
    bench: TwoEngines, monkeypatch: pytest.MonkeyPatch, op_type: str, may: bool
) -> None:
    added = SimpleNamespace(name=f"{op_type}_token_7", domain="", op_type=op_type)
    monkeypatch.setattr(fake_onnxruntime, "placement", lambda path, lacking: [(PROVIDERS[1], added)])
    if may:
        bench.open_onnxruntime()
        return
    with pytest.raises(BundleError, match=r"node 'Conv_token_7' \(Conv\) would run on"):
        bench.open_onnxruntime()


# Plans, which a convolution keeps for one batch size


def alternate(bench: TwoEngines, engine: CudaEngine) -> int:
    """How many plans are made while batches of all sizes follow each other."""
    before = bench.onnxruntime.plan_builds
    assert all(bench.runs_right(engine, samples, seed=samples) for samples in (1, 8, 3, 1, 2, 8) * 3)
    return bench.onnxruntime.plan_builds - before


@pytest.mark.parametrize("graphs", [True, False])
def test_no_batch_waits_for_plans_when_the_size_changes(bench: TwoEngines, graphs: bool) -> None:
    assert alternate(bench, bench.ready("onnxruntime", graphs=graphs)) == 0


@pytest.mark.parametrize(("copies", "sizes"), [(1, (8,)), (2, (1, 8)), (3, (1, 4, 8)), (4, (1, 2, 4, 8))])
def test_without_graphs_and_room_for_a_session_each_fewer_sizes_are_run(
    tmp_path: Path, copies: int, sizes: tuple[int, ...]
) -> None:
    bench = TwoEngines(tmp_path)
    with bench.model.with_name("model.onnx.data").open("wb") as file:
        file.truncate(10 << 20)
    bench.cuda.gpus[0].total_bytes = (256 << 20) + (2 * copies + 1) * (10 << 20) + (1 << 20)
    engine = bench.ready("onnxruntime", graphs=False)
    assert engine.info.batch_sizes == sizes
    assert alternate(bench, engine) == 0


def test_its_memory_is_limited_to_what_is_free_for_it(tmp_path: Path) -> None:
    bench = TwoEngines(tmp_path, FakeCuda(FakeGpu(total_bytes=4 << 30, used_bytes=1 << 30)))
    bench.open_onnxruntime()
    assert int(bench.onnxruntime.opened[0]["gpu_mem_limit"]) == (3 << 30) - (256 << 20)


def test_a_build_without_the_provider_says_what_to_install(bench: TwoEngines) -> None:
    bench.onnxruntime.providers = ("CPUExecutionProvider",)
    with pytest.raises(BundleError, match=r"no CUDAExecutionProvider; install onnxruntime-gpu\[cuda,cudnn\]"):
        bench.open_onnxruntime()
    assert bench.cuda.live.total() == 0


def test_a_provider_whose_libraries_are_missing_does_not_serve_from_the_cpu(bench: TwoEngines) -> None:
    bench.onnxruntime.loads = False
    with pytest.raises(BundleError, match=r"did not load; its libraries come with onnxruntime-gpu\[cuda,cudnn\]"):
        bench.open_onnxruntime()
    assert bench.cuda.live.total() == 0


@pytest.mark.parametrize("kind", [RuntimeError, Fail])
def test_a_file_that_would_run_on_the_cpu_in_part_is_refused_with_onnxruntimes_own_reason(
    bench: TwoEngines, kind: type[Exception]
) -> None:
    bench.onnxruntime.refuses = refusing(kind(f"{NODES_ON_CPU}\nStacktrace:\n  #0 in the library"))
    with pytest.raises(BundleError) as failed:
        bench.open_onnxruntime()
    assert str(failed.value).endswith(f"ONNX Runtime cannot run it on the GPU ({NODES_ON_CPU})")
    assert bench.cuda.live.total() == 0


@pytest.mark.parametrize(
    "text",
    [
        "CUDA failure 2: out of memory ; GPU=0 ; hostname=a ; expr=cudaMalloc((void**)&p, size);",
        "bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) Available memory of 1",
        "Failed to allocate memory for requested buffer of size 9",
        "CUDNN failure 4: CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0",
    ],
)
def test_whatever_it_calls_a_want_of_memory_is_one(bench: TwoEngines, text: str) -> None:
    bench.onnxruntime.refuses = refusing(RuntimeError(text))
    with pytest.raises(EngineFailure, match=r"model\.onnx: ") as failed:
        bench.open_onnxruntime()
    assert failed.value.scope is FailureScope.MEMORY
    bench.onnxruntime.refuses = lambda options: None
    engine = bench.ready("onnxruntime", graphs=False)
    bench.onnxruntime.spoils = refusing(Fail(text))
    with pytest.raises(EngineFailure) as failed:
        engine.run(bench.batch(2).parts)
    assert failed.value.scope is FailureScope.MEMORY
    bench.onnxruntime.spoils = None
    assert bench.runs_right(engine, 1)


def test_weights_beside_the_file_are_counted(bench: TwoEngines) -> None:
    bench.cuda.gpus[0].total_bytes = 300 << 20
    weights = bench.model.with_name("model.onnx.data")
    with weights.open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(EngineFailure, match=r"model\.onnx needs 100 MiB"):
        bench.open_onnxruntime()
    weights.unlink()
    bench.open_onnxruntime()


# Graphs, which the provider keeps by thread and captures for the whole process


def serve(bench: TwoEngines, engine: CudaEngine, threads: int = 3) -> list[bool]:
    right: list[bool] = []

    def lane(seed: int) -> None:
        right.extend(bench.runs_right(engine, *samples, seed=seed) for samples in [(1,), (2,), (3, 1), (8,)])

    workers = [threading.Thread(target=lane, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return right


def test_every_graph_is_captured_in_the_warm_up_and_replayed_for_whoever_asks(bench: TwoEngines) -> None:
    engine = bench.ready("onnxruntime")
    captured = dict(bench.onnxruntime.captures)
    assert len(captured) == 2 * len(bench.sizes)
    assert set(captured.values()) == {1}
    assert len({thread for thread, _ in captured}) == 1
    # -1 means no graph at all, 0 what is captured without an id.
    assert not {"-1", "0", ""} & {graph_id for _, graph_id in captured}
    for _ in range(4):  # enough of them to be captured on the lanes' threads, if they ran there
        assert serve(bench, engine) == [True] * 12
    assert bench.onnxruntime.captures == captured


def test_a_capture_that_is_disturbed_is_made_again(bench: TwoEngines) -> None:
    disturbed = []

    def disturb() -> None:
        if len(disturbed) < 2:
            disturbed.append(1)
            thread = threading.Thread(target=bench.cuda.cudaDeviceSynchronize)
            thread.start()
            thread.join()

    bench.onnxruntime.while_capturing = disturb
    engine = bench.ready("onnxruntime")
    assert len(bench.onnxruntime.captures) == 2 * len(bench.sizes)
    assert serve(bench, engine) == [True] * 12
