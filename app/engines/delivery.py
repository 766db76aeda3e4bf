"""A batch's answers on their way from an engine's memory to the requests that asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.engines.base import Part
from models.tensors import TensorBytes, pack


class Landed(NamedTuple):
    """One output of a whole batch, where the run has left it: [samples, ...] where the model has a batch dimension.

    `data` are its bytes once more, where they lie in memory that stays. It is sliced for every request, and numpy
    remembers each array that a view has been taken of.
    """

    array: np.ndarray
    data: memoryview | None = None


def scatter(parts: Sequence[Part], landed: Sequence[Landed], *, batched: bool) -> tuple[tuple[TensorBytes, ...], ...]:
    """Each part's rows of each wanted output."""
    answers, start = [], 0
    for part in parts:
        end = start + part.samples if batched else 0
        wanted = zip(part.wanted, part.destinations, strict=True)
        answers.append(tuple([_deliver(landed[index], start, end, destination) for index, destination in wanted]))
        start = end
    return tuple(answers)


def _deliver(landed: Landed, start: int, end: int, destination: memoryview | None) -> TensorBytes:
    """Copy rows from `start` to `end`, 0: all there is, to where they belong, or to memory of their own."""
    array, data = landed
    if data is not None and destination is not None:
        if not end:
            destination[:] = data
            return TensorBytes(array.shape, destination)
        whole = array.shape
        row_bytes = len(data) // whole[0]
        destination[:] = data[start * row_bytes : end * row_bytes]
        return TensorBytes((end - start, *whole[1:]), destination)
    rows = array[start:end] if end else array
    if rows.dtype.hasobject:
        return TensorBytes(rows.shape, memoryview(pack(text.encode() for text in rows.flat)))
    if destination is None:
        own = np.array(rows, order="C", copy=True)
        return TensorBytes(own.shape, own.reshape(-1).view(np.uint8).data)
    np.copyto(np.ndarray(rows.shape, rows.dtype, destination), rows)
    return TensorBytes(rows.shape, destination)
