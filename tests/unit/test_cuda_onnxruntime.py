"""ONNX Runtime on a GPU: what it is asked for, what is refused, and whose graphs are replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import pytest

from app.engines.base import Blast, EngineFailure
from app.engines.cuda.engine import CudaEngine
from app.engines.onnxruntime_cuda import ConvolutionTuning
from models.errors import BundleError
from models.spec import TensorSpec
from tests.support.fake_cuda import FakeCuda, FakeGpu
from tests.support.fake_onnxruntime import NODES_ON_CPU, Fail
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


def test_no_node_may_run_on_the_cpu(bench: TwoEngines) -> None:
    asked: list[object] = []
    options = bench.onnxruntime.SessionOptions
    bench.onnxruntime.SessionOptions = lambda: asked.append(options()) or asked[-1]  # type: ignore[method-assign, assignment, misc, func-returns-value]
    bench.open_onnxruntime()
    assert [one.get_session_config_entry("session.disable_cpu_ep_fallback") for one in asked] == ["1"]  # type: ignore[attr-defined]


def test_what_the_fake_says_of_the_cpu_the_real_one_says(bench: TwoEngines) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    # The C++ session, left with no provider, as where the one that was asked for did not load.
    session = ort.capi._pybind_state.InferenceSession(options, str(bench.model), True, False)
    with pytest.raises(Exception, match="CPU") as failed:
        session.initialize_session([], [], set())
    assert str(failed.value) == NODES_ON_CPU


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
    bench.onnxruntime.refuses = refusing(kind(NODES_ON_CPU + "\n and a stack"))
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
    assert failed.value.blast is Blast.MEMORY
    bench.onnxruntime.refuses = lambda options: None
    engine = bench.ready("onnxruntime", graphs=False)
    bench.onnxruntime.spoils = refusing(Fail(text))
    with pytest.raises(EngineFailure) as failed:
        engine.run(bench.batch(2).parts)
    assert failed.value.blast is Blast.MEMORY
    bench.onnxruntime.spoils = None
    assert bench.runs_right(engine, 1)


def test_a_file_with_other_tensors_than_the_manifests_is_refused(bench: TwoEngines) -> None:
    with pytest.raises(BundleError, match="export the model again"):
        bench.open_onnxruntime(inputs=(TensorSpec("INPUT0", "FP32", (16,)), bench.inputs[1]))
    assert bench.cuda.live.total() == 0


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


def test_without_graphs_none_is_captured(bench: TwoEngines) -> None:
    engine = bench.ready("onnxruntime", graphs=False)
    assert serve(bench, engine) == [True] * 12
    assert not bench.onnxruntime.captures


def test_another_model_is_served_while_this_one_captures(bench: TwoEngines) -> None:
    serving = bench.ready("tensorrt")
    right: list[bool] = []
    bench.onnxruntime.while_capturing = lambda: right.extend(serve(bench, serving, threads=1))
    loading = bench.ready("onnxruntime")
    assert len(right) == 4 * 2 * len(bench.sizes)
    assert all(right)
    assert serve(bench, loading) == [True] * 12


def test_its_thread_ends_with_it(bench: TwoEngines) -> None:
    before = set(threading.enumerate())
    engine = bench.ready("onnxruntime")
    (thread,) = set(threading.enumerate()) - before
    engine.close()
    assert not thread.is_alive()
