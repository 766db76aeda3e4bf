"""A batch's tensors on their way into and out of ONNX Runtime.

Tensors of numbers are gathered into memory that is bound to the session and never moves while it fits.
Strings cannot be bound: ONNX Runtime takes them as Python objects, UTF-8 only.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convoy.app.engines.base import EngineFailure, Part
from convoy.app.engines.delivery import Landed
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec
from convoy.models.tensors import unpack

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
    "tensor(string)": "BYTES",
    "tensor(bfloat16)": "BF16",
}
_ONNX_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16; numpy has no type that would say it


def tensor_spec(node: Any, model: Path) -> TensorSpec:
    """A graph's tensor as the file declares it. Raises BundleError."""
    if node.type not in _OIP_BY_ORT_TYPE:
        raise BundleError(f"{model}: tensor {node.name!r} is a {node.type}, which cannot be served")
    shape = tuple(size if isinstance(size, int) else -1 for size in node.shape or ())
    return TensorSpec(node.name, _OIP_BY_ORT_TYPE[node.type], shape)


def has_strings(model: Path, tensors: Sequence[TensorSpec]) -> bool:
    """Whether any of them cannot be bound. Raises BundleError where that is not the only difficulty."""
    dtypes = {spec.dtype for spec in tensors}
    if {"BYTES", "BF16"} <= dtypes:
        # The one cannot be bound, the other comes no other way.
        raise BundleError(f"{model}: has tensors of BYTES and of BF16, which cannot be served together; use FP32")
    return "BYTES" in dtypes


class Staging:
    """Memory for one tensor of a batch. Grows when a larger shape than ever comes, and never shrinks."""

    def __init__(self, spec: TensorSpec, capacity_bytes: int) -> None:
        self.spec = spec
        self.is_strings = spec.is_strings
        self.memory = np.zeros(capacity_bytes, np.uint8)
        self.view = self.memory.data
        self._strings: list[str] = []

    def ensure(self, nbytes: int) -> bool:
        """Whether the memory moved, so that bindings to it are void."""
        if nbytes <= len(self.memory):
            return False
        self.memory = np.zeros(nbytes, np.uint8)
        self.view = self.memory.data
        return True

    def clear(self, shape: tuple[int, ...]) -> None:
        """Zeros, or empty strings, for a run that nobody asked for."""
        if not self.is_strings:
            self.memory[: math.prod(shape) * self.spec.numpy_dtype.itemsize] = 0
        self._strings = [""] * math.prod(shape)

    def take_strings(self, parts: Sequence[Part], index: int) -> None:
        """The batch's strings. Raises EngineFailure where there are none in these bytes, or none of UTF-8."""
        try:
            self._strings = [element.decode() for part in parts for element in unpack(part.inputs[index])]
        except ValueError as error:
            raise EngineFailure(f"input '{self.spec.name}' cannot be read as strings: {error}") from error

    def array(self, shape: tuple[int, ...]) -> np.ndarray:
        """What lies here, as an array of the tensor's dtype."""
        if self.is_strings:
            strings = np.empty(len(self._strings), object)
            strings[:] = self._strings
            return strings.reshape(shape)
        nbytes = math.prod(shape) * self.spec.numpy_dtype.itemsize
        return self.memory[:nbytes].view(self.spec.numpy_dtype).reshape(shape)

    def landed(self, shape: tuple[int, ...]) -> Landed:
        """The same as an output of a run, for as long as the memory does not move. Not for strings."""
        array = self.array(shape)
        return Landed(array, self.view[: array.nbytes])


def bind_input(binding: Any, staging: Staging, shape: tuple[int, ...]) -> None:
    spec = staging.spec
    binding.bind_input(spec.name, "cpu", 0, element_type(spec), list(shape), staging.memory.ctypes.data)


def bind_output(binding: Any, staging: Staging, shape: tuple[int, ...]) -> None:
    spec = staging.spec
    staging.ensure(math.prod(shape) * spec.numpy_dtype.itemsize)
    binding.bind_output(spec.name, "cpu", 0, element_type(spec), list(shape), staging.memory.ctypes.data)


def unbound_array(spec: TensorSpec, value: Any) -> np.ndarray:
    """An output in ONNX Runtime's own memory, as an array over it or a copy."""
    if spec.dtype != "BF16":
        array: np.ndarray = value.numpy()
        return array
    shape = tuple(value.shape())
    data = ctypes.string_at(value.data_ptr(), math.prod(shape) * spec.numpy_dtype.itemsize)
    return np.frombuffer(data, spec.numpy_dtype).reshape(shape)


def element_type(spec: TensorSpec) -> Any:
    """What a binding calls the tensor's dtype."""
    return _ONNX_BFLOAT16 if spec.dtype == "BF16" else spec.numpy_dtype.type
