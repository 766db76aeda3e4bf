"""TensorRT plans: which are refused, what is captured, and what is shared, in both versions of the library."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from convoy.app.engines import tensorrt
from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec
from tests.support.fake_tensorrt import VERSIONS
from tests.support.gpu_bench import TwoEngines


@pytest.fixture
def bench(tmp_path: Path) -> TwoEngines:
    return TwoEngines(tmp_path)


# Both versions


@pytest.mark.parametrize("version", VERSIONS)
def test_both_versions_run_plans_with_a_graph_for_each_slot_and_size(tmp_path: Path, version: str) -> None:
    bench = TwoEngines(tmp_path, version=version)
    engine = bench.open_tensorrt()
    assert engine.graphs == 0
    engine.warm_up()
    assert engine.graphs == 2 * len(bench.sizes)
    assert engine.info.library.startswith("tensorrt 1")
    for samples in range(1, 9):
        assert bench.runs_right(engine, samples)
    engine.close()
    assert bench.cuda.live.total() == 0


# Graphs


@pytest.mark.parametrize("says_so", [True, False])
def test_where_capture_fails_every_run_is_enqueued_and_the_reason_is_told(
    bench: TwoEngines, says_so: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "convoy")
    bench.tensorrt.complaint = "a plugin synchronises"
    bench.tensorrt.can_capture, bench.tensorrt.refuses_while_capturing = says_so, says_so
    engine = bench.ready("tensorrt")
    assert engine.graphs == 0
    assert bench.cuda.live["graph"] == 0
    for samples in (1, 3, 8, 2):
        assert bench.runs_right(engine, samples, seed=samples)
    reason = "a plugin synchronises" if says_so else "cudaStreamEndCapture: operation failed"
    assert all(f"no CUDA graph for batch size {size} (" in caplog.text for size in bench.sizes)
    assert reason in caplog.text


def test_a_device_that_is_lost_in_a_capture_is_no_matter_of_graphs(bench: TwoEngines) -> None:
    bench.cuda.fail("cudaStreamEndCapture", 700)
    with pytest.raises(EngineFailure, match="illegal memory access") as failed:
        bench.ready("tensorrt")
    assert failed.value.scope is FailureScope.DEVICE


# Plans that are refused


def test_a_plan_that_does_not_load_says_why_and_that_it_is_built_anew(bench: TwoEngines) -> None:
    bench.tensorrt.is_loadable = False
    bench.tensorrt.complaint = "The engine plan file is generated on an incompatible device"
    with pytest.raises(BundleError, match=r"model\.plan: TensorRT does not load it \(The engine .* to build it again"):
        bench.open_tensorrt()
    assert bench.cuda.live.total() == 0


def test_a_plan_for_which_there_is_no_memory_is_not_to_blame(bench: TwoEngines) -> None:
    bench.cuda.fail("cudaMalloc", 0)
    bench.tensorrt.is_loadable = False
    bench.tensorrt.complaint = "Requested amount of GPU memory could not be allocated"
    with pytest.raises(EngineFailure, match="free memory on the GPU") as failed:
        bench.open_tensorrt()
    assert failed.value.scope is FailureScope.MEMORY


def test_a_context_that_cannot_be_made_is_a_want_of_memory(bench: TwoEngines) -> None:
    bench.tensorrt.contexts = 3
    engine = bench.open_tensorrt()
    with pytest.raises(EngineFailure, match="no execution context: the plan is damaged") as failed:
        engine.warm_up()
    assert failed.value.scope is FailureScope.MEMORY
    engine.close()
    assert bench.cuda.live.total() == 0


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        ({"dtypes": {"INPUT1": "FLOAT"}}, "INPUT1"),
        ({"dtypes": {"OUTPUT0": "INT64"}}, "OUTPUT0"),
        ({"shapes": {"OUTPUT1": (-1, 1000)}}, "OUTPUT1"),
        ({"shapes": {"INPUT0": (-1, 16, 1)}}, "INPUT0"),
        ({"shapes": {"INPUT0": (16,)}}, "INPUT0"),
    ],
)
def test_a_plan_with_other_tensors_is_refused_by_name(
    bench: TwoEngines, change: dict[str, object], tensor: str
) -> None:
    for name, value in change.items():
        setattr(bench.tensorrt, name, value)
    with pytest.raises(BundleError, match=f"tensor '{tensor}' does not match the manifest; remove it"):
        bench.open_tensorrt()
    assert bench.cuda.live.total() == 0


@pytest.mark.parametrize("shape", [(1, -1), (1, 8), (1, 16, 1), (2, 16)])
def test_an_output_that_would_not_fill_its_place_is_never_run(bench: TwoEngines, shape: tuple[int, ...]) -> None:
    """What only the run tells is shorter for some input, and behind it lies the answer of the batch before."""
    bench.tensorrt.run_shapes = {"OUTPUT1": shape}
    engine = bench.open_tensorrt()
    with pytest.raises(EngineFailure, match=r"'OUTPUT1' has the shape .* declares \[1, 16\]") as failed:
        engine.warm_up()
    assert failed.value.scope is FailureScope.ENGINE
    engine.close()


@pytest.mark.parametrize(("inputs", "tensor"), [(["INPUT0"], "INPUT1"), (["INPUT0", "INPUT1", "MASK"], "MASK")])
def test_a_plan_with_more_or_fewer_tensors_is_refused_by_name(
    bench: TwoEngines, inputs: list[str], tensor: str
) -> None:
    with pytest.raises(BundleError, match=f"tensor '{tensor}' does not match the manifest"):
        bench.open_tensorrt(inputs=tuple(TensorSpec(name, "INT32", (16,)) for name in inputs))


def test_a_plan_without_a_profile_for_each_size_is_refused(bench: TwoEngines) -> None:
    bench.tensorrt.profiles = 1
    with pytest.raises(BundleError, match="has no profile for some batch sizes"):
        bench.open_tensorrt()


def test_what_tensorrt_has_no_type_or_place_for_is_known_beforehand() -> None:
    assert tensorrt.supports((TensorSpec("x", "UINT8", (3, 8, 8)), TensorSpec("y", "FP16", ())))
    assert not tensorrt.supports((TensorSpec("x", "FP64", (3,)),))
    assert not tensorrt.supports((TensorSpec("x", "BYTES", (1,)),))
    assert not tensorrt.supports((TensorSpec("x", "FP32", (-1,)),))


@pytest.mark.parametrize(("size", "fits"), [(1, True), (-1, True), (2, False)])
def test_a_plan_of_one_size_may_say_so(tmp_path: Path, size: int, fits: bool) -> None:
    bench = TwoEngines(tmp_path, max_batch_size=1)
    bench.tensorrt.shapes = dict.fromkeys(("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1"), (size, 16))
    if fits:
        assert bench.runs_right(bench.ready("tensorrt"), 1)
        return
    with pytest.raises(BundleError, match="does not match the manifest"):
        bench.open_tensorrt()


# Memory


@pytest.mark.parametrize(("largest", "sizes"), [(8, (1, 2, 4, 8)), (4, (1, 2, 4)), (3, (1, 2, 4)), (1, (1,))])
def test_of_a_plan_for_larger_batches_only_what_is_needed_is_used(
    bench: TwoEngines, largest: int, sizes: tuple[int, ...]
) -> None:
    engine = bench.ready("tensorrt", max_batch_size=largest, scratch_bytes=(100, 200, 400, 9000))
    assert engine.info.batch_sizes == sizes
    assert {size for _, size in bench.tensorrt.scratch_blocks} == {(100, 200, 400, 9000)[len(sizes) - 1]}
    assert bench.runs_right(engine, largest)


def test_contexts_go_before_their_engine_and_the_engine_before_its_runtime(bench: TwoEngines) -> None:
    bench.ready("tensorrt").close()
    assert bench.tensorrt.destroyed == ["context"] * 8 + ["engine", "runtime"]
