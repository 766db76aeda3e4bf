"""What an inference request means, whatever wire it came over.

    http/infer_request.py --\\                                /-- http/infer.py
                             > RawRequest -> understand -> InferRequest -> run -> answers_of
    grpc/tensors.py --------/                                \\-- grpc/tensors.py

A wire says which tensors it has and how to get at their bytes; names, dtypes, shapes, batch sizes, wanted outputs and
terms are checked here and nowhere else. The beginnings of the error sentences are Triton's: clients match them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from convoy.app.calls.call import Call, Inputs, Terms
from convoy.app.calls.shared_memory import Region
from convoy.app.engines.batch import Answer
from convoy.app.lifecycle.catalog import Served
from convoy.app.protocol.shared_tensors import REGION, SharedBytes, SharedPlace, check_room, shared_place
from convoy.app.protocol.tensors import (
    BINARY_ONLY,
    Elsewhere,
    OutputIn,
    RawRequest,
    Target,
    TensorIn,
    TensorOut,
    Values,
    brief,
    check_parameters,
    shown,
    whole_number,
)
from convoy.app.scheduling.request import Done, Request, Shape, TensorRef
from convoy.models.errors import InvalidRequest
from convoy.models.spec import NUMPY_DTYPES, ModelSpec, TensorSpec
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


_MAX_BYTES = 1 << 40
# Above this much to look at piece by piece, a thread does it beside the event loop.
INLINE_BYTES = 32 << 10
_NO_TERMS = Terms()


class InferRequest(NamedTuple):
    """A request that fits its model. Inputs may be anywhere until `request_for` has found room for them.

    `samples` is the batch size, `shapes` are the inputs' without it, in the model's order. `regions` are the
    shared memory that it reads or writes.
    """

    id: str | None
    samples: int
    shapes: tuple[Shape, ...]
    tensors: tuple[Values, ...]
    outputs: tuple[WantedOutput, ...]
    terms: Terms
    regions: tuple[Region, ...] = ()


def understand(asked: RawRequest, served: Served) -> InferRequest:
    """Compare what was asked with the model. Raises InvalidRequest or Unsupported.

    Touches nothing but what it is given, so any thread may call it.
    """
    return _Reader(asked, served).read()


def _place_tensors(request: InferRequest, call: Call) -> Inputs:
    """The request's inputs, all of them in the slab. Raises Overloaded, or InvalidRequest for shared memory."""
    for region in request.regions:
        call.hold_region(region)
    references = tuple(
        tensor if isinstance(tensor, TensorRef) else _written(tensor, call) for tensor in request.tensors
    )
    return Inputs(request.samples, request.shapes, references)


def is_heavy(nbytes: int, served: Served) -> bool:
    """Whether checking so many bytes of inputs takes longer than the event loop may be held up."""
    # Numbers are checked by their size; strings one by one.
    return nbytes > INLINE_BYTES and any(spec.is_strings for spec in served.spec.inputs)


def request_for(meaning: InferRequest, served: Served, call: Call) -> Request:
    """For the scheduler, with its inputs in the slab. Raises Overloaded, or InvalidRequest for shared memory."""
    inputs = _place_tensors(meaning, call)
    return call.build_request(served, inputs, tuple(output.index for output in meaning.outputs), meaning.terms)


def terms_of(parameters: Mapping[str, object]) -> Terms:
    """What a request's parameters ask of the schedule. Raises InvalidRequest."""
    if not parameters:
        return _NO_TERMS
    check_parameters(parameters)
    timeout_us, priority = (whole_number(parameters, name, "the request") for name in ("timeout", "priority"))
    # 0 is the protocol's word for "the default"; 1 is the most urgent class.
    return Terms(timeout_us or None, priority)


def wrong_request(request_id: str | None, message: str) -> InvalidRequest:
    """An error about the request as a whole, with the prefix that Triton gives it."""
    return InvalidRequest(_prefix(request_id) + message)


def _written(values: np.ndarray | Elsewhere, call: Call) -> TensorRef:
    slot = call.reserve(values.nbytes)
    if isinstance(values, np.ndarray):
        np.frombuffer(slot.view, values.dtype)[:] = values.reshape(-1)
    else:
        values.write_into(slot.view)
    return TensorRef(slot.ref, 0, values.nbytes)


def _prefix(request_id: str | None) -> str:
    return f"[request id: {(request_id or '<id_unknown>')[:100]}] "


class _Reader:
    """One request against one model, in Triton's order: inputs, their batch, outputs, terms."""

    def __init__(self, asked: RawRequest, served: Served) -> None:
        self._asked = asked
        self._spec = served.spec
        self._text_only = served.text_only
        self._model = f"'{served.key.model}'"
        self._prefix = _prefix(asked.id)

    def read(self) -> InferRequest:
        expected = {spec.name: spec for spec in self._spec.inputs}
        found: dict[str, Values] = {}
        shapes: dict[str, Shape] = {}
        for tensor in self._asked.inputs:
            spec = expected.get(tensor.name)
            if spec is None:
                raise self._wrong(
                    f"unexpected inference input '{tensor.name[:100]}' for model {self._model}; "
                    f"it takes {sorted(expected)}"
                )
            if tensor.name in found:
                raise self._wrong(f"input '{tensor.name}' already exists in request")
            shapes[tensor.name] = shape = self._shape(tensor, spec)
            found[tensor.name] = tensor.source.read(Target(spec, shape, self._model, self._prefix, self._text_only))
        self._check_complete(found)
        samples, own_shapes = self._batch(shapes)
        tensors = tuple(found[spec.name] for spec in self._spec.inputs)
        outputs = read_outputs(self._asked, self._spec, samples, self._wrong)
        regions = _regions(tensors, outputs) if self._asked.memory.is_allowed else ()
        return InferRequest(
            self._asked.id, samples, own_shapes, tensors, outputs, terms_of(self._asked.parameters), regions
        )

    def _wrong(self, message: str) -> InvalidRequest:
        return InvalidRequest(self._prefix + message)

    def _check_complete(self, found: Mapping[str, object]) -> None:
        missing = [spec.name for spec in self._spec.inputs if spec.name not in found]
        if missing:
            raise self._wrong(
                f"expected {len(self._spec.inputs)} inputs but got {len(found)} inputs for model "
                f"{self._model}. Got input(s) {sorted(found)}, but missing required input(s) {missing}. "
                "Please provide all required input(s)."
            )

    def _batch(self, shapes: Mapping[str, Shape]) -> tuple[int, tuple[Shape, ...]]:
        """How many samples there are, and the shapes of one."""
        names = [spec.name for spec in self._spec.inputs]
        if self._spec.max_batch_size == 0:
            return 1, tuple(shapes[name] for name in names)
        samples = shapes[names[0]][0]
        for name in names:
            if shapes[name][0] != samples:
                raise self._wrong(f"input '{name}' batch size does not match other inputs for {self._model}")
        if samples > self._spec.max_batch_size:
            raise self._wrong(
                f"inference request batch-size must be <= {self._spec.max_batch_size} for {self._model}, got {samples}"
            )
        if samples < 1:
            raise self._wrong(f"inference request batch-size must be >= 1 for {self._model}, got {samples}")
        return samples, tuple(shapes[name][1:] for name in names)

    def _shape(self, tensor: TensorIn, spec: TensorSpec) -> Shape:
        if tensor.datatype not in NUMPY_DTYPES:
            raise self._wrong(
                f"input '{spec.name}' has datatype '{tensor.datatype[:40]}', which is not supported; use '{spec.dtype}'"
            )
        if tensor.datatype != spec.dtype:
            raise self._wrong(
                f"inference input '{spec.name}' data-type is '{tensor.datatype}', "
                f"but model {self._model} expects '{spec.dtype}'"
            )
        sizes = [size for size in tensor.shape if type(size) is int and size >= 0]
        if len(sizes) != len(tensor.shape):
            raise self._wrong(
                f"the shape of input '{spec.name}' must be a list of whole numbers >= 0, got {brief(tensor.shape)}"
            )
        # The largest size by itself too: a product with a 0 in it is small, whatever else stands there.
        if max(*sizes, math.prod(sizes), 0) * spec.numpy_dtype.itemsize > _MAX_BYTES:
            raise self._wrong(
                f"the shape of input '{spec.name}' causes total byte size to exceed maximum size of {_MAX_BYTES}"
            )
        batch = (-1,) if self._spec.max_batch_size else ()
        want = (*batch, *spec.shape)
        if len(sizes) != len(want) or any(w not in (-1, s) for w, s in zip(want, sizes, strict=True)):
            raise self._wrong(
                f"unexpected shape for input '{spec.name}' for model {self._model}. "
                f"Expected {shown(want)}, got {shown(sizes)}. {self._hint(spec, sizes)}"
            )
        return tuple(sizes)

    def _hint(self, spec: TensorSpec, shape: Sequence[int]) -> str:
        if self._spec.image is not None and len(shape) == len(spec.shape) + 1:
            return f"'{spec.name}' takes {spec.dtype} images as {shown(spec.shape)} each."
        if self._spec.max_batch_size:
            return "NOTE: with a max_batch_size above 0 the first dimension is the batch."
        return "The model has no batch dimension: the shape is taken as it is."


def _regions(tensors: tuple[Values, ...], outputs: tuple[WantedOutput, ...]) -> tuple[Region, ...]:
    inputs = [tensor.place.region for tensor in tensors if isinstance(tensor, SharedBytes)]
    return (*inputs, *(output.place.region for output in outputs if output.place is not None))


def answers_of(request: InferRequest, served: Served, done: Done) -> tuple[TensorOut, ...]:
    """The answers for either wire to encode; their views must be used up before the call ends.

    Raises InvalidRequest for an answer that does not fit the form in which it was asked for.
    """
    return tuple(
        TensorOut(served.spec.outputs[wanted.index], answer.shape, answer.data, wanted.binary)
        if not wanted.classes and wanted.place is None
        else _other_answer(served, wanted, answer)
        for wanted, answer in zip(request.outputs, done.answers, strict=True)
    )


def is_heavy_answer(request: InferRequest, done: Done) -> bool:
    """Whether encoding the answers takes longer than the event loop may be held up; binary ones never do."""
    if sum(len(answer.data) for answer in done.answers) <= INLINE_BYTES:
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
