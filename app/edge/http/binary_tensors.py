"""Tensors as plain bytes in an HTTP body: behind the JSON, or, in a raw request, instead of it.

They stay where the body was read to and are only pointed at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from convoy.app.edge.http.body import Body
from convoy.app.edge.oip.tensors import RawRequest, Source, Target, TensorIn, TensorRef
from convoy.app.lifecycle.catalog import Served
from convoy.app.scheduling.request import Shape
from convoy.app.submission.shared_memory import SharedMemory
from convoy.models.errors import InvalidRequest
from convoy.models.spec import TensorSpec


class BinaryTail:
    """What lies behind the JSON: the binary tensors, one after another. `end` is where the next one begins."""

    def __init__(self, body: Body, start: int) -> None:
        self._body = body
        self.end = start

    def next(self, size: int) -> Source:
        begin, self.end = self.end, self.end + size
        return _Binary(self._body, begin, size)


def raw_request(body: Body, served: Served, memory: SharedMemory) -> RawRequest:
    """A body that is nothing but the only input of one sample; all outputs are wanted, binary.

    Raises InvalidRequest for a model whose input such a body does not settle.
    """
    spec, model = served.spec, served.key.model
    if len(spec.inputs) != 1:
        raise InvalidRequest(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(spec.inputs)} inputs in "
            f"'{model}' model configuration; send Inference-Header-Content-Length and the inputs' JSON"
        )
    (only,) = spec.inputs
    batch = (1,) if spec.max_batch_size else ()
    source = _OneString(body) if only.is_strings else _Binary(body, 0, body.nbytes)
    tensor = TensorIn(only.name, only.dtype, (*batch, *_deduced(only, body.nbytes)), source)
    return RawRequest(None, {}, [tensor], [], memory, binary_by_default=True)


def _deduced(spec: TensorSpec, nbytes: int) -> Shape:
    """The shape of one sample of so many bytes."""
    if spec.is_strings:
        if any(size not in (1, -1) for size in spec.shape):
            raise InvalidRequest(f"For BYTES datatype raw input '{spec.name}', the model must have input shape [1]")
        return (1,) * len(spec.shape)
    if sum(size < 0 for size in spec.shape) > 1:
        raise InvalidRequest(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    unit_bytes = math.prod(size for size in spec.shape if size >= 0) * spec.numpy_dtype.itemsize
    free = nbytes // unit_bytes if unit_bytes else 0
    return tuple(free if size < 0 else size for size in spec.shape)


@dataclass(frozen=True, slots=True)
class _Binary:
    """A binary tensor; it may be cut off."""

    body: Body
    begin: int
    size: int

    def read(self, target: Target) -> TensorRef:
        if not target.spec.is_strings:
            target.check_size(self.size)
        missing = self.begin + self.size - self.body.nbytes
        if missing > 0:
            raise target.wrong(
                f"unexpected size for input '{target.spec.name}', "
                f"expecting {missing} additional bytes for model {target.model}"
            )
        if target.spec.is_strings:
            target.check_bytes(self.body.view[self.begin : self.begin + self.size])
        return TensorRef(self.body.slot.ref, self.begin, self.size)


@dataclass(frozen=True, slots=True)
class _OneString:
    """A whole body that is one element, without its length."""

    body: Body

    def read(self, target: Target) -> np.ndarray:
        return target.packed([bytes(self.body.view)])
