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

    def rows(self, start: int, end: int) -> Landed:
        """The same of some of its samples."""
        array, data = self
        if data is not None:
            row_bytes = len(data) // len(array)
            data = data[start * row_bytes : end * row_bytes]
        return Landed(array[start:end], data)


def scatter(parts: Sequence[Part], landed: Sequence[Landed], *, batched: bool) -> tuple[tuple[TensorBytes, ...], ...]:
    """Each part's rows of each wanted output."""
    answers, start = [], 0
    for part in parts:
        end = start + part.samples
        wanted = zip(part.wanted, part.destinations, strict=True)
        answers.append(
            tuple(
                [
                    _deliver(landed[index].rows(start, end) if batched else landed[index], destination)
                    for index, destination in wanted
                ]
            )
        )
        start = end
    return tuple(answers)


def _deliver(own: Landed, destination: memoryview | None) -> TensorBytes:
    """Copy one request's rows to where they belong, or to memory of their own."""
    rows, data = own
    if rows.dtype.hasobject:
        return TensorBytes(rows.shape, memoryview(pack(text.encode() for text in rows.flat)))
    if destination is None:
        copy = np.array(rows, order="C", copy=True)
        return TensorBytes(copy.shape, copy.reshape(-1).view(np.uint8).data)
    if data is None:
        np.copyto(np.ndarray(rows.shape, rows.dtype, destination), rows)
    else:
        destination[:] = data
    return TensorBytes(rows.shape, destination)
