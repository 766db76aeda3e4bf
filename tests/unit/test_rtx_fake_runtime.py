"""The fake runtime of TensorRT for RTX: one profile for many sizes, kernels that are compiled here, and their cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import onnx_models
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_tensorrt import RTX
from tests.support.rtx_run import EVERY_SIZE
from tests.support.tensorrt_run import Runs, make_plan

WIDTH = 16
SCRATCH_BYTES = 1000


class Rtx:
    """One start of the library with a plan of add_sub, as an engine would use it."""

    def __init__(self, folder: Path, *, dynamic: bool = True) -> None:
        self.runs = Runs(FakeCuda(), RTX)
        self.trt = self.runs.module()
        self.logger = self._logger()
        model = onnx_models.add_sub(folder / "model.onnx", ("batch", WIDTH))
        sizes = (1, 2, 8)
        plan = make_plan(model, sizes, scratch_bytes=() if not dynamic else (SCRATCH_BYTES,), dynamic=dynamic)
        self.runtime = self.trt.Runtime(self.logger)
        self.engine = self.runtime.deserialize_cuda_engine(plan.data)
        self.config = self.engine.create_runtime_config()
        self.config.set_execution_context_allocation_strategy(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        self.stream = int(self.runs.cuda.cudaStreamCreateWithFlags(1)[1])

    def _logger(self) -> Any:
        trt = self.trt

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.heard: list[str] = []

            def log(self, severity: Any, msg: str) -> None:
                self.heard.append(msg)

        return Logger()

    def specialise(self, strategy: str) -> None:
        kinds = self.trt.DynamicShapesKernelSpecializationStrategy
        self.config.dynamic_shapes_kernel_specialization_strategy = getattr(kinds, strategy)

    def with_cache(self, blob: bytes | None = None) -> Any:
        cache = self.config.create_runtime_cache()
        if blob is not None:
            assert cache.deserialize(blob)
        assert self.config.set_runtime_cache(cache)
        return cache

    def context(self) -> Any:
        return self.engine.create_execution_context(self.config)

    def run(self, context: Any, size: int, scratch_bytes: int = SCRATCH_BYTES) -> np.ndarray:
        """Answers of a batch of ones and twos: OUTPUT0 is their sum."""
        cuda = self.runs.cuda
        context.set_device_memory(self._block(scratch_bytes), scratch_bytes)
        addresses = {}
        for name in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1"):
            addresses[name] = self._block(size * WIDTH * 4)
            assert context.set_tensor_address(name, addresses[name])
        for value, name in enumerate(("INPUT0", "INPUT1"), start=1):
            assert context.set_input_shape(name, (size, WIDTH))
            cuda.read(addresses[name], size * WIDTH * 4).view(np.int32)[:] = value
        assert context.execute_async_v3(self.stream)
        cuda.finish(self.stream)
        return cuda.read(addresses["OUTPUT0"], size * WIDTH * 4).view(np.int32)

    def _block(self, nbytes: int) -> int:
        return int(self.runs.cuda.cudaMalloc(nbytes)[1])


@pytest.fixture
def rtx(tmp_path: Path) -> Rtx:
    return Rtx(tmp_path)


def test_one_dynamic_profile_takes_every_size_within_it(rtx: Rtx) -> None:
    assert rtx.engine.num_optimization_profiles == 1
    assert rtx.engine.get_tensor_profile_shape("INPUT0", 0) == [(1, WIDTH), (2, WIDTH), (8, WIDTH)]
    context = rtx.context()
    for size in (3, 8, 1):
        assert (rtx.run(context, size) == 3).all()
    assert not context.set_input_shape("INPUT0", (9, WIDTH))


def test_static_profiles_go_on_working(tmp_path: Path) -> None:
    rtx = Rtx(tmp_path, dynamic=False)
    assert rtx.engine.num_optimization_profiles == 3
    context = rtx.context()
    assert context.set_optimization_profile_async(1, rtx.stream)
    assert not context.set_input_shape("INPUT0", (1, WIDTH))
    assert (rtx.run(context, 2, 4096) == 3).all()


def test_smaller_shapes_need_less_memory_once_that_is_asked_for(rtx: Rtx) -> None:
    context = rtx.context()
    for name in ("INPUT0", "INPUT1"):
        context.set_input_shape(name, (2, WIDTH))
    assert rtx.engine.get_device_memory_size_for_profile_v2(0) == SCRATCH_BYTES
    assert context.update_device_memory_size_for_shapes() == SCRATCH_BYTES // 4
    assert (rtx.run(context, 2, SCRATCH_BYTES // 4) == 3).all()
    with pytest.raises(AssertionError, match="scratch memory is too small"):
        rtx.run(context, 3, SCRATCH_BYTES // 4)


def test_a_context_that_was_not_told_that_memory_is_given_is_refused(rtx: Rtx) -> None:
    with pytest.raises(AssertionError):
        rtx.engine.create_execution_context(rtx.engine.create_runtime_config())


@pytest.mark.parametrize(
    ("strategy", "compiled", "fallbacks"),
    [
        ("EAGER", [EVERY_SIZE, 2, 8], []),
        ("LAZY", [EVERY_SIZE, 2, 8], [(2, False), (8, False)]),
        ("NONE", [EVERY_SIZE], [(2, False), (2, False), (8, False)]),
    ],
)
def test_kernels_are_compiled_as_the_strategy_says(
    rtx: Rtx, strategy: str, compiled: list[int], fallbacks: list[tuple[int, bool]]
) -> None:
    rtx.specialise(strategy)
    context = rtx.context()
    for size in (2, 2, 8):
        rtx.run(context, size)
    assert rtx.runs.jit.compiled == compiled
    assert rtx.runs.jit.fallbacks == fallbacks


def test_without_a_cache_every_context_compiles_and_with_one_only_the_first(tmp_path: Path) -> None:
    for has_cache, compiled in ((False, [EVERY_SIZE, 8] * 2), (True, [EVERY_SIZE, 8])):
        rtx = Rtx(tmp_path)
        rtx.specialise("EAGER")
        if has_cache:
            rtx.with_cache()
        for _ in range(2):
            rtx.run(rtx.context(), 8)
        assert rtx.runs.jit.compiled == compiled


def test_a_second_start_with_the_cache_compiles_nothing(tmp_path: Path) -> None:
    first, second = Rtx(tmp_path), Rtx(tmp_path)
    cache = first.with_cache()
    first.run(first.context(), 8)
    second.with_cache(bytes(cache.serialize()))
    second.run(second.context(), 8)
    assert second.runs.jit.compiled == []
    assert second.runs.jit.from_cache == [EVERY_SIZE, 8]
    assert second.runs.jit.fallbacks == []


@pytest.mark.parametrize("blob", [None, b"", b"cut short"])
def test_a_cache_from_elsewhere_is_refused_and_the_reason_is_logged(rtx: Rtx, blob: bytes | None) -> None:
    cache = rtx.with_cache()
    rtx.runs.complaint = "the cache is from another driver"
    written = bytes(cache.serialize())
    rtx.runs.jit.origin = "1.8 on Fake GPU"
    assert not cache.deserialize(written if blob is None else blob)
    assert rtx.logger.heard == ["the cache is from another driver"]


def test_a_cache_can_be_emptied(rtx: Rtx) -> None:
    cache = rtx.with_cache()
    rtx.context()
    assert rtx.config.get_runtime_cache() is cache
    assert cache.reset()
    rtx.context()
    assert rtx.runs.jit.compiled == [EVERY_SIZE, EVERY_SIZE]


def test_settings_of_another_kind_are_refused(rtx: Rtx) -> None:
    assert rtx.config.cuda_graph_strategy.name == "DISABLED"
    rtx.config.cuda_graph_strategy = rtx.trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    with pytest.raises(TypeError):
        rtx.config.cuda_graph_strategy = rtx.trt.DynamicShapesKernelSpecializationStrategy.EAGER


def test_whether_a_stream_can_be_captured_is_asked_of_the_context(rtx: Rtx) -> None:
    context = rtx.context()
    assert context.is_stream_capturable(rtx.stream)
    rtx.runs.can_capture = False
    assert not context.is_stream_capturable(rtx.stream)
