"""The meaning of an inference request, for HTTP and gRPC alike.

    http/infer.py ----------\\                                /-- http/infer.py
                             > RawRequest -> understand -> InferRequest -> run -> answers_of
    grpc/tensors.py --------/                                \\-- grpc/tensors.py

The protocols bring tensors and ways to read their bytes. Names, dtypes, shapes, batch sizes, wanted outputs and options
are checked only here. Error messages begin with Triton's wording, which clients match.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from convoy.app.calls.call import Call, Inputs, Terms
from convoy.app.engines.batch import Answer
from convoy.app.lifecycle.catalog import Served
from convoy.app.protocol.tensors import (
    BINARY_ONLY,
    REGION,
    OutputIn,
    RawRequest,
    SharedBytes,
    SharedPlace,
    Target,
    TensorIn,
    TensorOut,
    Values,
    brief,
    check_parameters,
    check_room,
    shared_place,
    shown,
    whole_number,
)
from convoy.app.scheduling.request import Done, Request, Shape, TensorRef
from convoy.models.errors import InvalidRequest
from convoy.models.spec import NUMPY_DTYPES, ModelSpec, TensorSpec, fits
from convoy.models.tensors import pack

_MAX_ELEMENTS = 1_000_000
_UNORDERED = frozenset({"FP16", "BF16", "BOOL", "BYTES"})


def classify(values: np.ndarray, classes: int, labels: Sequence[str], *, batched: bool) -> tuple[Shape, memoryview]:
    """The top `classes` of each sample, best first, as the shape and packed bytes of a BYTES tensor.

    Dimensions after the batch are flattened. Ties are in the order of indices. Raises InvalidRequest.
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
    # `-row` would overflow for the smallest integer and for unsigned ones.
    return np.argsort(-row if row.dtype.kind == "f" else ~row, kind="stable")


def _entry(value: np.generic, index: int, labels: Sequence[str]) -> bytes:
    number = f"{value:f}" if value.dtype.kind == "f" else str(value)
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{number}:{index}{label}".encode()


Wrong = Callable[[str], InvalidRequest]


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """An output that the client asked for, and its form.

    `classes` above 0 asks for that many top values as strings. `place` is the shared memory to write it to.
    """

    index: int
    binary: bool
    classes: int = 0
    place: SharedPlace | None = None


def read_outputs(asked: RawRequest, spec: ModelSpec, samples: int, wrong: Wrong) -> tuple[WantedOutput, ...]:
    """The outputs that are asked for, or all. `wrong` makes the error for a message.

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
        tensor = spec.outputs[one.index]
        if one.classes:
            if tensor.dtype in _UNORDERED:
                raise InvalidRequest(f"class result not available for output due to unsupported type '{tensor.dtype}'")
        elif one.place is not None:
            check_room(one.place, tensor, samples * (tensor.sample_bytes or 0))
        elif tensor.dtype in BINARY_ONLY and not one.binary:
            raise wrong(
                f"sending {tensor.dtype} data via JSON is not supported. "
                f"Please use the binary data format for output {tensor.name}"
            )
    return tuple(wanted)


def _output(output: OutputIn, asked: RawRequest, spec: ModelSpec, wrong: Wrong) -> WantedOutput:
    names = [spec.name for spec in spec.outputs]
    if output.name not in names:
        raise wrong(f"unexpected inference output '{output.name[:100]}'; the model has {sorted(names)}")
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


_MAX_BYTES = 1 << 40
# Larger inputs are checked in a thread so that they do not block the event loop.
INLINE_BYTES = 32 << 10
_NO_TERMS = Terms()


class InferRequest(NamedTuple):
    """A request that fits its model. Its inputs may be outside the slab until `request_for`.

    `samples` is the batch size; `shapes` are the inputs' shapes without it, in the model's order.
    """

    id: str | None
    samples: int
    shapes: tuple[Shape, ...]
    tensors: tuple[Values, ...]
    outputs: tuple[WantedOutput, ...]
    terms: Terms


def understand(asked: RawRequest, served: Served) -> InferRequest:
    """Check the request against the model, in Triton's order. Raises InvalidRequest, NotFound or Unsupported.

    Changes nothing, so any thread may call it.
    """
    spec, model, wrong = served.spec, f"'{served.key.model}'", partial(wrong_request, asked.id)
    expected = {one.name: one for one in spec.inputs}
    found: dict[str, Values] = {}
    shapes: dict[str, Shape] = {}
    for tensor in asked.inputs:
        own = expected.get(tensor.name)
        if own is None:
            raise wrong(
                f"unexpected inference input '{tensor.name[:100]}' for model {model}; it takes {sorted(expected)}"
            )
        if tensor.name in found:
            raise wrong(f"input '{tensor.name}' already exists in request")
        shapes[tensor.name] = shape = _shape(tensor, own, spec, model, wrong)
        found[tensor.name] = tensor.source.read(Target(own, shape, model, wrong, served.text_only))
    if len(found) < len(expected):
        raise wrong(
            f"expected {len(expected)} inputs but got {len(found)} inputs for model {model}. "
            f"Got input(s) {sorted(found)}, "
            f"but missing required input(s) {[name for name in expected if name not in found]}. "
            "Please provide all required input(s)."
        )
    samples, sample_starts_at = 1, 0
    if spec.max_batch_size:
        samples, sample_starts_at = _batch_size(shapes, spec, model, wrong), 1
    return InferRequest(
        asked.id,
        samples,
        tuple([shapes[one.name][sample_starts_at:] for one in spec.inputs]),
        tuple([found[one.name] for one in spec.inputs]),
        read_outputs(asked, spec, samples, wrong),
        terms_of(asked.parameters),
    )


def request_for(meaning: InferRequest, served: Served, call: Call) -> Request:
    """Make the scheduler's request and copy its inputs into the slab.

    Raises Overloaded, or InvalidRequest for shared memory.
    """
    for output in meaning.outputs:
        if output.place is not None:
            call.hold_region(output.place.region)
    tensors = [tensor if isinstance(tensor, TensorRef) else _written(tensor, call) for tensor in meaning.tensors]
    inputs = Inputs(meaning.samples, meaning.shapes, tuple(tensors))
    return call.build_request(served, inputs, tuple([output.index for output in meaning.outputs]), meaning.terms)


def is_heavy(nbytes: int, served: Served) -> bool:
    """Whether checking `nbytes` of inputs would block the event loop for too long."""
    # Only the size of numbers is checked, but every string.
    return nbytes > INLINE_BYTES and any(spec.is_strings for spec in served.spec.inputs)


def terms_of(parameters: Mapping[str, object]) -> Terms:
    """The scheduling options in a request's parameters. Raises InvalidRequest."""
    if not parameters:
        return _NO_TERMS
    check_parameters(parameters)
    timeout_us, priority = (whole_number(parameters, name, "the request") for name in ("timeout", "priority"))
    # 0 means the model's default; 1 is the most urgent level.
    return Terms(timeout_us or None, priority)


def wrong_request(request_id: str | None, message: str) -> InvalidRequest:
    """An error about the whole request, with Triton's prefix."""
    return InvalidRequest(f"[request id: {(request_id or '<id_unknown>')[:100]}] {message}")


def _written(values: np.ndarray | SharedBytes, call: Call) -> TensorRef:
    if isinstance(values, SharedBytes):
        call.hold_region(values.place.region)
    slot = call.reserve(values.nbytes)
    if isinstance(values, np.ndarray):
        np.frombuffer(slot.view, values.dtype)[:] = values.reshape(-1)
    else:
        values.write_into(slot.view)
    return TensorRef(slot.ref, 0, values.nbytes)


def _batch_size(shapes: Mapping[str, Shape], spec: ModelSpec, model: str, wrong: Wrong) -> int:
    """The number of samples, on which all inputs must agree."""
    samples = shapes[spec.inputs[0].name][0]
    for one in spec.inputs:
        if shapes[one.name][0] != samples:
            raise wrong(f"input '{one.name}' batch size does not match other inputs for {model}")
    if samples > spec.max_batch_size:
        raise wrong(f"inference request batch-size must be <= {spec.max_batch_size} for {model}, got {samples}")
    if samples < 1:
        raise wrong(f"inference request batch-size must be >= 1 for {model}, got {samples}")
    return samples


def _shape(tensor: TensorIn, spec: TensorSpec, model_spec: ModelSpec, model: str, wrong: Wrong) -> Shape:
    if tensor.datatype not in NUMPY_DTYPES:
        raise wrong(
            f"input '{spec.name}' has datatype '{tensor.datatype[:40]}', which is not supported; use '{spec.dtype}'"
        )
    if tensor.datatype != spec.dtype:
        raise wrong(
            f"inference input '{spec.name}' data-type is '{tensor.datatype}', but model {model} expects '{spec.dtype}'"
        )
    sizes = tuple([size for size in tensor.shape if type(size) is int and size >= 0])
    if len(sizes) != len(tensor.shape):
        raise wrong(f"the shape of input '{spec.name}' must be a list of whole numbers >= 0, got {brief(tensor.shape)}")
    # Check the largest size as well, because a 0 makes the product small.
    if max(*sizes, math.prod(sizes), 0) * spec.numpy_dtype.itemsize > _MAX_BYTES:
        raise wrong(f"the shape of input '{spec.name}' causes total byte size to exceed maximum size of {_MAX_BYTES}")
    expected = (-1, *spec.shape) if model_spec.max_batch_size else spec.shape
    if not fits(sizes, expected):
        raise wrong(
            f"unexpected shape for input '{spec.name}' for model {model}. "
            f"Expected {shown(expected)}, got {shown(sizes)}. {_hint(spec, model_spec, sizes)}"
        )
    return sizes


def _hint(spec: TensorSpec, model_spec: ModelSpec, shape: Shape) -> str:
    if model_spec.image is not None and len(shape) == len(spec.shape) + 1:
        return f"'{spec.name}' takes {spec.dtype} images as {shown(spec.shape)} each."
    if model_spec.max_batch_size:
        return "NOTE: with a max_batch_size above 0 the first dimension is the batch."
    return "The model has no batch dimension: the shape is taken as it is."


def answers_of(request: InferRequest, served: Served, done: Done) -> tuple[TensorOut, ...]:
    """The answers to encode. Their views are valid until the call ends.

    Raises InvalidRequest if an answer does not fit the requested form.
    """
    return tuple(
        [
            TensorOut(served.spec.outputs[wanted.index], answer.shape, answer.data, wanted.binary)
            if not wanted.classes and wanted.place is None
            else _other_answer(served, wanted, answer)
            for wanted, answer in zip(request.outputs, done.answers, strict=True)
        ]
    )


def is_heavy_answer(request: InferRequest, done: Done) -> bool:
    """Whether encoding the answers would block the event loop for too long; never for binary ones."""
    if sum([len(answer.data) for answer in done.answers]) <= INLINE_BYTES:
        return False
    return any(wanted.classes or not wanted.binary for wanted in request.outputs)


def _other_answer(served: Served, wanted: WantedOutput, answer: Answer) -> TensorOut:
    spec = served.spec.outputs[wanted.index]
    if wanted.place is not None:
        check_room(wanted.place, spec, answer.data.nbytes)
        wanted.place.region.write(answer.data, wanted.place.offset)
        return TensorOut(spec, answer.shape, memoryview(b""), wanted.binary, elsewhere=True)
    values = np.frombuffer(answer.data, spec.numpy_dtype).reshape(answer.shape)
    labels = served.spec.labels_of(wanted.index)
    batched = served.spec.max_batch_size > 0
    shape, packed = classify(values, wanted.classes, labels, batched=batched)
    return TensorOut(TensorSpec(spec.name, "BYTES", shape), shape, packed, wanted.binary)
