"""numpy arrays as an inference request, and its answers as numpy arrays.

Knows dtypes and bytes; names, shapes and sizes are compared with the model where every wire's are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from convoy.app.calls.shared_memory import SharedMemory
from convoy.app.protocol.tensors import OutputIn, RawRequest, Target, TensorIn, TensorOut
from convoy.models.errors import InvalidRequest
from convoy.models.spec import NUMPY_DTYPES
from convoy.models.tensors import from_bytes

_BY_NUMPY_DTYPE = {dtype: name for name, dtype in NUMPY_DTYPES.items() if dtype.kind not in "OV"}
_NO_MEMORY = SharedMemory(is_allowed=False)


class ArraySource(NamedTuple):
    """One input's values."""

    array: np.ndarray

    def read(self, target: Target) -> np.ndarray:
        """In the machine's own byte order; strings packed. Raises InvalidRequest."""
        if target.spec.is_strings:
            return target.packed([_string(element, target) for element in self.array.flat])
        dtype = target.spec.numpy_dtype
        return self.array.view(dtype) if dtype.kind == "V" else self.array.astype(dtype, copy=False)


def request_of(
    inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None, priority: int, request_id: str | None
) -> RawRequest:
    """What is asked, as every wire brings it. Raises InvalidRequest where the inputs are no arrays by name."""
    return RawRequest(
        request_id,
        {"priority": priority} if priority else {},
        [TensorIn(name, datatype_of(one), one.shape, ArraySource(one)) for name, one in named_arrays(inputs)],
        [OutputIn(name, {}) for name in outputs or ()],
        _NO_MEMORY,
        binary_by_default=True,
    )


def named_arrays(inputs: Mapping[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    """In their order. Raises InvalidRequest where they are no arrays by name."""
    if not isinstance(inputs, Mapping):
        raise InvalidRequest(f"inputs must be arrays by name, such as {{'images': array}}; got {type(inputs).__name__}")
    return [(str(name), np.asarray(values)) for name, values in inputs.items()]


def bytes_of(request: RawRequest) -> int:
    """So much there is to look at."""
    return sum(one.source.array.nbytes for one in request.inputs if isinstance(one.source, ArraySource))


def datatype_of(array: np.ndarray) -> str:
    """The protocol's name of a dtype; numpy's own where the protocol has none."""
    dtype = array.dtype
    if dtype.kind in "OSU":
        return "BYTES"
    if dtype.kind == "V":  # BF16 is unknown to numpy: two opaque bytes, or ml_dtypes' own
        return "BF16" if dtype.itemsize == 2 and dtype.names is None else str(dtype)
    return _BY_NUMPY_DTYPE.get(dtype.newbyteorder("="), str(dtype))


def array_of(answer: TensorOut) -> np.ndarray:
    """An array that the caller owns."""
    return from_bytes(answer.data, answer.spec, answer.shape).copy()


def string_bytes(element: object) -> bytes | None:
    """A string as it travels; None for what is none."""
    return element.encode() if isinstance(element, str) else element if isinstance(element, bytes) else None


def _string(element: object, target: Target) -> bytes:
    found = string_bytes(element)
    if found is None:
        raise target.wrong(f"input '{target.spec.name}' must hold str or bytes, got {type(element).__name__}")
    return found
