"""Arrays by name as the protocol's tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from convoy.app.client.errors import NOT_A_SERVER
from convoy.app.python.inputs import datatype_of, named_arrays, string_bytes
from convoy.models.errors import InvalidRequest, RequestError
from convoy.models.spec import NUMPY_DTYPES, TensorSpec
from convoy.models.tensors import from_bytes, pack


class NamedTensor(NamedTuple):
    """A tensor as it travels: the protocol's dtype, the whole shape, and its bytes."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes


def tensors_of(inputs: Mapping[str, np.ndarray]) -> list[NamedTensor]:
    """In their order, little-endian. Raises InvalidRequest for what no tensor can hold."""
    return [_tensor_of(name, array) for name, array in named_arrays(inputs)]


def array_from(tensor: NamedTensor) -> np.ndarray:
    """An array that the caller owns; strings are bytes, BF16 is V2. Raises RequestError for what fits no shape."""
    try:
        spec = TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape))
        return from_bytes(memoryview(tensor.data), spec, spec.shape).copy()
    except Exception as error:  # a dtype that is none, too few bytes, strings that are none
        raise RequestError(f"output '{tensor.name}' is not the tensor that it says ({error}); {NOT_A_SERVER}") from None


def _tensor_of(name: str, array: np.ndarray) -> NamedTensor:
    datatype = datatype_of(array)
    if datatype not in NUMPY_DTYPES:
        raise InvalidRequest(f"input '{name}' is {datatype}, which no tensor can be; send {', '.join(NUMPY_DTYPES)}")
    if datatype == "BYTES":
        data = bytes(pack(_strings(name, array)))
    elif datatype == "BF16":
        data = array.tobytes()
    else:
        data = array.astype(NUMPY_DTYPES[datatype], copy=False).tobytes()
    return NamedTensor(name, datatype, list(array.shape), data)


def _strings(name: str, array: np.ndarray) -> Iterator[bytes]:
    for element in array.flat:
        found = string_bytes(element)
        if found is None:
            raise InvalidRequest(f"input '{name}' must hold str or bytes, got {type(element).__name__}")
        yield found
