"""Which outputs a request wants, and in which form: the same for every wire.

What could not be encoded after the run is refused before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.app.protocol.shared_tensors import REGION, SharedPlace, check_room, shared_place
from convoy.app.protocol.tensors import BINARY_ONLY, OutputIn, RawRequest, whole_number
from convoy.app.scheduling.request import Shape
from convoy.models.errors import InvalidRequest
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.tensors import pack

_MAX_ELEMENTS = 1_000_000
_UNSUPPORTED = frozenset({"FP16", "BF16", "BOOL", "BYTES"})


def check_classifiable(spec: TensorSpec) -> None:
    """Raises InvalidRequest for an output that has no order."""
    if spec.dtype in _UNSUPPORTED:
        raise InvalidRequest(f"class result not available for output due to unsupported type '{spec.dtype}'")


def classify(values: np.ndarray, classes: int, labels: Sequence[str], *, batched: bool) -> tuple[Shape, memoryview]:
    """The best `classes` of each sample, largest first, as the shape and the packed bytes of a BYTES tensor.

    All dimensions behind the batch are taken as one. Ties go by index. Raises InvalidRequest.
    """
    if values.size > _MAX_ELEMENTS:
        raise InvalidRequest(f"classification output tensor too large: {values.size} values, {_MAX_ELEMENTS} at most")
    batch = values.shape[:1] if batched else ()
    per_sample = math.prod(values.shape[len(batch) :])
    rows = values.reshape(math.prod(batch), per_sample)
    count = min(classes, per_sample)
    strings = [_entry(row[index], int(index), labels) for row in rows for index in _largest_first(row)[:count]]
    return (*batch, count), memoryview(pack(strings))


def _largest_first(row: np.ndarray) -> np.ndarray:
    # Not `-row` for integers: the smallest one has no opposite, and unsigned ones have none at all.
    return np.argsort(-row if row.dtype.kind == "f" else ~row, kind="stable")


def _entry(value: np.generic, index: int, labels: Sequence[str]) -> bytes:
    number = f"{value:f}" if value.dtype.kind == "f" else str(value)
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{number}:{index}{label}".encode()


Wrong = Callable[[str], InvalidRequest]


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """An output that the client asked for, and the form in which it wants it.

    `classes` above 0: its largest values as strings. `place`: written there instead of sent.
    """

    index: int
    binary: bool
    classes: int = 0
    place: SharedPlace | None = None


def read_outputs(asked: RawRequest, spec: ModelSpec, samples: int, wrong: Wrong) -> tuple[WantedOutput, ...]:
    """The outputs that are asked for, or all of them. `wrong` makes the error for a message.

    Raises InvalidRequest, and NotFound or Unsupported for shared memory.
    """
    wanted: list[WantedOutput] = []
    if not asked.outputs:
        wanted = [WantedOutput(index, asked.binary_by_default) for index in range(len(spec.outputs))]
    for output in asked.outputs:
        one = _output(output, asked, spec, wrong)
        if any(other.index == one.index for other in wanted):
            raise wrong(f"output '{output.name}' already exists in request")
        wanted.append(one)
    for one in wanted:
        _check_form(one, spec, samples, wrong)
    return tuple(wanted)


def _output(output: OutputIn, asked: RawRequest, spec: ModelSpec, wrong: Wrong) -> WantedOutput:
    names = [spec.name for spec in spec.outputs]
    if output.name not in names:
        raise wrong(f"unexpected inference output '{output.name[:100]}'; the model gives {sorted(names)}")
    parameters, index = output.parameters, names.index(output.name)
    binary = parameters.get("binary_data", asked.binary_by_default)
    if not isinstance(binary, bool):
        raise wrong(f"'binary_data' of output '{output.name}' must be true or false")
    if "classification" not in parameters and REGION not in parameters:
        return WantedOutput(index, binary)
    what = f"output '{output.name}'"
    classes = whole_number(parameters, "classification", what)
    place = shared_place(parameters, what, asked.memory) if REGION in parameters else None
    if classes and place:
        raise wrong("Output can't set both 'shared_memory_region' and 'classification'")
    return WantedOutput(index, binary, classes, place)


def _check_form(wanted: WantedOutput, model: ModelSpec, samples: int, wrong: Wrong) -> None:
    spec = model.outputs[wanted.index]
    if wanted.classes:
        check_classifiable(spec)
    elif wanted.place is not None:
        check_room(wanted.place, spec, samples * (spec.sample_bytes or 0))
    elif spec.dtype in BINARY_ONLY and not wanted.binary:
        raise wrong(
            f"sending {spec.dtype} data via JSON is not supported. "
            f"Please use the binary data format for output {spec.name}"
        )
