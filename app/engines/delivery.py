"""A batch's answers on their way from an engine's memory to the requests that asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.engines.base import OutputTensor, Part
from models.tensors import pack


def scatter(
    parts: Sequence[Part], arrays: Sequence[np.ndarray], *, batched: bool
) -> tuple[tuple[OutputTensor, ...], ...]:
    """Each part's rows of each wanted output; `arrays` hold the whole batch, [samples, ...] where `batched`."""
    answers, start = [], 0
    for part in parts:
        rows = slice(start, start + part.samples)
        start += part.samples
        answers.append(
            tuple(
                [
                    deliver(arrays[index][rows] if batched else arrays[index], destination)
                    for index, destination in zip(part.wanted, part.destinations, strict=True)
                ]
            )
        )
    return tuple(answers)


def deliver(rows: np.ndarray, destination: memoryview | None) -> OutputTensor:
    """Copy one request's rows to where they belong, or to memory of their own."""
    shape, dtype = rows.shape, rows.dtype
    if dtype.hasobject:
        return OutputTensor(shape, memoryview(pack(text.encode() for text in rows.flat)))
    if destination is None:
        own = np.array(rows, order="C", copy=True)
        return OutputTensor(own.shape, own.reshape(-1).view(np.uint8).data)
    np.copyto(np.ndarray(shape, dtype, destination), rows)
    return OutputTensor(shape, destination)
