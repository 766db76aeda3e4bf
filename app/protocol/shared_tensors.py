"""Tensors in shared memory: a request names a place in a registered region instead of sending or getting bytes.

The same for every wire. Inputs are copied into the slab and outputs out of it, so that a client that
changes its memory while it is read harms only its own answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from convoy.app.calls.shared_memory import Region, SharedMemory
from convoy.app.protocol.tensors import Target, brief
from convoy.models.errors import InvalidRequest
from convoy.models.spec import TensorSpec

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
        raise InvalidRequest(f"'{REGION}' of {what} must be a region's name, got {brief(name)}")
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
