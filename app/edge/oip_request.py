"""The Open Inference Protocol's infer request: JSON, binary tensors, or both, to tensors in the slab.

Binary tensors stay where the body was read to and are only pointed at; JSON tensors are written into a
slot of their own. The beginnings of the error sentences are Triton's, because clients match them.
"""

from __future__ import annotations

import json
import math
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
_MAX_ELEMENTS = 1 << 40


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """An output that the client asked for, and the form in which it wants it."""

    index: int
    binary: bool


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A decoded request; its tensors lie in slots of the exchange."""

    id: str | None
    inputs: Inputs
    outputs: tuple[WantedOutput, ...]
    terms: Terms


def parse_infer(body: Body, header_length: int | None, served: Served, exchange: Exchange) -> InferRequest:
    """Decode a body whose first `header_length` bytes are JSON (all of it when None).

    Raises InvalidRequest, Unsupported or Overloaded.
    """
    if header_length is not None and not 0 < header_length <= body.nbytes:
        raise InvalidRequest(
            f"inference header size should be in range (1, {body.nbytes}), got: {header_length}; "
            "Inference-Header-Content-Length is the length of the JSON part"
        )
    document = _parse_json(body.view[:header_length])
    request_id = _optional(document, "id", str, "a string")
    parameters = _parameters(document, "the request")
    reader = _InputReader(body, header_length, served, exchange, request_id)
    inputs = reader.read(_list_of_objects(document, "inputs", required=True))
    outputs = _wanted_outputs(_list_of_objects(document, "outputs", required=False), parameters, reader)
    return InferRequest(request_id, inputs, outputs, _terms(parameters))


class _InputReader:
    """Walks the inputs of one request; the binary ones lie one after another behind the JSON."""

    def __init__(
        self, body: Body, header_length: int | None, served: Served, exchange: Exchange, request_id: str | None
    ) -> None:
        self._body = body
        self._position = body.nbytes if header_length is None else header_length
        self._spec = served.spec
        self._exchange = exchange
        self._model = f"'{served.spec.name}'"
        self._prefix = f"[request id: {request_id or '<id_unknown>'}] "
        self.output_names = {spec.name: index for index, spec in enumerate(served.spec.outputs)}

    def read(self, documents: list[_Json]) -> Inputs:
        expected = {spec.name: spec for spec in self._spec.inputs}
        found: dict[str, TensorRef] = {}
        shapes: dict[str, Shape] = {}
        for document in documents:
            name = _required(document, "name", str, "an input's name, a string")
            spec = expected.get(name)
            if spec is None:
                raise self.wrong(
                    f"unexpected inference input '{name}' for model {self._model}; it takes {sorted(expected)}"
                )
            if name in found:
                raise self.wrong(f"input '{name}' already exists in request")
            shapes[name] = self._shape(document, spec)
            found[name] = self._tensor(document, spec, shapes[name])
        self._check_complete(found)
        if self._position != self._body.nbytes:
            extra = self._body.nbytes - self._position
            raise self.wrong(f"unexpected additional input data for model {self._model}: {extra} bytes too many")
        return self._inputs(found, shapes)

    def wrong(self, message: str) -> InvalidRequest:
        return InvalidRequest(self._prefix + message)

    def _check_complete(self, found: dict[str, TensorRef]) -> None:
        missing = [spec.name for spec in self._spec.inputs if spec.name not in found]
        if missing:
            raise self.wrong(
                f"expected {len(self._spec.inputs)} inputs but got {len(found)} inputs for model "
                f"{self._model}. Got input(s) {sorted(found)}, but missing required input(s) {missing}. "
                "Please provide all required input(s)."
            )

    def _inputs(self, found: dict[str, TensorRef], shapes: dict[str, Shape]) -> Inputs:
        names = [spec.name for spec in self._spec.inputs]
        tensors = tuple(found[name] for name in names)
        if self._spec.max_batch_size == 0:
            return Inputs(1, tuple(shapes[name] for name in names), tensors)
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
        return Inputs(samples, tuple(shapes[name][1:] for name in names), tensors)

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
                f"the shape of input '{spec.name}' must be a list of whole numbers >= 0, got {str(shape)[:80]}"
            )
        if math.prod(shape) * spec.numpy_dtype.itemsize > _MAX_ELEMENTS:
            raise self.wrong(
                f"the shape of input '{spec.name}' causes total element count to exceed maximum size of {_MAX_ELEMENTS}"
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

    def _tensor(self, document: _Json, spec: TensorSpec, shape: Shape) -> TensorRef:
        parameters = _parameters(document, f"input '{spec.name}'")
        if "shared_memory_region" in parameters:
            raise Unsupported("Client shared memory is not offered by this server; send the tensor in the request")
        binary_size = parameters.get("binary_data_size")
        if ("data" in document) == (binary_size is not None):
            raise self.wrong(
                "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters'; "
                f"see '{spec.name}'"
            )
        nbytes = math.prod(shape) * spec.numpy_dtype.itemsize
        if binary_size is None:
            return self._from_json(document["data"], spec, shape, nbytes)
        return self._from_binary(binary_size, spec, nbytes)

    def _from_binary(self, size: object, spec: TensorSpec, nbytes: int) -> TensorRef:
        if type(size) is not int or size < 0:
            raise self.wrong(
                f"binary_data_size of input '{spec.name}' must be a whole number >= 0, got {str(size)[:40]}"
            )
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

    def _from_json(self, data: object, spec: TensorSpec, shape: Shape, nbytes: int) -> TensorRef:
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
        slot = self._exchange.reserve(nbytes)
        np.frombuffer(slot.view, spec.numpy_dtype)[:] = values.reshape(-1)
        return TensorRef(slot.ref, 0, nbytes)

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
        if values.dtype.kind not in _ACCEPTED_KINDS[dtype.kind]:
            raise self.wrong(f"data of input '{spec.name}' must be {spec.dtype} values, got {str(data)[:60]}")
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
        return tuple(WantedOutput(index, default_binary) for index in reader.output_names.values())
    wanted: list[WantedOutput] = []
    for document in documents:
        name = _required(document, "name", str, "an output's name, a string")
        if name not in reader.output_names:
            raise reader.wrong(f"unexpected inference output '{name}'; the model gives {sorted(reader.output_names)}")
        index = reader.output_names[name]
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


def _terms(parameters: _Json) -> Terms:
    timeout_us = parameters.get("timeout", 0)
    priority = parameters.get("priority", 0)
    for name, value in (("timeout", timeout_us), ("priority", priority)):
        if type(value) is not int or not 0 <= value < 1 << 53:
            raise InvalidRequest(f"'{name}' in 'parameters' must be a whole number >= 0, got {str(value)[:40]}")
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
        raise InvalidRequest(f"'{field}' must be {expected}, got {str(value)[:60]}")
    return value


def _optional(document: _Json, field: str, kind: type, expected: str) -> Any:
    return None if document.get(field) is None else _required(document, field, kind, expected)


def _shown(shape: tuple[int, ...] | list[int]) -> str:
    return "[" + ",".join(str(size) for size in shape) + "]"
