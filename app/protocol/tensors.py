"""The records between HTTP or gRPC and the meaning of an inference request.

Each protocol fills in a `RawRequest` with the tensors that it has and ways to read their bytes, and gets back a tuple
of `TensorOut`. Knows no JSON, protobuf or headers; `inference` checks against the model.
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

# JSON has no form for these types that all readers round alike.
BINARY_ONLY = frozenset({"FP16", "BF16"})


class Source(Protocol):
    """A source of one input's values."""

    def read(self, target: Target) -> Values:
        """Read the values: bytes in the slab, an array, or bytes to copy later.

        Raises InvalidRequest (through `target.wrong`) or Unsupported.
        """


@dataclass(frozen=True, slots=True)
class TensorIn:
    """One input as received, not yet checked against the model."""

    name: str
    datatype: str
    shape: Sequence[object]
    source: Source


class OutputIn(msgspec.Struct, gc=False):
    """One wanted output as received, with its parameters."""

    name: str
    parameters: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as received. If `outputs` is empty, all outputs are wanted.

    `binary_by_default` is the form of outputs whose parameters name none. `memory` has the regions of shared memory.
    """

    id: str | None
    parameters: Mapping[str, object]
    inputs: Sequence[TensorIn]
    outputs: Sequence[OutputIn]
    memory: SharedMemory
    binary_by_default: bool = False


class TensorOut(NamedTuple):
    """One output. `data` is a view of the slab.

    With `elsewhere` the bytes were written to the client's shared memory, and `data` is empty.
    """

    spec: TensorSpec
    shape: Shape
    data: memoryview
    binary: bool
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """The expected form of one input: the model's tensor, in the client's shape.

    `wrong` makes the error for a message. With `text_only`, strings must be UTF-8.
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
        """Raise InvalidRequest unless `nbytes` is exactly the size of this tensor."""
        expected = math.prod(self.shape) * self.spec.numpy_dtype.itemsize
        if nbytes != expected:
            raise self.wrong(
                f"input byte size mismatch for input '{self.spec.name}' for model {self.model}. "
                f"Expected {expected}, got {nbytes}"
            )

    def check_bytes(self, data: memoryview) -> None:
        """Raise InvalidRequest unless these bytes are exactly this tensor."""
        if not self.spec.is_strings:
            self.check_size(len(data))
            return
        subject = f"inference input '{self.spec.name}'"
        objection = objection_to_strings(data, self.values, subject, text_only=self.text_only)
        if objection:
            raise self.wrong(f"{objection} for model {self.model}")

    def packed(self, elements: Sequence[bytes]) -> np.ndarray:
        """Pack single strings into a tensor. Raises InvalidRequest."""
        data = pack(elements)
        self.check_bytes(memoryview(data))
        return np.frombuffer(data, np.uint8)


def in_range(values: np.ndarray, target: Target) -> np.ndarray:
    """Convert values to the target's dtype. Raises InvalidRequest for an integer that does not fit."""
    spec, dtype = target.spec, target.spec.numpy_dtype
    if dtype.kind in "iu" and values.size:
        limits = np.iinfo(dtype.name)
        if values.min() < limits.min or values.max() > limits.max:
            raise target.wrong(f"data of input '{spec.name}' must lie in {limits.min}..{limits.max} for {spec.dtype}")
    with np.errstate(over="ignore"):  # numbers beyond FP32 become infinity, as in other JSON readers
        return values.astype(dtype)


def brief(value: object) -> str:
    """Format a client's value for an error message, short and shallow."""
    return reprlib.repr(value)


def shown(shape: Sequence[object]) -> str:
    """Format a shape for an error message."""
    if len(shape) > 16:
        return f"{len(shape)} dimensions"
    return "[" + ",".join(str(size) for size in shape) + "]"


_RESERVED_PREFIX = "triton_"
# The only reserved key that clients send; the gRPC stream reads it.
_ALLOWED = frozenset({"triton_enable_empty_final_response"})

# JSON readers disagree on larger numbers.
_TOO_LARGE = 1 << 53


def check_parameters(parameters: Mapping[str, object]) -> None:
    """Raise InvalidRequest for a reserved key, and for a value of a type that the protocol does not have."""
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
    """Read a non-negative integer parameter of `what`, 0 if absent. Raises InvalidRequest."""
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
    """An input whose bytes are in shared memory until the slab has room for them."""

    place: SharedPlace
    target: Target

    @property
    def nbytes(self) -> int:
        return self.place.nbytes

    def write_into(self, view: memoryview) -> None:
        """Copy the bytes, then check the copy. Raises InvalidRequest."""
        self.place.region.read_into(view, self.place.offset)
        self.target.check_bytes(view)


# BYTES are packed in all three forms; as an array, they are an array of packed bytes.
Values: TypeAlias = TensorRef | np.ndarray | SharedBytes


@dataclass(frozen=True, slots=True)
class SharedInput:
    """The source of an input in shared memory."""

    place: SharedPlace

    def read(self, target: Target) -> SharedBytes:
        if not target.spec.is_strings:
            target.check_size(self.place.nbytes)
        return SharedBytes(self.place, target)


def shared_place(parameters: Mapping[str, object], what: str, memory: SharedMemory) -> SharedPlace:
    """The place in shared memory that a tensor's parameters name. `what` names the tensor in messages.

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
    """Raise InvalidRequest if an output of `nbytes` does not fit its place."""
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
