"""torch on Convoy's slots: the house's GPU engine with a torch network in the place of a library that serves.

It proves what TensorRT's and ONNX Runtime's engines are made of (streams, events, turns, page-locked gathering,
graphs per slot and batch size) on a machine that has neither. Not a serving engine: torch is no dependency of a
server. Knows torch; is otherwise as `convoy.app.engines.tensorrt` is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from convoy.app.batch import EngineFailure, FailureScope
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.engine import SLOTS, CudaEngine
from convoy.app.engines.cuda.slots import DeviceSlot
from convoy.models.bundle import Precision
from convoy.models.spec import ModelSpec
from tests.gpu.proof.targets import TORCH

# The first settles cuDNN's choice of kernels, the second the allocator.
_PREPARING_RUNS = 2


def prepare_torch(torch: Any) -> None:
    """Exact FP32, and kernels chosen by measuring."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True


def with_front(torch: Any, network: Any, spec: ModelSpec, precision: Precision) -> Any:
    """uint8 [N, H, W, C] -> float32 logits, as the exported graphs: the front is exact, the network of `precision`.

    The network is changed: to channels last where it is FP16, which is the tensor cores' own layout.
    """
    assert spec.image is not None
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (spec.image.mean, spec.image.std))
    half = precision == "fp16"
    network = network.to(dtype=torch.float16, memory_format=torch.channels_last) if half else network.float()

    class Front(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network
            self.register_buffer("scale", 1 / (255 * std))
            self.register_buffer("shift", -mean / std)

        def forward(self, images: Any) -> Any:
            values = images.permute(0, 3, 1, 2).float() * self.scale + self.shift
            values = values.half() if half else values.contiguous()
            return self.network(values).float()

    return Front().eval()


@dataclass(slots=True)
class _Way:
    """How one slot runs one batch size: tensors over the slot's own memory."""

    stream: Any
    images: Any
    logits: Any
    graph: Any = None


class TorchEngine(CudaEngine):
    """`network` is `with_front`'s, on `device`. `torch` is the module. Raises EngineFailure where there is no room."""

    def __init__(
        self,
        network: Any,
        device: Device,
        torch: Any,
        spec: ModelSpec,
        *,
        batch_sizes: tuple[int, ...],
        precision: Precision,
        graphs: bool = True,
        slots: int = SLOTS,
    ) -> None:
        super().__init__(
            device,
            inputs=spec.inputs,
            outputs=spec.outputs,
            batch_sizes=batch_sizes,
            batched=True,
            engine=TORCH,
            library=f"torch {torch.__version__}",
            precision=precision,
            slots=slots,
        )
        self._torch, self._network, self._wants_graphs = torch, network, graphs
        self._ways: dict[tuple[DeviceSlot, int], _Way] = {}
        self._pool: Any = None
        try:
            self._open_slots(library_bytes=0)
        except BaseException:
            self.close()
            raise

    @property
    def graphs(self) -> int:
        """For how many pairs of slot and batch size a graph was captured."""
        return sum(way.graph is not None for way in self._ways.values())

    def _prepare(self, slot: DeviceSlot, size: int) -> None:
        torch, device = self._torch, self._device.name
        (image,), (logits,) = self.inputs, self.outputs
        way = self._ways[slot, size] = _Way(
            torch.cuda.ExternalStream(int(slot.stream), device=device),
            _tensor_over(torch, slot.device_input(0), (size, *image.shape), "|u1", device),
            _tensor_over(torch, slot.device_output(0), (size, *logits.shape), "<f4", device),
        )
        try:
            for _ in range(_PREPARING_RUNS):
                self._launch(way)
            way.stream.synchronize()
            if self._wants_graphs:
                self._capture(way)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _capture(self, way: _Way) -> None:
        """All graphs share one pool: the device computes one batch at a time."""
        torch = self._torch
        way.graph = torch.cuda.CUDAGraph()
        with (
            torch.inference_mode(),
            torch.cuda.graph(way.graph, pool=self._pool, stream=way.stream, capture_error_mode="thread_local"),
        ):
            way.logits.copy_(self._network(way.images))
        self._pool = way.graph.pool()

    def _launch(self, way: _Way) -> None:
        torch = self._torch
        with torch.inference_mode(), torch.cuda.stream(way.stream):
            way.logits.copy_(self._network(way.images))

    def _compute(self, slot: DeviceSlot, size: int) -> None:
        way = self._ways[slot, size]
        try:
            if way.graph is None:
                self._launch(way)
            else:
                with self._torch.cuda.stream(way.stream):
                    way.graph.replay()
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> EngineFailure:
        is_memory = isinstance(error, self._torch.cuda.OutOfMemoryError)
        return EngineFailure(str(error).splitlines()[0], FailureScope.MEMORY if is_memory else FailureScope.BATCH)

    def _release(self) -> None:
        self._ways.clear()
        self._pool = None
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()


class _Memory:
    """Device memory that somebody else owns, by the interface through which torch takes it as it is."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": kind,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _tensor_over(torch: Any, address: int, shape: tuple[int, ...], kind: str, device: str) -> Any:
    tensor = torch.as_tensor(_Memory(address, shape, kind), device=device)
    assert tensor.data_ptr() == address, "torch copied the slot's memory instead of using it"
    return tensor
