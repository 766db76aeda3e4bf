"""The Open Inference Protocol's infer request over HTTP: JSON, binary tensors, or both.

Binary tensors stay where the body was read to and are only pointed at; JSON tensors become arrays first
and are written into a slot afterwards, because a large body is parsed in a thread and the slab belongs to
the event loop. What the request means is settled in `inference`. The beginnings of the error sentences are
Triton's, because clients match them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from convoy.app.edge.http.binary_tensors import BinaryTail, raw_request
from convoy.app.edge.http.body import Body
from convoy.app.edge.http.json_documents import loads
from convoy.app.edge.http.json_forms import JsonForm, json_form
from convoy.app.edge.oip.inference import InferRequest, understand, wrong_request
from convoy.app.edge.oip.shared_tensors import REGION, SharedInput, shared_place
from convoy.app.edge.oip.tensors import (
    BINARY_ONLY,
    OutputIn,
    RawRequest,
    Source,
    Target,
    TensorIn,
    TensorRef,
    brief,
    in_range,
    shown,
)
from convoy.app.scheduling.request import ModelKey
from convoy.app.submission.inference import ServedLike
from convoy.app.submission.shared_memory import SharedMemory
from convoy.models.errors import InvalidRequest
from convoy.models.spec import ModelSpec

_Json = dict[str, Any]
_MOST_KNOWN = 256
_LONGEST_KNOWN_BYTES = 4 << 10
_MOST_FORMS = 16
# numpy's kinds of values that JSON may bring for a tensor of each kind.
_ACCEPTED_KINDS = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}


def parse_infer(body: Body, header_length: int | None, served: ServedLike, memory: SharedMemory) -> InferRequest:
    """Decode a body whose first `header_length` bytes are JSON: all of it when None, nothing when 0.

    Touches nothing but the body's bytes, so any thread may call it. Raises InvalidRequest, or NotFound or
    Unsupported for shared memory.
    """
    if header_length == 0:
        return understand(raw_request(body, served, memory), served)
    if header_length is not None and not 0 < header_length <= body.nbytes:
        raise InvalidRequest(
            f"inference header size should be in range (1, {body.nbytes}), got: {header_length}; "
            "Inference-Header-Content-Length is the length of the JSON part"
        )
    document = _parse_json(body.view[:header_length])
    tail = BinaryTail(body, body.nbytes if header_length is None else header_length)
    asked = _asked(document, tail, memory)
    request = understand(asked, served)
    extra = body.nbytes - tail.end
    if extra:
        raise wrong_request(
            asked.id, f"unexpected additional input data for model '{served.key.model}': {extra} bytes too many"
        )
    return request


class RequestParser:
    """`parse_infer` for the event loop, with a memory: a client sends the same JSON around every tensor.

    What a header means depends on its bytes, the model and the body's size, and on nothing else as long as all
    inputs are binary tensors of numbers in the body. So the last few hundred meanings are kept. Where the only input is
    a flat list of JSON numbers, it depends on what is around that list; there the last few meanings are.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[ModelKey, int, bytes], _Known] = {}
        self._forms: dict[ModelKey, list[tuple[JsonForm, InferRequest]]] = {}

    def parse(self, body: Body, header_length: int | None, served: ServedLike, memory: SharedMemory) -> InferRequest:
        """Raises as `parse_infer` does."""
        if header_length is None:
            return self._parse_json(body, served, memory)
        if not header_length or header_length > _LONGEST_KNOWN_BYTES:
            return parse_infer(body, header_length, served, memory)
        place = (served.key, body.nbytes, bytes(body.view[:header_length]))
        known = self._known.get(place)
        if known is not None:
            slot = body.slot.ref
            tensors = tuple(TensorRef(slot, tensor.offset, tensor.nbytes) for tensor in known.tensors)
            return known.request._replace(tensors=tensors)
        request = parse_infer(body, header_length, served, memory)
        if has_plain_inputs(request, served.spec):
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            tensors = tuple(tensor for tensor in request.tensors if isinstance(tensor, TensorRef))
            self._known[place] = _Known(request, tensors)
        return request

    def _parse_json(self, body: Body, served: ServedLike, memory: SharedMemory) -> InferRequest:
        text = bytes(body.view)
        forms = self._forms.get(served.key, [])
        for form, meaning in forms:
            values = form.values(text)
            if values is not None:
                return meaning._replace(tensors=(values,))
        request = parse_infer(body, None, served, memory)
        learned = json_form(text, request, served.spec)
        if learned is not None:
            if served.key not in self._forms and len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            self._forms[served.key] = [(learned, request._replace(tensors=())), *forms][:_MOST_FORMS]
        return request


def has_plain_inputs(request: InferRequest, spec: ModelSpec) -> bool:
    """Whether its JSON and its size settle all about its inputs: they are numbers, and bytes of its body."""
    # Strings are checked in the body, and regions come and go.
    is_in_body = all(isinstance(tensor, TensorRef) for tensor in request.tensors) and not request.regions
    return is_in_body and not any(tensor.is_strings for tensor in spec.inputs)


@dataclass(frozen=True, slots=True)
class _Known:
    """What a header meant, and where in its body the tensors lay."""

    request: InferRequest
    tensors: tuple[TensorRef, ...]


def _asked(document: _Json, tail: BinaryTail, memory: SharedMemory) -> RawRequest:
    request_id = _request_id(document)
    parameters = _parameters(document, "the request")
    binary_by_default = parameters.get("binary_data_output", False)
    if not isinstance(binary_by_default, bool):
        raise InvalidRequest("'binary_data_output' in 'parameters' must be true or false")
    inputs = [_tensor(one, tail, memory) for one in _list_of_objects(document, "inputs", required=True)]
    outputs = [_output(one) for one in _list_of_objects(document, "outputs", required=False)]
    return RawRequest(request_id, parameters, inputs, outputs, memory, binary_by_default)


def _tensor(document: _Json, tail: BinaryTail, memory: SharedMemory) -> TensorIn:
    name = _required(document, "name", str, "an input's name, a string")
    datatype = _required(document, "datatype", str, "the tensor's datatype, a string")
    shape = _required(document, "shape", list, "a list of whole numbers")
    return TensorIn(name, datatype, shape, _source(document, name, tail, memory))


def _source(document: _Json, name: str, tail: BinaryTail, memory: SharedMemory) -> Source:
    what = f"input '{name[:100]}'"
    parameters = _parameters(document, what)
    size = parameters.get("binary_data_size")
    if ("data" in document) + (size is not None) + (REGION in parameters) != 1:
        raise InvalidRequest(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'{REGION}' in 'parameters'; see '{name[:100]}'"
        )
    if REGION in parameters:
        return SharedInput(shared_place(parameters, what, memory))
    if size is None:
        return _JsonValues(document["data"])
    if type(size) is not int or size < 0:
        raise InvalidRequest(f"binary_data_size of input '{name[:100]}' must be a whole number >= 0, got {brief(size)}")
    return tail.next(size)


def _output(document: _Json) -> OutputIn:
    name = _required(document, "name", str, "an output's name, a string")
    return OutputIn(name, _parameters(document, f"output '{name[:100]}'"))


@dataclass(frozen=True, slots=True)
class _JsonValues:
    """A tensor as JSON numbers, flat or nested; flat ones may be an array already."""

    data: object

    def read(self, target: Target) -> np.ndarray:
        name = target.spec.name
        if target.spec.dtype in BINARY_ONLY:
            raise target.wrong(
                f"receiving {target.spec.dtype} data via JSON is not supported. "
                f"Please use the binary data format for input {name}"
            )
        if target.spec.is_strings:
            return target.packed(self._strings(target))
        values = self._values(target)
        if values.size != target.values:
            raise target.wrong(
                f"input '{name}' has {values.size} values, its shape {shown(target.shape)} needs {target.values}"
            )
        return values

    def _strings(self, target: Target) -> list[bytes]:
        wrong = target.wrong(f"data of input '{target.spec.name}' must be a list of strings")
        if not isinstance(self.data, list):
            raise wrong
        try:
            elements = np.asarray(self.data, object).reshape(-1).tolist()
            if not all(isinstance(element, str) for element in elements):
                raise wrong
            return [element.encode() for element in elements]
        except (ValueError, RecursionError) as error:  # ragged, absurdly deep, or half a surrogate pair
            raise wrong from error

    def _values(self, target: Target) -> np.ndarray:
        spec, dtype = target.spec, target.spec.numpy_dtype
        if isinstance(self.data, np.ndarray):
            return in_range(self.data, target)
        if not isinstance(self.data, list):
            raise target.wrong(f"data of input '{spec.name}' must be a list")
        try:
            values = np.asarray(self.data)
        except (ValueError, OverflowError, RecursionError) as error:
            raise target.wrong(f"data of input '{spec.name}' must be numbers, flat or nested like its shape") from error
        if values.size == 0:
            return values.astype(dtype)
        if dtype.name == "uint64" and values.dtype.kind == "f":
            values = _exact_integers(self.data, values)
        if values.dtype.kind not in _ACCEPTED_KINDS[dtype.kind]:
            raise target.wrong(f"data of input '{spec.name}' must be {spec.dtype} values, got {brief(self.data)}")
        return in_range(values, target)


def _parse_json(view: memoryview) -> _Json:
    try:
        document = loads(view)
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
        raise InvalidRequest(f"'{field}' must be {expected}, got {brief(value)}")
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
