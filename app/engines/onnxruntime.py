"""ONNX Runtime on the CPU.

Inputs are gathered into staging buffers that are allocated once, bound once per batch size, and run in
place; outputs of known size land in buffers of the same kind. After warm-up a batch allocates no tensor,
except for outputs whose size only the run can tell.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from app.engines import cpu
from app.engines.base import Engine, EngineFailure, EngineInfo, OutputTensor, Part, RunResult
from models.bundle import Precision
from models.errors import BundleError
from models.spec import TensorSpec

LIBRARY = f"onnxruntime {ort.__version__}"
Shapes = tuple[tuple[int, ...], ...]

_OIP_BY_ORT_TYPE = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
}
# So many shape combinations keep their binding; models with free shapes must not collect them for ever.
_MAX_BINDINGS = 256


@dataclass(frozen=True, slots=True)
class Signature:
    """A graph's tensors as the file declares them: whole shapes, -1 for every size that is not fixed."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class _Staging:
    """Memory for one tensor of a batch. Grows when a larger shape than ever comes, and never shrinks."""

    def __init__(self, spec: TensorSpec, capacity_bytes: int) -> None:
        self.spec = spec
        self.memory = np.zeros(capacity_bytes, np.uint8)
        self.view = self.memory.data

    def ensure(self, nbytes: int) -> bool:
        """Whether the memory moved, so that bindings to it are void."""
        if nbytes <= len(self.memory):
            return False
        self.memory = np.zeros(nbytes, np.uint8)
        self.view = self.memory.data
        return True


class OnnxRuntimeCpuEngine(Engine):
    """One ONNX file in one session with `threads` intra-op threads, spinning off.

    `inputs` and `outputs` give per-sample shapes when `max_batch_size` is at least 1, whole shapes when
    it is 0, as in `ModelSpec`. Raises BundleError when the file cannot be loaded.
    """

    def __init__(
        self,
        model: Path,
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        max_batch_size: int,
        precision: Precision,
        threads: int,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.batched = max_batch_size > 0
        self._session = open_session(model, threads)
        self._check_names(model)
        largest = max(1, max_batch_size)
        self.info = EngineInfo(
            engine="onnxruntime-cpu",
            precision=precision,
            device="cpu",
            device_fingerprint=cpu.fingerprint(threads, LIBRARY),
            library=LIBRARY,
            batch_sizes=tuple(range(1, largest + 1)),
        )
        self._staging_in = [_Staging(spec, largest * (spec.sample_bytes or 0)) for spec in inputs]
        self._staging_out = [_Staging(spec, largest * (spec.sample_bytes or 0)) for spec in outputs]
        self._has_free_outputs = any(spec.sample_bytes is None for spec in outputs)
        self._bindings: dict[Shapes, Any] = {}

    def warm_up(self) -> None:
        sizes = sorted({1, self.info.batch_sizes[-1]})
        for samples in sizes:
            shapes = tuple(self._whole_shape(spec, samples) for spec in self.inputs)
            for staging, shape in zip(self._staging_in, shapes, strict=True):
                self._make_room(staging, math.prod(shape) * staging.spec.numpy_dtype.itemsize)
                staging.memory[:] = 0
            self._execute(shapes, samples)

    def run(self, parts: Sequence[Part]) -> RunResult:
        started_ns = time.monotonic_ns()
        samples = sum(part.samples for part in parts)
        shapes = tuple(
            (samples, *shape[1:]) if self.batched else shape  # all parts agree but in the first dimension
            for shape in parts[0].shapes
        )
        self._gather(parts)
        gathered_ns = time.monotonic_ns()
        arrays = self._execute(shapes, samples)
        computed_ns = time.monotonic_ns()
        outputs = self._scatter(parts, arrays)
        return RunResult(
            outputs=outputs,
            copy_in_ns=gathered_ns - started_ns,
            compute_ns=computed_ns - gathered_ns,
            copy_out_ns=time.monotonic_ns() - computed_ns,
        )

    def close(self) -> None:
        self._bindings.clear()
        self._session = None
        self._staging_in, self._staging_out = [], []

    def _gather(self, parts: Sequence[Part]) -> None:
        for index, staging in enumerate(self._staging_in):
            self._make_room(staging, sum(part.inputs[index].nbytes for part in parts))
            view, offset = staging.view, 0
            for part in parts:
                source = part.inputs[index]
                view[offset : offset + source.nbytes] = source
                offset += source.nbytes

    def _make_room(self, staging: _Staging, nbytes: int) -> None:
        if staging.ensure(nbytes):
            self._bindings.clear()  # they point to where the memory was

    def _execute(self, shapes: Shapes, samples: int) -> list[np.ndarray]:
        """Run what lies in the staging buffers; returns arrays over buffers that the next run reuses."""
        binding = self._bindings.get(shapes)
        if binding is None:
            binding = self._bind(shapes, samples)
        elif self._has_free_outputs:
            # A binding remembers the output of its last run, and refuses another size for it.
            self._bind_outputs(binding, samples)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's errors share no base class
            raise EngineFailure(_first_line(error)) from error
        known: list[np.ndarray] = []
        for staging, value in zip(self._staging_out, binding.get_outputs(), strict=True):
            known.append(self._output_array(staging, value, samples))
        return known

    def _output_array(self, staging: _Staging, value: Any, samples: int) -> np.ndarray:
        spec = staging.spec
        if spec.sample_bytes is None:
            array: np.ndarray = value.numpy()
            return array
        shape = self._whole_shape(spec, samples)
        count_bytes = math.prod(shape) * spec.numpy_dtype.itemsize
        return staging.memory[:count_bytes].view(spec.numpy_dtype).reshape(shape)

    def _bind(self, shapes: Shapes, samples: int) -> Any:
        if len(self._bindings) >= _MAX_BINDINGS:
            self._bindings.clear()
        binding = self._session.io_binding()
        try:
            for staging, shape in zip(self._staging_in, shapes, strict=True):
                _bind_input(binding, staging, shape)
        except Exception as error:
            raise EngineFailure(_first_line(error)) from error
        self._bind_outputs(binding, samples)
        self._bindings[shapes] = binding
        return binding

    def _bind_outputs(self, binding: Any, samples: int) -> None:
        binding.clear_binding_outputs()
        try:
            for staging in self._staging_out:
                if staging.spec.sample_bytes is None:
                    binding.bind_output(staging.spec.name, "cpu")
                else:
                    _bind_output(binding, staging, self._whole_shape(staging.spec, samples))
        except Exception as error:
            raise EngineFailure(_first_line(error)) from error

    def _scatter(self, parts: Sequence[Part], arrays: list[np.ndarray]) -> tuple[tuple[OutputTensor, ...], ...]:
        answers, start = [], 0
        for part in parts:
            rows = slice(start, start + part.samples)
            start += part.samples
            answers.append(
                tuple(
                    _deliver(arrays[index][rows] if self.batched else arrays[index], destination)
                    for index, destination in zip(part.wanted, part.destinations, strict=True)
                )
            )
        return tuple(answers)

    def _whole_shape(self, spec: TensorSpec, samples: int) -> tuple[int, ...]:
        # A free size is warmed up as 1; the run itself takes it from the request.
        fixed = tuple(1 if size < 0 else size for size in spec.shape)
        return (samples, *fixed) if self.batched else fixed

    def _check_names(self, model: Path) -> None:
        have = read_signature(self._session, model)
        for ours, theirs in ((self.inputs, have.inputs), (self.outputs, have.outputs)):
            if [(t.name, t.dtype) for t in ours] != [(t.name, t.dtype) for t in theirs]:
                raise BundleError(
                    f"{model}: the specification says {[(t.name, t.dtype) for t in ours]}, "
                    f"the file has {[(t.name, t.dtype) for t in theirs]}; export the model again"
                )


def open_session(model: Path, threads: int) -> Any:
    """A CPU session for an ONNX file. Raises BundleError."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Idle cores belong to the edge and to other models.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base class
        raise BundleError(f"{model}: ONNX Runtime cannot load it ({_first_line(error)})") from error


def read_signature(session: Any, model: Path) -> Signature:
    """The tensors that a session takes and gives, in the file's order. Raises BundleError."""
    return Signature(
        tuple(_tensor_spec(node, model) for node in session.get_inputs()),
        tuple(_tensor_spec(node, model) for node in session.get_outputs()),
    )


def _tensor_spec(node: Any, model: Path) -> TensorSpec:
    if node.type not in _OIP_BY_ORT_TYPE:
        raise BundleError(f"{model}: tensor {node.name!r} is a {node.type}, which cannot be served")
    shape = tuple(size if isinstance(size, int) else -1 for size in node.shape or ())
    return TensorSpec(node.name, _OIP_BY_ORT_TYPE[node.type], shape)


def _bind_input(binding: Any, staging: _Staging, shape: tuple[int, ...]) -> None:
    spec = staging.spec
    binding.bind_input(spec.name, "cpu", 0, spec.numpy_dtype.type, list(shape), staging.memory.ctypes.data)


def _bind_output(binding: Any, staging: _Staging, shape: tuple[int, ...]) -> None:
    spec = staging.spec
    staging.ensure(math.prod(shape) * spec.numpy_dtype.itemsize)
    binding.bind_output(spec.name, "cpu", 0, spec.numpy_dtype.type, list(shape), staging.memory.ctypes.data)


def _deliver(rows: np.ndarray, destination: memoryview | None) -> OutputTensor:
    if destination is None:
        own = np.array(rows, order="C", copy=True)
        return OutputTensor(own.shape, own.reshape(-1).view(np.uint8).data)
    np.copyto(np.frombuffer(destination, rows.dtype).reshape(rows.shape), rows)
    return OutputTensor(rows.shape, destination)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
