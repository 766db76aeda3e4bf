"""A batch's tensors as ONNX Runtime names, types and binds them.

Strings cannot be bound: ONNX Runtime takes them as Python objects, UTF-8 only.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from convoy.app.engines.staged import StagingBuffer
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec

_NAMED_ALIKE = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
_OIP_BY_ORT_TYPE = {f"tensor({name.lower()})": name for name in _NAMED_ALIKE} | {
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


def bind_input(binding: Any, staging: StagingBuffer, shape: tuple[int, ...]) -> None:
    spec = staging.spec
    binding.bind_input(spec.name, "cpu", 0, element_type(spec), list(shape), staging.memory.ctypes.data)


def bind_output(binding: Any, staging: StagingBuffer, shape: tuple[int, ...]) -> None:
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


def run_arrays_on(session: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output of a session for whole arrays, BF16 as `V2`, of which its usual way knows nothing."""
    outputs = session.get_outputs()
    if not any(node.type == "tensor(bfloat16)" for node in (*session.get_inputs(), *outputs)):
        names = [node.name for node in outputs]
        return dict(zip(names, session.run(names, dict(arrays)), strict=True))
    given = {name: _value_of(array) for name, array in arrays.items()}
    values = session.run_with_ort_values([node.name for node in outputs], given)
    return {
        node.name: np.array(unbound_array(tensor_spec(node, Path()), value))
        for node, value in zip(outputs, values, strict=True)
    }


def _value_of(array: np.ndarray) -> ort.OrtValue:
    if array.dtype.kind != "V":
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BFLOAT16)


def element_type(spec: TensorSpec) -> Any:
    """What a binding calls the tensor's dtype."""
    return _ONNX_BFLOAT16 if spec.dtype == "BF16" else spec.numpy_dtype.type
