"""ONNX Runtime on a GPU. It can serve every model at once, and serves until a plan is built.

There is one compute stream, and bindings to each slot's memory for each batch size, so a run only launches kernels. One
thread makes all runs, because the provider keeps its CUDA graphs per thread; other threads would have to capture them
again.

A convolution only keeps the cuDNN plan of the last batch size and makes a new one when it changes, which takes longer
than many batches. A CUDA graph contains its plans, so with graphs one session runs all sizes. Without graphs each size
has its own session; if the device lacks memory for that, fewer sizes are run.

Nothing that processes clients' values falls back to the CPU silently: a session that would do so is refused, and a
failing run fails. Nodes that only compute sizes are placed by ONNX Runtime. Files with quantise nodes do not run here,
because the provider has no INT8 convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from convoy.app.engines.base import check_names
from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.cuda.device import RESERVED_BYTES, Device
from convoy.app.engines.cuda.driver import CaptureDisturbed, Handle, undisturbed
from convoy.app.engines.cuda.engine import SLOTS, CudaEngine
from convoy.app.engines.cuda.slots import DeviceSlot
from convoy.app.engines.onnx_session import new_session, session_options
from convoy.app.engines.onnxruntime import element_type, first_line, read_signature
from convoy.models.bundle import Precision
from convoy.models.errors import BundleError
from convoy.models.onnx_nodes import SIZE_READERS, has_half_weights, read_nodes
from convoy.models.spec import TensorSpec

PROVIDER = "CUDAExecutionProvider"
# The provider captures a graph in its first run of an id, which it makes twice; the next run replays it.
_PREPARING_RUNS = 2
_PREPARING_ATTEMPTS = 3
_WITHOUT_GRAPH = "-1"
_MEMORY_WORDS = ("out of memory", "failed to allocate", "bfcarena", "cuda failure 2:", "alloc_failed")
_CAPTURE_WORDS = ("cuda failure 900:", "cuda failure 901:", "stream is capturing", "error during capture")
# The share of free memory for additional copies of the weights, if each size has its own session.
_SHARE_FOR_COPIES = 0.5
# Nodes that ONNX Runtime adds. A GPU has kernels for all of them and for numbers of any type; those on the CPU compute
# sizes.
_ARRANGING = ("Cast", "Concat", "Gather", "Identity", "Slice", "Squeeze", "Transpose", "Unsqueeze")

ConvolutionSearch = Literal["HEURISTIC", "EXHAUSTIVE"]


@dataclass(frozen=True, slots=True)
class ConvolutionTuning:
    """Settings that decide a convolution's speed and cannot be known in advance.

    `search` selects one of cuDNN's two heuristics for kernels; with cuDNN 9 "EXHAUSTIVE" is the other one, and neither
    measures. `nhwc` is channels last, the native layout of tensor cores, at the cost of transposes at the graph's ends.
    `graphs` replays CUDA graphs, one per slot and batch size. `fuse_conv_bias` adds the bias in the convolution's
    kernel; tuning does not choose it.
    """

    search: ConvolutionSearch = "HEURISTIC"
    nhwc: bool = True
    graphs: bool = True
    fuse_conv_bias: bool = False


class OnnxRuntimeCudaEngine(CudaEngine):
    """One ONNX file on `device`, in one session or, without graphs, in one per batch size.

    `inputs` and `outputs` are as in `ModelSpec`, with fixed sizes. `runtime` is the onnxruntime module. Raises
    BundleError if the file cannot be loaded or part of it would run on the CPU, and EngineFailure if the device lacks
    memory.
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
            batch_sizes=batch_sizes if tuning.graphs else _sizes_with_room(device, model, batch_sizes),
            batched=batched,
            engine="onnxruntime-cuda",
            library=f"onnxruntime {runtime.__version__}",
            precision=precision,
            slots=slots,
        )
        self.tuning = tuning
        self._runtime = runtime
        self._bindings: dict[tuple[DeviceSlot, int], _Binding] = {}
        self._sessions: dict[int, Any] = {}  # by batch size; with graphs, one session for all
        self._computing: Handle = None
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix=f"launches-{device.name}")
        try:
            device.check_room(_file_bytes(model), model.name)
            # A file that did not come from export may compute in half precision under any name.
            self._is_full_precision = precision == "fp32" and not has_half_weights(model)
            self._computing = self._cuda.make_stream()
            self._open_sessions(model)
            self._open_slots(library_bytes=0)
        except BaseException:
            self.close()
            raise

    def _open_sessions(self, model: Path) -> None:
        if PROVIDER not in self._runtime.get_available_providers():
            raise BundleError(f"this onnxruntime has no {PROVIDER}; install onnxruntime-gpu[cuda,cudnn] instead")
        for size in self.info.batch_sizes:
            if self.tuning.graphs and self._sessions:
                self._sessions[size] = next(iter(self._sessions.values()))
                continue
            with self._cuda.beside_captures():
                self._sessions[size] = self._open_session(model)

    def _open_session(self, model: Path) -> Any:
        try:
            session = self._new_session(model)
        except Exception as error:  # onnxruntime's errors share no base class
            if _is_about_memory(error):
                raise EngineFailure(f"{model.name}: {first_line(error)}", FailureScope.MEMORY) from error
            raise BundleError(f"{model}: ONNX Runtime cannot run it on the GPU ({first_line(error)})") from error
        if session.get_providers()[0] != PROVIDER:
            advice = "its libraries come with onnxruntime-gpu[cuda,cudnn]"
            raise BundleError(f"{model}: {PROVIDER} did not load; {advice}")
        _check_placement(session, model)
        check_names(model, read_signature(session, model), self.inputs, self.outputs)
        session.disable_fallback()
        return session

    def _new_session(self, model: Path) -> Any:
        options = session_options(self._runtime)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        providers = [(PROVIDER, self._provider_options())]
        # The library's Python fallback would hide this error behind another.
        return new_session(model, options, runtime=self._runtime, providers=providers, enable_fallback=0)

    def _provider_options(self) -> dict[str, str]:
        # The free memory less a reserve: this model may run out of memory, but its neighbours must not.
        limit = max(RESERVED_BYTES, self._cuda.free_bytes() - RESERVED_BYTES)
        options = {
            "device_id": str(self._device.properties.index),
            "user_compute_stream": str(int(self._computing)),
            "gpu_mem_limit": str(limit),
            # By powers of two, a large network would hold up to twice the memory that it needs.
            "arena_extend_strategy": "kSameAsRequested",
            "cudnn_conv_algo_search": self.tuning.search,
            "cudnn_conv_use_max_workspace": "1",
            "prefer_nhwc": str(int(self.tuning.nhwc)),
            "fuse_conv_bias": str(int(self.tuning.fuse_conv_bias)),
            "enable_cuda_graph": str(int(self.tuning.graphs)),
        }
        if self._is_full_precision:
            # FP32 was promised, and TF32 has ten bits of mantissa. If it were also disabled elsewhere, convolutions in
            # half precision could not use tensor cores.
            options["use_tf32"] = "0"
        return options

    def _stream(self, slot: DeviceSlot) -> Handle:
        return self._computing

    def _prepare(self, slot: DeviceSlot, size: int) -> None:
        binding = self._sessions[size].io_binding()
        device = self._device.properties.index
        for index, spec in enumerate(self.inputs):
            shape, address = self.whole_shape(spec, size), slot.device_input(index)
            binding.bind_input(spec.name, "cuda", device, element_type(spec), list(shape), address)
        for index, spec in enumerate(self.outputs):
            shape, address = self.whole_shape(spec, size), slot.device_output(index)
            binding.bind_output(spec.name, "cuda", device, element_type(spec), list(shape), address)
        with self._cuda.beside_captures():
            # Everything new at this size is created and allocated here, so that little happens during the capture.
            self._run_prepared(_Binding(self._sessions[size], binding, self._run_options(_WITHOUT_GRAPH)), 1)
        bound = _Binding(self._sessions[size], binding, self._run_options(str(self._graph_id(slot, size))))
        if self.tuning.graphs:
            # The provider captures for the whole process: alone on the device, and again if disturbed.
            undisturbed(_PREPARING_ATTEMPTS, lambda: self._capture(bound))
        else:
            with self._cuda.beside_captures():
                self._run_prepared(bound, _PREPARING_RUNS)
        self._bindings[slot, size] = bound

    def _run_options(self, graph_id: str) -> Any:
        options = self._runtime.RunOptions()
        # The slot's events wait for the device; the provider need not.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if self.tuning.graphs:
            options.add_run_config_entry("gpu_graph_id", graph_id)
        return options

    def _capture(self, bound: _Binding) -> None:
        with self._cuda.capturing():
            self._run_prepared(bound, _PREPARING_RUNS)

    def _run_prepared(self, bound: _Binding, times: int) -> None:
        for _ in range(times):
            self._launcher.submit(self._launch, bound).result()
            self._cuda.wait_for_stream(self._computing)

    def _graph_id(self, slot: DeviceSlot, size: int) -> int:
        """A stable id for each pair, above 0, which means no id."""
        sizes = self.info.batch_sizes
        return 1 + self._slots.index(slot) * len(sizes) + sizes.index(size)

    def _compute(self, slot: DeviceSlot, size: int) -> None:
        self._launcher.submit(self._launch, self._bindings[slot, size]).result()

    def _launch(self, bound: _Binding) -> None:
        self._device.use()
        try:
            bound.session.run_with_iobinding(bound.binding, bound.options)
        except Exception as error:  # onnxruntime's errors share no base class
            text = str(error).lower()
            if any(word in text for word in _CAPTURE_WORDS):
                raise CaptureDisturbed(first_line(error)) from error
            scope = FailureScope.MEMORY if _is_about_memory(error) else FailureScope.BATCH
            raise EngineFailure(first_line(error), scope) from error

    def _release(self) -> None:
        with self._cuda.beside_captures():
            self._bindings.clear()
            self._sessions.clear()
        self._launcher.shutdown()
        if self._computing is not None:
            self._cuda.destroy_stream(self._computing)


@dataclass(frozen=True, slots=True)
class _Binding:
    """ONNX Runtime's binding to a slot's memory at one batch size, and how to run it."""

    session: Any
    binding: Any
    options: Any


def _check_placement(session: Any, model: Path) -> None:
    """Raise BundleError if a node that processes clients' values would run on the CPU."""
    nodes = read_nodes(model)
    by_name = {node.name: node for node in nodes if node.name}
    for part in session.get_provider_graph_assignment_info():
        if part.ep_name == PROVIDER:
            continue
        for node in part.get_nodes():
            known = by_name.get(node.name)
            if known is None or known.op_type != node.op_type:  # added by ONNX Runtime, or without a name
                nameless = [one for one in nodes if not one.name and one.op_type == node.op_type]
                arranges = bool(nameless) or node.op_type in (*SIZE_READERS, *_ARRANGING)
                may = arranges and not any(one.sees_values for one in nameless)
            else:
                may = not known.sees_values
            if not may:
                name = f"node {node.name!r} ({node.op_type})" if node.name else f"a node ({node.op_type})"
                raise BundleError(
                    f"{model}: ONNX Runtime cannot run it on the GPU: {name} would run on {part.ep_name}, and every "
                    "batch go there and back; export the model without it, or serve it with --engine cpu"
                )


def _sizes_with_room(device: Device, model: Path, sizes: Sequence[int]) -> tuple[int, ...]:
    """As many batch sizes as there can be sessions: the largest, the smallest, and some between."""
    device.use()
    free = device.cuda.free_bytes() - RESERVED_BYTES
    room = max(1, int(free * _SHARE_FOR_COPIES) // max(1, _file_bytes(model)))
    if room >= len(sizes):
        return tuple(sizes)
    if room == 1:
        return (sizes[-1],)
    return tuple(sizes[round(index * (len(sizes) - 1) / (room - 1))] for index in range(room))


def _file_bytes(model: Path) -> int:
    """The approximate size of the weights: the file and its external data."""
    return sum(path.stat().st_size for path in model.parent.glob(f"{model.name}*"))


def _is_about_memory(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in _MEMORY_WORDS)
