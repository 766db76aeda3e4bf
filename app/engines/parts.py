"""The requests' parts of a batch: gather them into one buffer, and scatter outputs to the requests.

The same for every library. Only outputs that match the model's declaration are returned: behind a shorter answer its
buffer still has data of another request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from convoy.app.engines.batch import Answer, EngineFailure
from convoy.models.spec import TensorSpec, fits
from convoy.models.tensors import TensorBytes, objection_to_strings, pack

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class Part:
    """One request's part of a batch, as views of its bytes. BYTES are packed.

    `shapes` are the inputs' whole shapes, with the batch dimension if the model has one. `wanted` are indices of the
    model's outputs; `destinations` has one writable view of the exact size for each, or None if the size is known only
    after the run.
    """

    samples: int
    shapes: Shapes
    inputs: tuple[memoryview, ...]
    wanted: tuple[int, ...]
    destinations: tuple[memoryview | None, ...]


def joined(parts: Sequence[Part], *, batched: bool) -> tuple[int, Shapes]:
    """The number of samples and the inputs' whole shapes of all parts together, which agree otherwise."""
    samples, shapes = sum([part.samples for part in parts]), parts[0].shapes
    if batched:
        # A list, because tuples made from generators are over-allocated.
        shapes = tuple([(samples, *shape[1:]) for shape in shapes])
    return samples, shapes


def gather(parts: Sequence[Part], index: int, room: memoryview) -> int:
    """Copy one input of every request into `room`, back to back. Returns the number of bytes.

    Copies nothing if there is not enough room.
    """
    sources = [part.inputs[index] for part in parts]
    nbytes = sum([source.nbytes for source in sources])
    if nbytes > len(room):
        return nbytes
    offset = 0
    for source in sources:
        end = offset + source.nbytes
        room[offset:end] = source
        offset = end
    return nbytes


class Landed(NamedTuple):
    """One output of a whole batch where the run has left it: [samples, ...] if the model has a batch dimension.

    `data` has the same bytes if their memory stays, because slicing bytes per request costs less than slicing the
    array.
    """

    array: np.ndarray
    data: memoryview | None = None


def scatter(
    parts: Sequence[Part], landed: Sequence[Landed], outputs: Sequence[TensorSpec], *, batched: bool
) -> tuple[tuple[TensorBytes, ...], ...]:
    """Each part's rows of each wanted output.

    Raises EngineFailure if an output of the run is not as `outputs` declare.
    """
    check_landed(landed, outputs, sum([part.samples for part in parts]), batched=batched)
    if not batched:
        each = [zip(part.wanted, part.destinations, strict=True) for part in parts]
        return tuple([tuple([_copied(landed[index].array, to) for index, to in wanted]) for wanted in each])
    answers, start = [], 0
    for part in parts:
        end = start + part.samples
        wanted = zip(part.wanted, part.destinations, strict=True)
        answers.append(tuple([_delivered(landed[index], start, end, to) for index, to in wanted]))
        start = end
    return tuple(answers)


def check_landed(landed: Sequence[Landed], outputs: Sequence[TensorSpec], samples: int, *, batched: bool) -> None:
    """Raise EngineFailure if an output of a run of `samples` is not as the model declares."""
    for spec, one in zip(outputs, landed, strict=True):
        array, declared = one.array, (samples, *spec.shape) if batched else spec.shape
        if array.shape != declared and not fits(array.shape, declared):
            raise _undeclared_shape(spec, declared, array.shape)
        if array.dtype != spec.numpy_dtype:
            raise EngineFailure(
                f"output '{spec.name}' is of {array.dtype}, but the model declares {spec.dtype}; export the model again"
            )


def check_answer(spec: TensorSpec, declared: tuple[int, ...], answer: Answer) -> None:
    """Raise EngineFailure unless an answer is exactly as the model declares; -1 is any size."""
    shape, nbytes = answer.shape, len(answer.data)
    if shape != declared and not fits(shape, declared):
        raise _undeclared_shape(spec, declared, shape)
    if spec.is_strings:
        objection = objection_to_strings(answer.data, math.prod(shape), f"output '{spec.name}'", text_only=False)
        if objection:
            raise EngineFailure(f"{objection}; this is a bug in the engine")
    elif nbytes != math.prod(shape) * spec.numpy_dtype.itemsize:
        raise EngineFailure(
            f"output '{spec.name}' has {nbytes} bytes, which do not fit {spec.dtype} of shape {list(shape)}; "
            "this is a bug in the engine"
        )


def _undeclared_shape(spec: TensorSpec, declared: tuple[int, ...], shape: tuple[int, ...]) -> EngineFailure:
    return EngineFailure(
        f"output '{spec.name}' has the shape {list(shape)}, but the model declares {list(declared)}; "
        "a size that varies must be declared as -1"
    )


def _delivered(landed: Landed, start: int, end: int, destination: memoryview | None) -> TensorBytes:
    """Some samples of an output of a batch."""
    array, data = landed
    if data is None or destination is None:
        return _copied(array[start:end], destination)
    row_bytes = len(data) // len(array)
    destination[:] = data[start * row_bytes : end * row_bytes]
    return TensorBytes((end - start, *array.shape[1:]), destination)


def _copied(rows: np.ndarray, destination: memoryview | None) -> TensorBytes:
    """Copy one request's rows to their destination, or to new memory. They fill the destination."""
    if rows.dtype.hasobject:
        return TensorBytes(rows.shape, memoryview(pack(text.encode() for text in rows.flat)))
    if destination is None:
        copy = np.array(rows, order="C", copy=True)
        return TensorBytes(copy.shape, copy.reshape(-1).view(np.uint8).data)
    if len(destination) != rows.nbytes:
        raise EngineFailure(
            f"an output of {rows.nbytes} bytes does not fit into {len(destination)} bytes; this is a bug"
        )
    np.copyto(np.ndarray(rows.shape, rows.dtype, destination), rows)
    return TensorBytes(rows.shape, destination)
