"""The requests' parts of a batch: gathered into one memory, and its outputs scattered to the requests that want them.

The same for every library. Nothing is handed out that is not what the model declares: behind an answer that is shorter
than its place would lie what another request has left there.
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
    """One request's share of a batch: views of its bytes, nothing owned. BYTES are in their packed form.

    `shapes` are the inputs' whole shapes, batch dimension included where the model has one.
    `wanted` are indices into the model's outputs; `destinations` has one writable view for each, of
    exactly the right size, or None where the size is known only after the run.
    """

    samples: int
    shapes: Shapes
    inputs: tuple[memoryview, ...]
    wanted: tuple[int, ...]
    destinations: tuple[memoryview | None, ...]


def joined(parts: Sequence[Part], *, batched: bool) -> tuple[int, Shapes]:
    """How many samples they are, and the inputs' whole shapes of all together: the parts agree in all else."""
    samples, shapes = sum([part.samples for part in parts]), parts[0].shapes
    if batched:
        # Through a list: a tuple made of a generator leaves its interpreter one more spare tuple each time.
        shapes = tuple([(samples, *shape[1:]) for shape in shapes])
    return samples, shapes


def gather(parts: Sequence[Part], index: int, room: memoryview) -> int:
    """Copy one input of every request into `room`, one behind the other; how many bytes they are.

    Nothing is copied where they are more than there is room for.
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
    """One output of a whole batch, where the run has left it: [samples, ...] where the model has a batch dimension.

    `data` are its bytes once more, where they lie in memory that stays: to slice them for every request costs less than
    to slice the array.
    """

    array: np.ndarray
    data: memoryview | None = None


def scatter(
    parts: Sequence[Part], landed: Sequence[Landed], outputs: Sequence[TensorSpec], *, batched: bool
) -> tuple[tuple[TensorBytes, ...], ...]:
    """Each part's rows of each wanted output.

    Raises EngineFailure where any output of the run is not what `outputs` declare.
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
    """Raises EngineFailure where an output of a run of `samples` is not what the model declares."""
    for spec, one in zip(outputs, landed, strict=True):
        array, declared = one.array, (samples, *spec.shape) if batched else spec.shape
        if array.shape != declared and not fits(array.shape, declared):
            raise _undeclared_shape(spec, declared, array.shape)
        if array.dtype != spec.numpy_dtype:
            raise EngineFailure(
                f"output '{spec.name}' is of {array.dtype}, but the model declares {spec.dtype}; export the model again"
            )


def check_answer(spec: TensorSpec, declared: tuple[int, ...], answer: Answer) -> None:
    """Raises EngineFailure unless an answer is what the model declares, byte for byte; -1 is any size."""
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
    """Copy one request's rows to where they belong, or to memory of their own. They fill their place."""
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
