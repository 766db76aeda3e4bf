"""The records between the wires and the meaning of an inference request.

A wire fills in `Asked`: which tensors it has and how to get at their bytes. What comes back to it is a
tuple of `TensorOut`. Knows nothing of JSON, protobuf or headers; `inference` compares with the model.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from app.scheduling.request import Shape, TensorRef
from models.errors import InvalidRequest
from models.spec import TensorSpec

_MAX_SHOWN_DIMENSIONS = 16


class Source(Protocol):
    """Where one input's values are on its wire."""

    def read(self, target: Target) -> TensorRef | np.ndarray:
        """The values as they must be: bytes in the slab, or an array of the target's dtype.

        Raises InvalidRequest (through `target.wrong`) or Unsupported.
        """


@dataclass(frozen=True, slots=True)
class TensorIn:
    """One input as a wire brought it; nothing of it has been compared with the model yet."""

    name: str
    datatype: str
    shape: Sequence[object]
    source: Source


@dataclass(frozen=True, slots=True)
class OutputIn:
    """One wanted output as a wire brought it, with its parameters."""

    name: str
    parameters: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Asked:
    """A whole request as a wire brought it. `outputs` may be empty: then all of them are wanted.

    `binary_by_default` is the form of an output whose parameters say nothing of it.
    """

    id: str | None
    parameters: Mapping[str, object]
    inputs: Sequence[TensorIn]
    outputs: Sequence[OutputIn]
    binary_by_default: bool = False


@dataclass(frozen=True, slots=True)
class TensorOut:
    """One answer, in the order in which it was asked for. `data` is a view of the slab."""

    spec: TensorSpec
    shape: Shape
    data: memoryview
    binary: bool


@dataclass(frozen=True, slots=True)
class Target:
    """What one input must become: the model's tensor, in the whole shape that the client gave it."""

    spec: TensorSpec
    shape: Shape
    model: str
    prefix: str

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.values * self.spec.numpy_dtype.itemsize

    def wrong(self, message: str) -> InvalidRequest:
        return InvalidRequest(self.prefix + message)

    def check_size(self, nbytes: int) -> None:
        """Raises InvalidRequest unless so many bytes are exactly this tensor."""
        if nbytes != self.nbytes:
            raise self.wrong(
                f"input byte size mismatch for input '{self.spec.name}' for model {self.model}. "
                f"Expected {self.nbytes}, got {nbytes}"
            )


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
    if len(shape) > _MAX_SHOWN_DIMENSIONS:
        return f"{len(shape)} dimensions"
    return "[" + ",".join(str(size) for size in shape) + "]"
