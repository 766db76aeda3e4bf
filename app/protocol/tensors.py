"""The records between the wires and the meaning of an inference request.

A wire fills in `RawRequest`: which tensors it has and how to get at their bytes. What comes back to it is a
tuple of `TensorOut`. Knows nothing of JSON, protobuf or headers; `inference` compares with the model.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np

from convoy.app.calls.shared_memory import Region, SharedMemory
from convoy.app.scheduling.request import Shape, TensorRef
from convoy.models.errors import InvalidRequest
from convoy.models.spec import TensorSpec
from convoy.models.tensors import objection_to_strings, pack

# JSON has no form for them that every reader would round alike.
BINARY_ONLY = frozenset({"FP16", "BF16"})


class Source(Protocol):
    """Where one input's values are on its wire."""

    def read(self, target: Target) -> Values:
        """The values as they must be: bytes in the slab, an array of them, or bytes to be fetched.

        Raises InvalidRequest (through `target.wrong`) or Unsupported.
        """


@dataclass(frozen=True, slots=True)
class TensorIn:
    """One input as a wire brought it; nothing of it has been compared with the model yet."""

    name: str
    datatype: str
    shape: Sequence[object]
    source: Source


class OutputIn(msgspec.Struct, gc=False):
    """One wanted output as a wire brought it, with its parameters."""

    name: str
    parameters: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A whole request as a wire brought it. `outputs` may be empty: then all of them are wanted.

    `binary_by_default` is the form of an output whose parameters say nothing of it, `memory` where the
    shared memory is that outputs may name.
    """

    id: str | None
    parameters: Mapping[str, object]
    inputs: Sequence[TensorIn]
    outputs: Sequence[OutputIn]
    memory: SharedMemory
    binary_by_default: bool = False


class TensorOut(NamedTuple):
    """One answer, in the order in which it was asked for. `data` is a view of the slab.

    With `elsewhere` the client has the bytes already, in memory of its own, and `data` is empty.
    """

    spec: TensorSpec
    shape: Shape
    data: memoryview
    binary: bool
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """What one input must become: the model's tensor, in the whole shape that the client gave it.

    `wrong` makes the error for a message. With `text_only` strings must be UTF-8.
    """

    spec: TensorSpec
    shape: Shape
    model: str
    wrong: Callable[[str], InvalidRequest]
    text_only: bool = False

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    def check_size(self, nbytes: int) -> None:
        """Raises InvalidRequest unless `nbytes` is exactly the size of this tensor."""
        expected = math.prod(self.shape) * self.spec.numpy_dtype.itemsize
        if nbytes != expected:
            raise self.wrong(
                f"input byte size mismatch for input '{self.spec.name}' for model {self.model}. "
                f"Expected {expected}, got {nbytes}"
            )

    def check_bytes(self, data: memoryview) -> None:
        """Raises InvalidRequest unless these bytes are exactly this tensor."""
        if not self.spec.is_strings:
            self.check_size(len(data))
            return
        subject = f"inference input '{self.spec.name}'"
        objection = objection_to_strings(data, self.values, subject, text_only=self.text_only)
        if objection:
            raise self.wrong(f"{objection} for model {self.model}")

    def packed(self, elements: Sequence[bytes]) -> np.ndarray:
        """A tensor of strings that came one by one. Raises InvalidRequest."""
        data = pack(elements)
        self.check_bytes(memoryview(data))
        return np.frombuffer(data, np.uint8)


def in_range(values: np.ndarray, target: Target) -> np.ndarray:
    """The values in the target's dtype. Raises InvalidRequest for an integer that does not fit."""
    spec, dtype = target.spec, target.spec.numpy_dtype
    if dtype.kind in "iu" and values.size:
        limits = np.iinfo(dtype.name)
        if values.min() < limits.min or values.max() > limits.max:
            raise target.wrong(f"data of input '{spec.name}' must lie in {limits.min}..{limits.max} for {spec.dtype}")
    with np.errstate(over="ignore"):  # a number beyond FP32 becomes infinity, as in every JSON reader
        return values.astype(dtype)


def brief(value: object) -> str:
    """A client's value for an error message: never long, and never deep, whatever was sent."""
    return reprlib.repr(value)


def shown(shape: Sequence[object]) -> str:
    """A shape for an error message."""
    if len(shape) > 16:
        return f"{len(shape)} dimensions"
    return "[" + ",".join(str(size) for size in shape) + "]"


_RESERVED_PREFIX = "triton_"
# The one reserved key that clients do send; the gRPC stream reads it.
_ALLOWED = frozenset({"triton_enable_empty_final_response"})

# From here on JSON's readers do not agree on a number.
_TOO_LARGE = 1 << 53


def check_parameters(parameters: Mapping[str, object]) -> None:
    """Raises InvalidRequest for a reserved key, and for a value that the protocol has no kind for."""
    for name, value in parameters.items():
        if name.startswith(_RESERVED_PREFIX) and name not in _ALLOWED:
            raise InvalidRequest(
                f"parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified; "
                f"rename '{name[:100]}'"
            )
        if not isinstance(value, str | int | float | bool):
            raise InvalidRequest(
                f"parameter '{name[:100]}' has an invalid type; it must be a string, a number, true or false"
            )


def whole_number(parameters: Mapping[str, object], name: str, what: str) -> int:
    """A parameter of `what` that counts something; 0 where it is not given. Raises InvalidRequest."""
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value < _TOO_LARGE:
        raise InvalidRequest(
            f"'{name}' in 'parameters' of {what} must be a whole number >= 0 and < {_TOO_LARGE}, got {brief(value)}"
        )
    return value


REGION = "shared_memory_region"
_MAX_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """`nbytes` bytes from `offset` within a region."""

    region: Region
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """An input whose bytes are still outside; the slab gets them when it has room."""

    place: SharedPlace
    target: Target

    @property
    def nbytes(self) -> int:
        return self.place.nbytes

    def write_into(self, view: memoryview) -> None:
        """Copy the bytes and check what was copied. Raises InvalidRequest."""
        self.place.region.read_into(view, self.place.offset)
        self.target.check_bytes(view)


# BYTES are packed in each of the three forms; as an array they are an array of the packed bytes.
Values: TypeAlias = TensorRef | np.ndarray | SharedBytes


@dataclass(frozen=True, slots=True)
class SharedInput:
    """Where an input's values are, for `TensorIn`."""

    place: SharedPlace

    def read(self, target: Target) -> SharedBytes:
        if not target.spec.is_strings:
            target.check_size(self.place.nbytes)
        return SharedBytes(self.place, target)


def shared_place(parameters: Mapping[str, object], what: str, memory: SharedMemory) -> SharedPlace:
    """The place that a tensor's parameters name; `what` is the tensor, for messages.

    Raises InvalidRequest, NotFound or Unsupported.
    """
    memory.check_allowed()
    name = parameters.get(REGION)
    if not isinstance(name, str):
        raise InvalidRequest(f"'{REGION}' of {what} must be the name of a region, got {brief(name)}")
    region = memory.find(name)
    offset = _whole_number(parameters, "shared_memory_offset", what, default=0)
    nbytes = _whole_number(parameters, "shared_memory_byte_size", what, default=None)
    if offset > region.byte_size:
        raise InvalidRequest(
            f"Invalid offset for shared memory region: '{name}'; "
            f"it is {offset}, the region has {region.byte_size} bytes"
        )
    if offset + nbytes > region.byte_size:
        raise InvalidRequest(
            f"Invalid offset + byte size for shared memory region: '{name}'; "
            f"they are {offset} + {nbytes}, the region has {region.byte_size} bytes"
        )
    return SharedPlace(region, offset, nbytes)


def check_room(place: SharedPlace, spec: TensorSpec, nbytes: int) -> None:
    """Raises InvalidRequest where an output of `nbytes` does not fit its place."""
    if nbytes > place.nbytes:
        raise InvalidRequest(
            f"shared memory size specified with the request for output '{spec.name}' ({place.nbytes} bytes) "
            f"should be at least {nbytes} bytes to hold the results"
        )


def _whole_number(parameters: Mapping[str, object], name: str, what: str, *, default: int | None) -> int:
    value = parameters.get(name, default)
    if type(value) is not int or not 0 <= value < _MAX_BYTES:
        raise InvalidRequest(f"'{name}' of {what} must be a whole number of bytes, got {brief(value)}")
    return value
