"""A batch's answers on their way from an engine's memory to the requests that asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from convoy.app.engines.parts import Part
from convoy.models.tensors import TensorBytes, pack


class Landed(NamedTuple):
    """One output of a whole batch, where the run has left it: [samples, ...] where the model has a batch dimension.

    `data` are its bytes once more, where they lie in memory that stays: to slice them for every request costs less than
    to slice the array.
    """

    array: np.ndarray
    data: memoryview | None = None


def scatter(parts: Sequence[Part], landed: Sequence[Landed], *, batched: bool) -> tuple[tuple[TensorBytes, ...], ...]:
    """Each part's rows of each wanted output."""
    if not batched:
        each = [zip(part.wanted, part.destinations, strict=True) for part in parts]
        return tuple([tuple([_copied(landed[index].array, to) for index, to in wanted]) for wanted in each])
    columns, answers, start = [_Column(one) for one in landed], [], 0
    for part in parts:
        own, samples = [], part.samples
        for index, destination in zip(part.wanted, part.destinations, strict=True):
            own.append(columns[index].deliver(start, samples, destination))
        answers.append(tuple(own))
        start += samples
    return tuple(answers)


class _Column:
    """An output of a batch, to be handed out by samples."""

    def __init__(self, landed: Landed) -> None:
        self._array, self._data = landed
        self._row_shape = self._array.shape[1:]
        self._row_bytes = 0 if self._data is None else len(self._data) // len(self._array)

    def deliver(self, start: int, samples: int, destination: memoryview | None) -> TensorBytes:
        data = self._data
        if data is None or destination is None:
            return _copied(self._array[start : start + samples], destination)
        row_bytes = self._row_bytes
        destination[:] = data[start * row_bytes : (start + samples) * row_bytes]
        return TensorBytes((samples, *self._row_shape), destination)


def _copied(rows: np.ndarray, destination: memoryview | None) -> TensorBytes:
    """Copy one request's rows to where they belong, or to memory of their own."""
    if rows.dtype.hasobject:
        return TensorBytes(rows.shape, memoryview(pack(text.encode() for text in rows.flat)))
    if destination is None:
        copy = np.array(rows, order="C", copy=True)
        return TensorBytes(copy.shape, copy.reshape(-1).view(np.uint8).data)
    np.copyto(np.ndarray(rows.shape, rows.dtype, destination), rows)
    return TensorBytes(rows.shape, destination)
