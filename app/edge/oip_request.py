"""The Open Inference Protocol's infer request: JSON, binary tensors, or both, to tensors in the slab.

Binary tensors stay where the body was read to and are only pointed at; JSON tensors become arrays first
and are written into a slot afterwards, because a large body is parsed in a thread and the slab belongs to
the event loop. The beginnings of the error sentences are Triton's, because clients match them.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from app.catalog import Served
from app.edge.body import Body
from app.edge.exchange import Exchange, Inputs, Terms
from app.scheduling.request import Shape, TensorRef
from models.errors import InvalidRequest, Unsupported
from models.spec import NUMPY_DTYPES, TensorSpec

_Json = dict[str, Any]
# numpy's kinds of values that JSON may bring for a tensor of each kind.
_ACCEPTED_KINDS = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}
_MAX_BYTES = 1 << 40
_MAX_SHOWN_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """An output that the client asked for, and the form in which it wants it."""

    index: int
    binary: bool


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A decoded request. Tensors that came as JSON are arrays until `place_tensors` has found room for them."""

    id: str | None
    samples: int
    shapes: tuple[Shape, ...]
    tensors: tuple[TensorRef | np.ndarray, ...]
    outputs: tuple[WantedOutput, ...]
    terms: Terms


def parse_infer(body: Body, header_length: int | None, served: Served) -> InferRequest:
    """Decode a body whose first `header_length` bytes are JSON (all of it when None).

    Touches nothing but the body's bytes, so any thread may call it. Raises InvalidRequest or Unsupported.
    """
    if header_length is not None and not 0 < header_length <= body.nbytes:
        raise InvalidRequest(
            f"inference header size should be in range (1, {body.nbytes}), got: {header_length}; "
            "Inference-Header-Content-Length is the length of the JSON part"
        )
    document = _parse_json(body.view[:header_length])
    request_id = _request_id(document)
    parameters = _parameters(document, "the request")
    reader = _InputReader(body, header_length, served, request_id)
    samples, shapes, tensors = reader.read(_list_of_objects(document, "inputs", required=True))
    outputs = _wanted_outputs(_list_of_objects(document, "outputs", required=False), parameters, reader)
    _check_forms(outputs, reader)
    return InferRequest(request_id, samples, shapes, tensors, outputs, _terms(parameters))


def place_tensors(request: InferRequest, exchange: Exchange) -> Inputs:
    """The request's inputs, all of them in the slab. Raises Overloaded."""
    references = tuple(
        tensor if isinstance(tensor, TensorRef) else _written(tensor, exchange) for tensor in request.tensors
    )
    return Inputs(request.samples, request.shapes, references)


def _written(array: np.ndarray, exchange: Exchange) -> TensorRef:
    slot = exchange.reserve(array.nbytes)
    np.frombuffer(slot.view, array.dtype)[:] = array.reshape(-1)
    return TensorRef(slot.ref, 0, array.nbytes)


class _InputReader:
    """Walks the inputs of one request; the binary ones lie one after another behind the JSON."""

    def __init__(self, body: Body, header_length: int | None, served: Served, request_id: str | None) -> None:
        self._body = body
        self._position = body.nbytes if header_length is None else header_length
        self._spec = served.spec
        self._model = f"'{served.key.model}'"
        self._prefix = f"[request id: {(request_id or '<id_unknown>')[:100]}] "
        self.outputs = served.spec.outputs

    def read(self, documents: list[_Json]) -> tuple[int, tuple[Shape, ...], tuple[TensorRef | np.ndarray, ...]]:
        """Samples, the shapes of one sample, and the tensors, in the model's order."""
        expected = {spec.name: spec for spec in self._spec.inputs}
        found: dict[str, TensorRef | np.ndarray] = {}
        shapes: dict[str, Shape] = {}
        for document in documents:
            name = _required(document, "name", str, "an input's name, a string")
            spec = expected.get(name)
            if spec is None:
                raise self.wrong(
                    f"unexpected inference input '{name[:100]}' for model {self._model}; it takes {sorted(expected)}"
                )
            if name in found:
                raise self.wrong(f"input '{name}' already exists in request")
            shapes[name] = self._shape(document, spec)
            found[name] = self._tensor(document, spec, shapes[name])
        self._check_complete(found)
        if self._position != self._body.nbytes:
            extra = self._body.nbytes - self._position
            raise self.wrong(f"unexpected additional input data for model {self._model}: {extra} bytes too many")
        samples, own_shapes = self._batch(shapes)
        return samples, own_shapes, tuple(found[spec.name] for spec in self._spec.inputs)

    def wrong(self, message: str) -> InvalidRequest:
        return InvalidRequest(self._prefix + message)

    def _check_complete(self, found: dict[str, TensorRef | np.ndarray]) -> None:
        missing = [spec.name for spec in self._spec.inputs if spec.name not in found]
        if missing:
            raise self.wrong(
                f"expected {len(self._spec.inputs)} inputs but got {len(found)} inputs for model "
                f"{self._model}. Got input(s) {sorted(found)}, but missing required input(s) {missing}. "
                "Please provide all required input(s)."
            )

    def _batch(self, shapes: dict[str, Shape]) -> tuple[int, tuple[Shape, ...]]:
        """How many samples there are, and the shapes of one."""
        names = [spec.name for spec in self._spec.inputs]
        if self._spec.max_batch_size == 0:
            return 1, tuple(shapes[name] for name in names)
        samples = shapes[names[0]][0]
        for name in names:
            if shapes[name][0] != samples:
                raise self.wrong(f"input '{name}' batch size does not match other inputs for {self._model}")
        if samples > self._spec.max_batch_size:
            raise self.wrong(
                f"inference request batch-size must be <= {self._spec.max_batch_size} for {self._model}, got {samples}"
            )
        if samples < 1:
            raise self.wrong(f"inference request batch-size must be >= 1 for {self._model}, got {samples}")
        return samples, tuple(shapes[name][1:] for name in names)

    def _shape(self, document: _Json, spec: TensorSpec) -> Shape:
        dtype = _required(document, "datatype", str, "the tensor's datatype, a string")
        if dtype not in NUMPY_DTYPES:
            raise self.wrong(
                f"input '{spec.name}' has datatype '{dtype[:40]}', which is not supported; use '{spec.dtype}'"
            )
        if dtype != spec.dtype:
            raise self.wrong(
                f"inference input '{spec.name}' data-type is '{dtype}', but model {self._model} expects '{spec.dtype}'"
            )
        shape = _required(document, "shape", list, "a list of whole numbers")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise self.wrong(
                f"the shape of input '{spec.name}' must be a list of whole numbers >= 0, got {_brief(shape)}"
            )
        # The largest size by itself too: a product with a 0 in it is small, whatever else stands there.
        if max(*shape, math.prod(shape), 0) * spec.numpy_dtype.itemsize > _MAX_BYTES:
            raise self.wrong(
                f"the shape of input '{spec.name}' causes total byte size to exceed maximum size of {_MAX_BYTES}"
            )
        batch = (-1,) if self._spec.max_batch_size else ()
        want = (*batch, *spec.shape)
        if len(shape) != len(want) or any(w not in (-1, s) for w, s in zip(want, shape, strict=True)):
            raise self.wrong(
                f"unexpected shape for input '{spec.name}' for model {self._model}. "
                f"Expected {_shown(want)}, got {_shown(shape)}. {self._hint(spec, shape)}"
            )
        return tuple(shape)

    def _hint(self, spec: TensorSpec, shape: list[int]) -> str:
        if self._spec.image is not None and len(shape) == len(spec.shape) + 1:
            return f"'{spec.name}' takes {spec.dtype} images as {_shown(spec.shape)} each."
        if self._spec.max_batch_size:
            return "NOTE: with a max_batch_size above 0 the first dimension is the batch."
        return "The model has no batch dimension: the shape is taken as it is."

    def _tensor(self, document: _Json, spec: TensorSpec, shape: Shape) -> TensorRef | np.ndarray:
        parameters = _parameters(document, f"input '{spec.name}'")
        if "shared_memory_region" in parameters:
            raise Unsupported("Client shared memory is not offered by this server; send the tensor in the request")
        binary_size = parameters.get("binary_data_size")
        if ("data" in document) == (binary_size is not None):
            raise self.wrong(
                "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters'; "
                f"see '{spec.name}'"
            )
        if binary_size is None:
            return self._from_json(document["data"], spec, shape)
        return self._from_binary(binary_size, spec, math.prod(shape) * spec.numpy_dtype.itemsize)

    def _from_binary(self, size: object, spec: TensorSpec, nbytes: int) -> TensorRef:
        if type(size) is not int or size < 0:
            raise self.wrong(f"binary_data_size of input '{spec.name}' must be a whole number >= 0, got {_brief(size)}")
        if size != nbytes:
            raise self.wrong(
                f"input byte size mismatch for input '{spec.name}' for model {self._model}. "
                f"Expected {nbytes}, got {size}"
            )
        missing = self._position + size - self._body.nbytes
        if missing > 0:
            raise self.wrong(
                f"unexpected size for input '{spec.name}', expecting {missing} additional bytes for model {self._model}"
            )
        reference = TensorRef(self._body.slot.ref, self._position, size)
        self._position += size
        return reference

    def _from_json(self, data: object, spec: TensorSpec, shape: Shape) -> np.ndarray:
        if spec.dtype == "FP16":
            raise self.wrong(
                "receiving FP16 data via JSON is not supported. "
                f"Please use the binary data format for input {spec.name}"
            )
        values = self._json_values(data, spec)
        if values.size != math.prod(shape):
            raise self.wrong(
                f"input '{spec.name}' has {values.size} values, its shape {_shown(shape)} needs {math.prod(shape)}"
            )
        return values

    def _json_values(self, data: object, spec: TensorSpec) -> np.ndarray:
        dtype = spec.numpy_dtype
        if not isinstance(data, list):
            raise self.wrong(f"data of input '{spec.name}' must be a list")
        try:
            values = np.asarray(data)
        except (ValueError, OverflowError, RecursionError) as error:
            raise self.wrong(f"data of input '{spec.name}' must be numbers, flat or nested like its shape") from error
        if values.size == 0:
            return values.astype(dtype)
        if dtype.name == "uint64" and values.dtype.kind == "f":
            values = _exact_integers(data, values)
        if values.dtype.kind not in _ACCEPTED_KINDS[dtype.kind]:
            raise self.wrong(f"data of input '{spec.name}' must be {spec.dtype} values, got {_brief(data)}")
        if dtype.kind in "iu":
            limits = np.iinfo(dtype.name)
            if values.min() < limits.min or values.max() > limits.max:
                raise self.wrong(f"data of input '{spec.name}' must lie in {limits.min}..{limits.max} for {spec.dtype}")
        with np.errstate(over="ignore"):  # a number beyond FP32 becomes infinity, as in every JSON reader
            return values.astype(dtype)


def _wanted_outputs(documents: list[_Json], parameters: _Json, reader: _InputReader) -> tuple[WantedOutput, ...]:
    default_binary = parameters.get("binary_data_output", False)
    if not isinstance(default_binary, bool):
        raise InvalidRequest("'binary_data_output' in 'parameters' must be true or false")
    if not documents:
        return tuple(WantedOutput(index, default_binary) for index in range(len(reader.outputs)))
    wanted: list[WantedOutput] = []
    for document in documents:
        name = _required(document, "name", str, "an output's name, a string")
        names = [spec.name for spec in reader.outputs]
        if name not in names:
            raise reader.wrong(f"unexpected inference output '{name[:100]}'; the model gives {sorted(names)}")
        index = names.index(name)
        if any(other.index == index for other in wanted):
            raise reader.wrong(f"output '{name}' already exists in request")
        own = _parameters(document, f"output '{name}'")
        for extension in ("classification", "shared_memory_region"):
            if extension in own:
                raise Unsupported(
                    f"'{extension}' for output '{name}' is not offered by this server; ask for the tensor"
                )
        binary = own.get("binary_data", default_binary)
        if not isinstance(binary, bool):
            raise reader.wrong(f"'binary_data' of output '{name}' must be true or false")
        wanted.append(WantedOutput(index, binary))
    return tuple(wanted)


def _check_forms(wanted: tuple[WantedOutput, ...], reader: _InputReader) -> None:
    """Refuse before the run what could not be encoded after it."""
    for output in wanted:
        spec = reader.outputs[output.index]
        if spec.dtype == "FP16" and not output.binary:
            raise reader.wrong(
                f"sending FP16 data via JSON is not supported. Please use the binary data format for output {spec.name}"
            )


def _terms(parameters: _Json) -> Terms:
    timeout_us = parameters.get("timeout", 0)
    priority = parameters.get("priority", 0)
    for name, value in (("timeout", timeout_us), ("priority", priority)):
        if type(value) is not int or not 0 <= value < 1 << 53:
            raise InvalidRequest(f"'{name}' in 'parameters' must be a whole number >= 0, got {_brief(value)}")
    # 0 is the protocol's word for "the default"; 1 is the most urgent class.
    return Terms(None, timeout_us or None, priority)


def _parse_json(view: memoryview) -> _Json:
    try:
        document = orjson.loads(view)
    except orjson.JSONDecodeError:
        document = _parse_with_nan(bytes(view))
    if not isinstance(document, dict):
        raise InvalidRequest("the request must be a JSON object with 'inputs'")
    return document


def _parse_with_nan(text: bytes) -> object:
    """NaN and Infinity are legal in tensors but not in JSON; the standard library reads them."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InvalidRequest("JSON nesting depth exceeds maximum allowed limit (100)") from error
    except ValueError as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error


def _list_of_objects(document: _Json, field: str, *, required: bool) -> list[_Json]:
    value = document.get(field)
    if value is None and not required:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidRequest(f"'{field}' must be a list of objects")
    return value


def _parameters(document: _Json, where: str) -> _Json:
    value = document.get("parameters", {})
    if not isinstance(value, dict):
        raise InvalidRequest(f"'parameters' of {where} must be an object")
    return value


def _required(document: _Json, field: str, kind: type, expected: str) -> Any:
    value = document.get(field)
    if not isinstance(value, kind):
        raise InvalidRequest(f"'{field}' must be {expected}, got {_brief(value)}")
    return value


def _request_id(document: _Json) -> str | None:
    """The client's own id, which goes back in the answer."""
    if document.get("id") is None:
        return None
    own_id: str = _required(document, "id", str, "a string")
    try:
        own_id.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("'id' must be text that can be written as UTF-8, got half a surrogate pair") from error
    return own_id


def _exact_integers(data: list[Any], rounded: np.ndarray) -> np.ndarray:
    """numpy reads integers on both sides of 2**63 as floats; here they are again, if integers is all there is."""
    exact = np.asarray(data, dtype=object)
    fits = all(type(value) is int and 0 <= value < 1 << 64 for value in exact.flat)
    return exact.astype(np.uint64) if fits else rounded


def _brief(value: object) -> str:
    """A client's value for an error message: never long, and never deep, whatever was sent."""
    return reprlib.repr(value)


def _shown(shape: tuple[int, ...] | list[int]) -> str:
    if len(shape) > _MAX_SHOWN_DIMENSIONS:
        return f"{len(shape)} dimensions"
    return "[" + ",".join(str(size) for size in shape) + "]"
