"""ONNX Runtime on a GPU: where every model can be served at once, and what serves until a plan is built.

One session, one computing stream, and bindings to each slot's memory for each batch size, so that a run only
launches kernels. One thread makes all runs, because the provider keeps its CUDA graphs by thread: on another one,
requests would wait until they are captured again. Nothing falls back to the CPU unseen: the session is refused if
one node would run there, and a failing run fails instead of being tried elsewhere. Files with quantise nodes do
not belong here: there are no INT8 convolutions behind this provider.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from app.engines.base import Blast, EngineFailure
from app.engines.cuda.device import RESERVED_BYTES, Device
from app.engines.cuda.driver import Handle
from app.engines.cuda.engine import SLOTS, CudaEngine
from app.engines.cuda.slots import Slot
from app.engines.onnx_tensors import element_type
from app.engines.onnxruntime import check_names, first_line, read_signature
from models.bundle import Precision
from models.errors import BundleError
from models.spec import TensorSpec

PROVIDER = "CUDAExecutionProvider"
# The provider captures a graph in its third run, when two have settled the memory.
_PREPARING_RUNS = 3
_MEMORY_WORDS = ("out of memory", "failed to allocate", "bfcarena", "cuda failure 2:", "alloc_failed")

ConvolutionSearch = Literal["HEURISTIC", "EXHAUSTIVE"]


@dataclass(frozen=True, slots=True)
class ConvolutionTuning:
    """What decides a convolution's speed here and cannot be known beforehand.

    `search`: how cuDNN chooses an algorithm. `nhwc`: channels last, which is the tensor cores' own layout but
    costs transposes at the graph's ends. `graphs`: replay CUDA graphs, one per slot and batch size.
    """

    search: ConvolutionSearch = "HEURISTIC"
    nhwc: bool = True
    graphs: bool = True


class OnnxRuntimeCudaEngine(CudaEngine):
    """One ONNX file in one session on `device`.

    `inputs` and `outputs` are as in `ModelSpec`, with fixed sizes. `runtime` is the onnxruntime module. Raises
    BundleError when the file cannot be loaded or part of it would run on the CPU, EngineFailure when the device
    has no room.
    """

    def __init__(
        self,
        model: Path,
        device: Device,
        runtime: Any,
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        batch_sizes: tuple[int, ...],
        batched: bool,
        precision: Precision,
        tuning: ConvolutionTuning,
        slots: int = SLOTS,
    ) -> None:
        super().__init__(
            device,
            inputs=inputs,
            outputs=outputs,
            batch_sizes=batch_sizes,
            batched=batched,
            engine="onnxruntime-cuda",
            library=f"onnxruntime {runtime.__version__}",
            precision=precision,
            slots=slots,
        )
        self.tuning = tuning
        self._runtime = runtime
        self._bindings: dict[tuple[Slot, int], _Binding] = {}
        self._session: Any = None
        self._computing: Handle = None
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix=f"launches-{device.name}")
        try:
            device.check_room(_file_bytes(model), model.name)
            self._computing = self._cuda.make_stream()
            self._session = self._open_session(model)
            check_names(model, read_signature(self._session, model), inputs, outputs)
            self._open_slots(library_bytes=0)
        except BaseException:
            self.close()
            raise

    def _open_session(self, model: Path) -> Any:
        if PROVIDER not in self._runtime.get_available_providers():
            raise BundleError(f"this onnxruntime has no {PROVIDER}; install onnxruntime-gpu[cuda,cudnn] in its place")
        try:
            session = self._new_session(model, may_use_cpu=False)
        except Exception as error:  # onnxruntime's errors share no base class
            if _is_about_memory(error):
                raise EngineFailure(f"{model.name}: {first_line(error)}", Blast.MEMORY) from error
            if self._provider_loads(model):
                raise BundleError(f"{model}: ONNX Runtime cannot run it on the GPU ({first_line(error)})") from error
            advice = "its libraries come with onnxruntime-gpu[cuda,cudnn]"
            raise BundleError(f"{model}: {PROVIDER} did not load; {advice}") from error
        session.disable_fallback()
        return session

    def _new_session(self, model: Path, *, may_use_cpu: bool) -> Any:
        options = self._runtime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if not may_use_cpu:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        providers = [(PROVIDER, self._provider_options())]
        # Python's own fallback would print the error that matters, and raise another one.
        return self._runtime.InferenceSession(str(model), options, providers=providers, enable_fallback=0)

    def _provider_loads(self, model: Path) -> bool:
        """Whether the provider is there at all: without it too, all that a session complains of is nodes on the CPU."""
        try:
            return bool(self._new_session(model, may_use_cpu=True).get_providers()[0] == PROVIDER)
        except Exception:  # it is, and fails at something else
            return True

    def _provider_options(self) -> dict[str, str]:
        # What is free now, less what must stay so: a model may fail for want of memory, its neighbours may not.
        limit = max(RESERVED_BYTES, self._cuda.free_bytes() - RESERVED_BYTES)
        return {
            "device_id": str(self._device.properties.index),
            "user_compute_stream": str(int(self._computing)),
            "gpu_mem_limit": str(limit),
            # By powers of two, a large network would hold up to twice what it needs.
            "arena_extend_strategy": "kSameAsRequested",
            "cudnn_conv_algo_search": self.tuning.search,
            "cudnn_conv_use_max_workspace": "1",
            "prefer_nhwc": str(int(self.tuning.nhwc)),
            # FP32 was promised, and TF32 keeps ten bits of mantissa.
            "use_tf32": "0",
            "enable_cuda_graph": str(int(self.tuning.graphs)),
        }

    def _stream(self, slot: Slot) -> Handle:
        return self._computing

    def _prepare(self, slot: Slot, size: int) -> None:
        binding = self._session.io_binding()
        device = self._device.properties.index
        for index, spec in enumerate(self.inputs):
            shape, address = self._whole_shape(spec, size), slot.device_input(index)
            binding.bind_input(spec.name, "cuda", device, element_type(spec), list(shape), address)
        for index, spec in enumerate(self.outputs):
            shape, address = self._whole_shape(spec, size), slot.device_output(index)
            binding.bind_output(spec.name, "cuda", device, element_type(spec), list(shape), address)
        options = self._runtime.RunOptions()
        # The provider would wait for the device after each run; the slot's events do that.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if self.tuning.graphs:
            options.add_run_config_entry("gpu_graph_id", str(self._graph_id(slot, size)))
        self._bindings[slot, size] = _Binding(binding, options)
        for _ in range(_PREPARING_RUNS):
            self._compute(slot, size)
            self._cuda.wait_for_stream(self._computing)

    def _graph_id(self, slot: Slot, size: int) -> int:
        """Its own for each pair, always the same, and above 0, which is what has no id."""
        sizes = self.info.batch_sizes
        return 1 + self._slots.index(slot) * len(sizes) + sizes.index(size)

    def _compute(self, slot: Slot, size: int) -> None:
        self._launcher.submit(self._launch, self._bindings[slot, size]).result()

    def _launch(self, bound: _Binding) -> None:
        self._device.use()
        try:
            self._session.run_with_iobinding(bound.binding, bound.options)
        except Exception as error:  # onnxruntime's errors share no base class
            blast = Blast.MEMORY if _is_about_memory(error) else Blast.BATCH
            raise EngineFailure(first_line(error), blast) from error

    def _release(self) -> None:
        self._bindings.clear()
        self._session = None
        self._launcher.shutdown()
        if self._computing is not None:
            self._cuda.destroy_stream(self._computing)


@dataclass(frozen=True, slots=True)
class _Binding:
    """ONNX Runtime's binding to a slot's memory at one batch size, and how to run it."""

    binding: Any
    options: Any


def _file_bytes(model: Path) -> int:
    """About what the weights take: the file, and what lies beside it as its external data."""
    return sum(path.stat().st_size for path in model.parent.glob(f"{model.name}*"))


def _is_about_memory(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in _MEMORY_WORDS)
