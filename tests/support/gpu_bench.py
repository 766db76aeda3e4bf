"""Both GPU engines on one fake GPU, with Triton's add_sub as their model and batches whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convoy.app.engines.batch import BatchResult
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.driver import Cuda
from convoy.app.engines.cuda.engine import CudaEngine, bucket_sizes
from convoy.app.engines.onnxruntime_cuda import ConvolutionTuning, OnnxRuntimeCudaEngine
from convoy.app.engines.parts import Part
from convoy.app.engines.tensorrt import TensorRtEngine
from convoy.models.spec import TensorSpec
from tests.support import onnx_models
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_onnxruntime import FakeRuntime
from tests.support.tensorrt_run import Runs, make_plan

KINDS = ("onnxruntime", "tensorrt")


@dataclass
class Batch:
    """Parts, the memory they lie in, and what must come of them: one list of (sum, difference) per part."""

    parts: list[Part]
    sources: list[tuple[np.ndarray, np.ndarray]]
    expected: list[tuple[np.ndarray, np.ndarray]]

    def is_answered_by(self, result: BatchResult) -> bool:
        pairs = zip(self.expected, result.answers, strict=True)
        return all(
            wanted.tobytes() == got.data.tobytes()
            for expected, outputs in pairs
            for wanted, got in zip(expected, outputs, strict=True)
        )


@dataclass
class TwoEngines:
    """The fakes, and engines opened on them; `width` is the number of INT32 in a sample of each tensor."""

    folder: Path
    cuda: FakeCuda = field(default_factory=FakeCuda)
    width: int = 16
    max_batch_size: int = 8
    version: str = "11.4"

    def __post_init__(self) -> None:
        self.bindings = Cuda(self.cuda)
        self.device = Device(self.bindings, 0)
        self.onnxruntime, self.tensorrt = FakeRuntime(self.cuda), Runs(self.cuda, self.version)
        self.module = self.tensorrt.module()
        self.model = onnx_models.add_sub(self.folder / "model.onnx", ("batch", self.width))
        self.inputs, self.outputs = (
            tuple(TensorSpec(f"{kind}{index}", "INT32", (self.width,)) for index in (0, 1))
            for kind in ("INPUT", "OUTPUT")
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return bucket_sizes(self.max_batch_size)

    def open(self, kind: str, **options: Any) -> CudaEngine:
        """An engine that is not warmed up."""
        return self.open_onnxruntime(**options) if kind == "onnxruntime" else self.open_tensorrt(**options)

    def ready(self, kind: str, **options: Any) -> CudaEngine:
        engine = self.open(kind, **options)
        engine.warm_up()
        return engine

    def open_onnxruntime(self, *, graphs: bool = True, **options: Any) -> OnnxRuntimeCudaEngine:
        given: dict[str, Any] = {
            "inputs": self.inputs,
            "outputs": self.outputs,
            "batch_sizes": self.sizes,
            "batched": True,
            "precision": "fp32",
            "tuning": ConvolutionTuning(graphs=graphs),
        }
        return OnnxRuntimeCudaEngine(self.model, self.device, self.onnxruntime, **given | options)

    def open_tensorrt(self, *, scratch_bytes: Sequence[int] = (), **options: Any) -> TensorRtEngine:
        plan = make_plan(self.model, self.sizes, scratch_bytes=scratch_bytes)
        given: dict[str, Any] = {"inputs": self.inputs, "outputs": self.outputs, "batched": True}
        return TensorRtEngine(plan, self.device, self.module, **given | options)

    def batch(self, *samples: int, seed: int = 0) -> Batch:
        """Parts of so many samples each; the engine keeps the answers."""
        chance = np.random.default_rng(seed)
        sources = [tuple(chance.integers(0, 1000, (n, self.width), np.int32) for _ in (0, 1)) for n in samples]
        parts = [Part(len(a), (a.shape, b.shape), (_bytes(a), _bytes(b)), (0, 1), (None, None)) for a, b in sources]
        return Batch(parts, sources, [(a + b, a - b) for a, b in sources])  # type: ignore[arg-type]

    def runs_right(self, engine: CudaEngine, *samples: int, seed: int = 0) -> bool:
        batch = self.batch(*samples, seed=seed)
        return batch.is_answered_by(engine.run(batch.parts))


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B")
