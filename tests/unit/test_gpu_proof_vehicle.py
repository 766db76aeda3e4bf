"""The proof's torch engine over a fake GPU: a torch whose tensors lie on the fake device and whose work waits there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from convoy.app.batch import EngineFailure, FailureScope
from convoy.app.engines.base import run_arrays
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.driver import Cuda
from convoy.models.spec import ModelSpec, TensorSpec
from tests.gpu.proof.torch_engine import TorchEngine
from tests.support.fake_cuda import FakeCuda, FakeGpu

SPEC = ModelSpec("sum", (TensorSpec("x", "UINT8", (4,)),), (TensorSpec("y", "FP32", (2,)),), 8, None, "none", ())


class OutOfMemoryError(RuntimeError):
    pass


@dataclass
class FakeTorch:
    """As much of torch as the engine uses. `says` makes the coming launches fail."""

    fake: FakeCuda
    says: RuntimeError | None = None
    graphs: int = 0
    _stream: int = 0
    _recording: Any = None
    __version__: str = "9.9"
    cuda: Any = field(init=False)

    def __post_init__(self) -> None:
        self.cuda = SimpleNamespace(
            ExternalStream=lambda number, device: SimpleNamespace(
                number=number, synchronize=lambda: self.fake.finish(number)
            ),
            CUDAGraph=lambda: FakeGraph(self),
            OutOfMemoryError=OutOfMemoryError,
            stream=self._on,
            graph=self._capturing,
            synchronize=lambda: None,
            empty_cache=lambda: None,
        )

    def inference_mode(self) -> Any:
        return nullcontext()

    def as_tensor(self, memory: Any, device: str) -> FakeTensor:
        assert device == "cuda:0"
        return FakeTensor(
            self, **{name: memory.__cuda_array_interface__[name] for name in ("shape", "typestr", "data")}
        )

    def give(self, deed: Any) -> None:
        if self.says is not None:
            raise self.says
        if self._recording is not None:
            self._recording.append(deed)
        else:
            self.fake.enqueue(self._stream, deed)

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        self._stream = stream.number
        yield

    @contextmanager
    def _capturing(self, graph: FakeGraph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        assert pool == (None if not self.graphs else "pool")
        self._recording = graph.deeds
        yield
        self._recording = None
        self.graphs += 1


@dataclass
class FakeGraph:
    torch: FakeTorch
    deeds: list[Any] = field(default_factory=list)

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        for deed in self.deeds:
            self.torch.give(deed)


@dataclass
class FakeTensor:
    torch: FakeTorch
    shape: tuple[int, ...]
    typestr: str
    data: tuple[int, bool]

    def data_ptr(self) -> int:
        return self.data[0]

    def array(self) -> np.ndarray:
        dtype = np.dtype(self.typestr)
        raw = self.torch.fake.read(self.data[0], int(np.prod(self.shape)) * dtype.itemsize)
        return raw.view(dtype).reshape(self.shape)

    def copy_(self, computed: Any) -> None:
        self.torch.give(lambda: np.copyto(self.array(), computed()))


def sum_and_largest(images: FakeTensor) -> Any:
    return lambda: np.stack([images.array().sum(axis=1), images.array().max(axis=1)], axis=1).astype(np.float32)


@pytest.fixture
def torch() -> FakeTorch:
    return FakeTorch(FakeCuda(FakeGpu()))


def opened(torch: FakeTorch, **given: Any) -> TorchEngine:
    device = Device(Cuda(torch.fake), 0)
    engine = TorchEngine(
        sum_and_largest, device, torch, SPEC, batch_sizes=(1, 4, 8), precision="fp32", **{"graphs": True, **given}
    )
    engine.warm_up()
    return engine


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("slots", [1, 2])
def test_every_size_is_answered_from_every_slot(torch: FakeTorch, graphs: bool, slots: int) -> None:
    engine = opened(torch, graphs=graphs, slots=slots)
    assert engine.graphs == (3 * slots if graphs else 0)
    chance = np.random.default_rng(0)
    for samples in (1, 3, 4, 8, 5, 2):
        x = chance.integers(0, 256, (samples, 4), np.uint8)
        expected = np.stack([x.sum(axis=1), x.max(axis=1)], axis=1)
        np.testing.assert_array_equal(run_arrays(engine, {"x": x})["y"], expected)
    engine.close()
    assert torch.fake.live_device_blocks == 0


def test_a_failing_launch_says_how_far_it_reaches(torch: FakeTorch) -> None:
    engine = opened(torch, graphs=False)
    x = np.zeros((1, 4), np.uint8)
    torch.says = OutOfMemoryError("CUDA out of memory.\nand advice")
    with pytest.raises(EngineFailure, match=r"^CUDA out of memory\.$") as failure:
        run_arrays(engine, {"x": x})
    assert failure.value.scope is FailureScope.MEMORY
    torch.says = RuntimeError("no kernel")
    with pytest.raises(EngineFailure) as failure:
        run_arrays(engine, {"x": x})
    assert failure.value.scope is FailureScope.BATCH
    torch.says = None
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_arrays, engine, {"x": x + 1}).result()["y"].tolist() == [[4.0, 1.0]]
