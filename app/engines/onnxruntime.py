"""ONNX Runtime on the CPU.

Staging buffers are bound once per batch size and run in place. After warm-up, a batch allocates no tensors, except for
outputs of unknown size and for models with strings, which cannot be bound. All sessions share the memory for
intermediate tensors, so an idle session only needs memory for its weights.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from convoy.app.engines.base import Signature, check_names
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.memory import FreeRuns
from convoy.app.engines.onnx_session import Level, new_session, session_options
from convoy.app.engines.parts import Landed, Shapes
from convoy.app.engines.staged import StagedEngine
from convoy.models.bundle import Precision
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec

LIBRARY = f"onnxruntime {ort.__version__}"
# Words in the library's messages when an output does not fit its place.
_SHAPE_WORDS = re.compile(r"shape|dimension", re.IGNORECASE)
_ARENA_LOCK = Lock()
_NEWER_IR = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_NAMED_ALIKE = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
_OIP_BY_ORT_TYPE = {f"tensor({name.lower()})": name for name in _NAMED_ALIKE} | {
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
    "tensor(bfloat16)": "BF16",
}
_ONNX_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16; numpy has no such type


class _SessionBinding(NamedTuple):
    """A session's binding for some shapes, and its outputs; None for an output of unknown size."""

    binding: Any
    outputs: list[Landed] | None


class OnnxRuntimeCpuEngine(StagedEngine):
    """One session, whose intra-op threads do not spin."""

    name = "onnxruntime-cpu"
    text_only = True

    def _open(self, model: Path, precision: Precision, threads: int) -> str:
        is_free = FreeRuns.wanted(self.inputs)
        self._session = open_session(model, threads, any_shape=is_free)
        self._run_options = _giving_back() if is_free else None
        check_names(model, read_signature(self._session, model), self.inputs, self.outputs)
        dtypes = {spec.dtype for spec in (*self.inputs, *self.outputs)}
        self._has_strings = "BYTES" in dtypes
        if self._has_strings and "BF16" in dtypes:
            # Strings cannot be bound, and BF16 works only this way.
            raise BundleError(f"{model}: has both BYTES and BF16 tensors, which cannot be served together; use FP32")
        return LIBRARY

    def close(self) -> None:
        super().close()
        self._session = None

    def _execute(self, shapes: Shapes, samples: int) -> list[Landed]:
        options = self._run_options if self._is_large else None
        try:
            return (
                self._run_strings(shapes, options) if self._has_strings else self._run_bound(shapes, samples, options)
            )
        except Exception as error:  # onnxruntime's errors share no base class
            is_of_shapes = not self._has_strings and _SHAPE_WORDS.search(str(error))
            if is_of_shapes and (unplaced := self._run_unplaced(shapes, options)) is not None:
                return unplaced
            raise EngineFailure(first_line(error)) from error

    def _run_bound(self, shapes: Shapes, samples: int, options: Any) -> list[Landed]:
        bound: _SessionBinding = self._bound(shapes, samples)
        if bound.outputs is None:
            # A binding remembers the size of its last output and refuses another.
            self._bind_outputs(bound.binding, samples)
        self._session.run_with_iobinding(bound.binding, options)
        if bound.outputs is not None:
            return bound.outputs
        return [
            Landed(_unbound_array(staging.spec, value))
            if staging.spec.sample_bytes is None
            else staging.landed(self.whole_shape(staging.spec, samples))
            for staging, value in zip(self._staging_out, bound.binding.get_outputs(), strict=True)
        ]

    def _run_unplaced(self, shapes: Shapes, options: Any) -> list[Landed] | None:
        """Run without placed outputs, to name the one that is not as declared. None if that fails as well."""
        try:
            binding = self._binding_of_inputs(shapes)
            for spec in self.outputs:
                binding.bind_output(spec.name, "cpu")
            self._session.run_with_iobinding(binding, options)
        except Exception:  # onnxruntime's errors share no base class
            return None
        values = zip(self.outputs, binding.get_outputs(), strict=True)
        return [Landed(_unbound_array(spec, value)) for spec, value in values]

    def _run_strings(self, shapes: Shapes, options: Any) -> list[Landed]:
        staged = zip(self._staging_in, shapes, strict=True)
        feeds = {staging.spec.name: staging.array(shape) for staging, shape in staged}
        return [Landed(array) for array in self._session.run([spec.name for spec in self.outputs], feeds, options)]

    def _bind(self, shapes: Shapes, samples: int) -> _SessionBinding:
        binding = self._binding_of_inputs(shapes)
        if any(staging.spec.sample_bytes is None for staging in self._staging_out):
            return _SessionBinding(binding, None)
        self._bind_outputs(binding, samples)
        outputs = [staging.landed(self.whole_shape(staging.spec, samples)) for staging in self._staging_out]
        return _SessionBinding(binding, outputs)

    def _binding_of_inputs(self, shapes: Shapes) -> Any:
        binding = self._session.io_binding()
        for staging, shape in zip(self._staging_in, shapes, strict=True):
            spec = staging.spec
            binding.bind_input(spec.name, "cpu", 0, element_type(spec), list(shape), staging.memory.ctypes.data)
        return binding

    def _bind_outputs(self, binding: Any, samples: int) -> None:
        binding.clear_binding_outputs()
        for staging in self._staging_out:
            spec, shape = staging.spec, self.whole_shape(staging.spec, samples)
            if spec.sample_bytes is None:
                binding.bind_output(spec.name, "cpu")
                continue
            staging.ensure(math.prod(shape) * spec.numpy_dtype.itemsize)
            binding.bind_output(spec.name, "cpu", 0, element_type(spec), list(shape), staging.memory.ctypes.data)


def _giving_back() -> Any:
    """Options for a run whose memory is returned to the system. By default the library keeps it."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


@cache
def _register_arena() -> None:
    """Register the arena that sessions share, as large as concurrent runs need."""
    kind = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(kind, None)


def open_session(model: Path, threads: int, *, any_shape: bool = False) -> Any:
    """A CPU session for an ONNX file. Raises BundleError.

    `any_shape` means that it will see more shapes than it may cache.
    """
    options = session_options(threads=threads)
    # A memory pattern is kept for ever for each combination of shapes.
    options.enable_mem_pattern = not any_shape
    # Weights are returned to the system with their session; in an arena they would stay.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # A session that frees the memory of large runs needs its own arena; others would have to allocate again.
    if not any_shape:
        with _ARENA_LOCK:
            _register_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
    return _opened(model, options)


def open_original(model: Path, threads: int) -> Any:
    """A session without any optimisation, the reference for a served one. Raises BundleError."""
    return _opened(model, session_options(threads=threads, level=Level.ORT_DISABLE_ALL))


def _opened(model: Path, options: Any) -> Any:
    try:
        return new_session(model, options)
    except Exception as error:  # onnxruntime's errors share no base class
        if version := _NEWER_IR.search(str(error)):
            own, known = version.groups()
            raise BundleError(
                f"{model}: its IR version is {own}, but ONNX Runtime supports at most {known}; save it with an "
                f"older version: load it with onnx.load, set model.ir_version = {known}, and onnx.save it"
            ) from error
        raise BundleError(f"{model}: ONNX Runtime cannot load it ({first_line(error)})") from error


def read_signature(session: Any, model: Path) -> Signature:
    """The inputs and outputs of a session, in the file's order. Raises BundleError."""
    return Signature(
        tuple(_tensor_spec(node, model) for node in session.get_inputs()),
        tuple(_tensor_spec(node, model) for node in session.get_outputs()),
    )


def first_line(error: Exception) -> str:
    """The first sentence of a library error in one line, without its stack.

    Sentences may continue over several lines, such as lists of sizes.
    """
    lines = str(error).strip().splitlines()
    stack = (index for index, line in enumerate(lines) if index and re.match(r"\s*(#\d|0x|Stacktrace|\*+$)", line))
    words = " ".join(" ".join(lines[: next(stack, len(lines))]).split())
    return words or type(error).__name__


def _tensor_spec(node: Any, model: Path) -> TensorSpec:
    """A graph's tensor as the file declares it. Raises BundleError."""
    if node.type not in _OIP_BY_ORT_TYPE:
        raise BundleError(f"{model}: tensor {node.name!r} is a {node.type}, which cannot be served")
    shape = tuple(size if isinstance(size, int) else -1 for size in node.shape or ())
    return TensorSpec(node.name, _OIP_BY_ORT_TYPE[node.type], shape)


def _unbound_array(spec: TensorSpec, value: Any) -> np.ndarray:
    """An output in ONNX Runtime's memory, as an array over it or a copy."""
    if spec.dtype != "BF16":
        array: np.ndarray = value.numpy()
        return array
    shape = tuple(value.shape())
    data = ctypes.string_at(value.data_ptr(), math.prod(shape) * spec.numpy_dtype.itemsize)
    return np.frombuffer(data, spec.numpy_dtype).reshape(shape)


def run_arrays_on(session: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a session on whole arrays and return every output. Strings are `bytes` of UTF-8, BF16 is `V2`.

    Strings in outputs are `str`. Raises EngineFailure.
    """
    nodes = session.get_outputs()
    names = [node.name for node in nodes]
    try:
        if not any(node.type == "tensor(bfloat16)" for node in (*session.get_inputs(), *nodes)):
            given = {name: _as_text(array) for name, array in arrays.items()}
            return dict(zip(names, session.run(names, given), strict=True))
        # The session's usual way does not support BF16.
        values = session.run_with_ort_values(names, {name: _value_of(array) for name, array in arrays.items()})
    except Exception as error:  # onnxruntime's errors share no base class
        raise EngineFailure(first_line(error)) from error
    return {
        node.name: np.array(_unbound_array(_tensor_spec(node, Path()), value))
        for node, value in zip(nodes, values, strict=True)
    }


def _as_text(array: np.ndarray) -> np.ndarray:
    """Convert strings for the library, which would format `bytes` as Python does."""
    return np.vectorize(bytes.decode, otypes=[object])(array) if array.dtype == object else array


def _value_of(array: np.ndarray) -> ort.OrtValue:
    if array.dtype.kind != "V":
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BFLOAT16)


def element_type(spec: TensorSpec) -> Any:
    """A binding's name for the tensor's dtype."""
    return _ONNX_BFLOAT16 if spec.dtype == "BF16" else spec.numpy_dtype.type
