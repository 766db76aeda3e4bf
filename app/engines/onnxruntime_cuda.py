"""ONNX Runtime on a GPU: where every model can be served at once, and what serves until a plan is built.

One computing stream, and bindings to each slot's memory for each batch size, so that a run only launches kernels.
One thread makes all runs, because the provider keeps its CUDA graphs by thread: on another one, requests would wait
until they are captured again.

A convolution here keeps the plan of the last batch size alone, and makes a new one whenever that changes, which takes
longer than many a batch. A CUDA graph has its plans inside, so with graphs one session runs every size. Without them
each size has a session of its own, or, where the device has no room for so many, fewer sizes are run.

Nothing that sees the clients' values falls back to the CPU unseen: a session that would do so is refused, and a
failing run fails instead of being tried elsewhere. What only computes sizes is ONNX Runtime's own to place. Files with
quantise nodes do not belong here: there are no INT8 convolutions behind this provider.
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
# The provider captures a graph within its first run of an id, which it makes twice; the next one replays it.
_PREPARING_RUNS = 2
_PREPARING_ATTEMPTS = 3
_WITHOUT_GRAPH = "-1"
_MEMORY_WORDS = ("out of memory", "failed to allocate", "bfcarena", "cuda failure 2:", "alloc_failed")
_CAPTURE_WORDS = ("cuda failure 900:", "cuda failure 901:", "stream is capturing", "error during capture")
# Of the free memory, so much may go to the copies of a model's weights that sessions of their own need.
_SHARE_FOR_COPIES = 0.5
# Nodes that ONNX Runtime adds by itself. There are kernels of all of them on a GPU, for numbers of any type: what of
# them is on the CPU is there because it arranges sizes.
_ARRANGING = ("Cast", "Concat", "Gather", "Identity", "Slice", "Squeeze", "Transpose", "Unsqueeze")

ConvolutionSearch = Literal["HEURISTIC", "EXHAUSTIVE"]


@dataclass(frozen=True, slots=True)
class ConvolutionTuning:
    """What decides a convolution's speed here and cannot be known beforehand.

    `search`: which of cuDNN's two heuristics chooses the kernels; with cuDNN 9 "EXHAUSTIVE" is the other one, and
    neither measures. `nhwc`: channels last, which is the tensor cores' own layout but costs transposes at the graph's
    ends. `graphs`: replay CUDA graphs, one per slot and batch size. `fuse_conv_bias`: add the bias in the
    convolution's own kernel, which tuning does not choose.
    """

    search: ConvolutionSearch = "HEURISTIC"
    nhwc: bool = True
    graphs: bool = True
    fuse_conv_bias: bool = False


class OnnxRuntimeCudaEngine(CudaEngine):
    """One ONNX file on `device`, in one session or, without graphs, in one for each batch size.

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
        self._sessions: dict[int, Any] = {}  # by batch size; with graphs, the same one for all
        self._computing: Handle = None
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix=f"launches-{device.name}")
        try:
            device.check_room(_file_bytes(model), model.name)
            # What nobody has made a variant of may compute in halves under any name.
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
        # Python's own fallback would print the error that matters, and raise another one.
        return new_session(model, options, runtime=self._runtime, providers=providers, enable_fallback=0)

    def _provider_options(self) -> dict[str, str]:
        # What is free now, less what must stay so: a model may fail for want of memory, its neighbours may not.
        limit = max(RESERVED_BYTES, self._cuda.free_bytes() - RESERVED_BYTES)
        options = {
            "device_id": str(self._device.properties.index),
            "user_compute_stream": str(int(self._computing)),
            "gpu_mem_limit": str(limit),
            # By powers of two, a large network would hold up to twice what it needs.
            "arena_extend_strategy": "kSameAsRequested",
            "cudnn_conv_algo_search": self.tuning.search,
            "cudnn_conv_use_max_workspace": "1",
            "prefer_nhwc": str(int(self.tuning.nhwc)),
            "fuse_conv_bias": str(int(self.tuning.fuse_conv_bias)),
            "enable_cuda_graph": str(int(self.tuning.graphs)),
        }
        if self._is_full_precision:
            # FP32 was promised, and TF32 keeps ten bits of mantissa. Asked for elsewhere, this would also keep every
            # convolution in half precision from the tensor cores.
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
            # Whatever is new at this size is made and allocated here, so that little is left to be done alone.
            self._run_prepared(_Binding(self._sessions[size], binding, self._run_options(_WITHOUT_GRAPH)), 1)
        bound = _Binding(self._sessions[size], binding, self._run_options(str(self._graph_id(slot, size))))
        if self.tuning.graphs:
            # The provider captures for the whole process and on its own: alone on the device, and again if disturbed.
            undisturbed(_PREPARING_ATTEMPTS, lambda: self._capture(bound))
        else:
            with self._cuda.beside_captures():
                self._run_prepared(bound, _PREPARING_RUNS)
        self._bindings[slot, size] = bound

    def _run_options(self, graph_id: str) -> Any:
        options = self._runtime.RunOptions()
        # The provider would wait for the device after each run; the slot's events do that.
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
        """Its own for each pair, always the same, and above 0, which is what has no id."""
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
    """Raises BundleError where a node that sees the clients' values would run on the CPU."""
    nodes = read_nodes(model)
    by_name = {node.name: node for node in nodes if node.name}
    for part in session.get_provider_graph_assignment_info():
        if part.ep_name == PROVIDER:
            continue
        for node in part.get_nodes():
            known = by_name.get(node.name)
            if known is None or known.op_type != node.op_type:  # ONNX Runtime's own, or one of many without a name
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
    """Of the batch sizes, as many as there may be sessions of their own: the largest, the smallest, some between."""
    device.use()
    free = device.cuda.free_bytes() - RESERVED_BYTES
    room = max(1, int(free * _SHARE_FOR_COPIES) // max(1, _file_bytes(model)))
    if room >= len(sizes):
        return tuple(sizes)
    if room == 1:
        return (sizes[-1],)
    return tuple(sizes[round(index * (len(sizes) - 1) / (room - 1))] for index in range(room))


def _file_bytes(model: Path) -> int:
    """About what the weights take: the file, and what lies beside it as its external data."""
    return sum(path.stat().st_size for path in model.parent.glob(f"{model.name}*"))


def _is_about_memory(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in _MEMORY_WORDS)
