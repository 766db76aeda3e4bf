"""`POST /v2/models/{model}[/versions/{version}]/infer`: tensors in, tensors out, as JSON, binary tensors, or both.

Binary tensors stay where the body was read to. JSON tensors first become arrays and are copied into a slot afterwards,
because a large body is parsed in a thread and the slab belongs to the event loop. `protocol.inference` checks what the
request means. Error messages begin with Triton's wording, which clients match.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from convoy.app.calls.call import Call
from convoy.app.calls.shared_memory import SharedMemory
from convoy.app.calls.timing import timing_of
from convoy.app.http.gate import HotRoute, RequestContext
from convoy.app.http.json_documents import (
    INLINE_JSON_BYTES,
    JsonTensor,
    check_weight,
    needed_bytes,
    read_document,
    read_values,
    weigh,
)
from convoy.app.http.replies import Reply
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.decoder import Decoded, DecodeWork
from convoy.app.protocol.inference import (
    InferRequest,
    answers_of,
    is_heavy,
    is_heavy_answer,
    request_for,
    understand,
    wrong_request,
)
from convoy.app.protocol.tensors import (
    BINARY_ONLY,
    REGION,
    RawRequest,
    SharedInput,
    Source,
    Target,
    TensorIn,
    brief,
    in_range,
    shared_place,
    shown,
)
from convoy.app.scheduling.request import Done, Shape, TensorRef
from convoy.app.scheduling.slab import Slot
from convoy.models.errors import BodyTooLarge, InvalidRequest
from convoy.models.spec import TensorSpec
from convoy.models.tensors import unpack

HEADER_LENGTH = b"inference-header-content-length"


class InferRoute(HotRoute):
    """The Open Inference Protocol with the binary tensor extension."""

    protocol = "v2"
    paths = ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer")
    pattern = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]*))?/infer")

    async def answer(self, call: Call, request: RequestContext, served: Served, body: Slot) -> Reply:
        started_ns = time.monotonic_ns()
        meaning, wait_ns = await self._parse(call, body, _header_length(request), served)
        queued = request_for(meaning, served, call)
        call.decoded(time.monotonic_ns() - started_ns - wait_ns, wait_ns)
        done = await call.run(queued)
        if is_heavy_answer(meaning, done):
            reply = await self.decoder.run_owed(render_infer, meaning, served, done)
        else:
            reply = render_infer(meaning, served, done)
        total_ns = time.monotonic_ns() - call.arrival_ns
        timing = timing_of(done, call.decode_wait_ns, call.decode_ns, total_ns)
        reply.headers = (timing.header(), *reply.headers)
        return reply

    async def _parse(self, call: Call, body: Slot, header_length: int | None, served: Served) -> Decoded[InferRequest]:
        memory, slots = self.core.shared_memory, (body,)
        text = body.view[:header_length]
        weighed_ns = needs_bytes = 0
        if text.nbytes > INLINE_JSON_BYTES:
            work = DecodeWork("weigh", text.nbytes, slots)
            weight, weighed_ns = await self.decoder.run(call, work, weigh, text)
            check_weight(weight, served)
            needs_bytes = needed_bytes(weight, served)
            if not call.may_ever_hold(needs_bytes):
                raise BodyTooLarge(
                    f"to read {weight.values} values in {weight.nbytes} bytes of JSON takes {needs_bytes} beside it, "
                    f"and there are {call.core.slab.capacity_bytes} for all requests; send binary tensor data, or "
                    "raise --max-inflight-mb"
                )
        elif not is_heavy(body.view.nbytes, served):
            return Decoded(parse_infer(body, header_length, served, memory), 0)
        work = DecodeWork("tensors", body.view.nbytes, slots, needs_bytes=needs_bytes)
        meaning, wait_ns = await self.decoder.run(call, work, parse_infer, body, header_length, served, memory)
        return Decoded(meaning, weighed_ns + wait_ns)


def _header_length(request: RequestContext) -> int | None:
    raw = request.headers.get(HEADER_LENGTH)
    if raw is None:
        return None
    if not raw.isdigit() or len(raw) > 12:
        raise InvalidRequest(
            f"Inference-Header-Content-Length must be a whole number, got {raw[:40].decode('latin-1')!r}"
        )
    return int(raw)


def raw_request(body: Slot, served: Served, memory: SharedMemory) -> RawRequest:
    """A body that is only the raw bytes of the single input of one sample; all outputs are wanted, binary.

    Raises InvalidRequest for a model whose input such a body does not determine.
    """
    spec, model = served.spec, served.key.model
    if len(spec.inputs) != 1:
        raise InvalidRequest(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(spec.inputs)} inputs in "
            f"'{model}' model configuration; send Inference-Header-Content-Length and the inputs' JSON"
        )
    (only,) = spec.inputs
    batch = (1,) if spec.max_batch_size else ()
    source = _OneString(body) if only.is_strings else _Binary(body, 0, body.view.nbytes)
    tensor = TensorIn(only.name, only.dtype, (*batch, *_deduced(only, body.view.nbytes)), source)
    return RawRequest(None, {}, [tensor], [], memory, binary_by_default=True)


def _deduced(spec: TensorSpec, nbytes: int) -> Shape:
    """The shape of one sample of `nbytes`."""
    if spec.is_strings:
        if any(size not in (1, -1) for size in spec.shape):
            raise InvalidRequest(f"For BYTES datatype raw input '{spec.name}', the model must have input shape [1]")
        return (1,) * len(spec.shape)
    if sum(size < 0 for size in spec.shape) > 1:
        raise InvalidRequest(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    unit_bytes = math.prod(size for size in spec.shape if size >= 0) * spec.numpy_dtype.itemsize
    free = nbytes // unit_bytes if unit_bytes else 0
    return tuple(free if size < 0 else size for size in spec.shape)


@dataclass(frozen=True, slots=True)
class _Binary:
    """A binary tensor; it may be cut off."""

    body: Slot
    begin: int
    size: int

    def read(self, target: Target) -> TensorRef:
        if not target.spec.is_strings:
            target.check_size(self.size)
        missing = self.begin + self.size - self.body.view.nbytes
        if missing > 0:
            raise target.wrong(
                f"unexpected size for input '{target.spec.name}', "
                f"expecting {missing} additional bytes for model {target.model}"
            )
        if target.spec.is_strings:
            target.check_bytes(self.body.view[self.begin : self.begin + self.size])
        return TensorRef(self.body.ref, self.begin, self.size)


@dataclass(frozen=True, slots=True)
class _OneString:
    """A whole body that is one element, without its length."""

    body: Slot

    def read(self, target: Target) -> np.ndarray:
        return target.packed([bytes(self.body.view)])


# numpy's kinds of values that JSON may bring for a tensor of each kind.
_ACCEPTED_KINDS = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}


def parse_infer(body: Slot, header_length: int | None, served: Served, memory: SharedMemory) -> InferRequest:
    """Decode a body whose first `header_length` bytes are JSON: all of it if None, nothing if 0.

    Reads only the body, so any thread may call it. Raises InvalidRequest, or NotFound or Unsupported for shared memory.
    """
    if header_length == 0:
        return understand(raw_request(body, served, memory), served)
    if header_length is not None and not 0 < header_length <= body.view.nbytes:
        raise InvalidRequest(
            f"inference header size should be in range (1, {body.view.nbytes}), got: {header_length}; "
            "Inference-Header-Content-Length is the length of the JSON part"
        )
    document = read_document(body.view[:header_length])
    binary_by_default = document.parameters.get("binary_data_output", False)
    if not isinstance(binary_by_default, bool):
        raise InvalidRequest("'binary_data_output' in 'parameters' must be true or false")
    try:
        (document.id or "").encode()  # returned in the response
    except UnicodeEncodeError as error:
        raise InvalidRequest("'id' must be text that can be written as UTF-8, got half a surrogate pair") from error
    end = body.view.nbytes if header_length is None else header_length
    inputs: list[TensorIn] = []
    for tensor in document.inputs:  # binary tensors follow the JSON, one after the other
        source = _source(tensor, body, end, memory)
        inputs.append(TensorIn(tensor.name, tensor.datatype, tensor.shape, source))
        if isinstance(source, _Binary):
            end += source.size
    asked = RawRequest(document.id, document.parameters, inputs, document.outputs or (), memory, binary_by_default)
    request = understand(asked, served)
    extra = body.view.nbytes - end
    if extra:
        raise wrong_request(
            document.id, f"unexpected additional input data for model '{served.key.model}': {extra} bytes too many"
        )
    return request


def _source(tensor: JsonTensor, body: Slot, begin: int, memory: SharedMemory) -> Source:
    """The source of the values; a binary tensor would start at `begin` in the body."""
    parameters = tensor.parameters
    size, has_data = parameters.get("binary_data_size"), tensor.data is not msgspec.UNSET
    if has_data + (size is not None) + (REGION in parameters) != 1:
        raise InvalidRequest(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'{REGION}' in 'parameters'; see '{tensor.name[:100]}'"
        )
    if has_data:
        return _JsonValues(tensor.data)
    if size is None:
        return SharedInput(shared_place(parameters, f"input '{tensor.name[:100]}'", memory))
    if type(size) is not int or size < 0:
        raise InvalidRequest(
            f"binary_data_size of input '{tensor.name[:100]}' must be a whole number >= 0, got {brief(size)}"
        )
    return _Binary(body, begin, size)


@dataclass(frozen=True, slots=True)
class _JsonValues:
    """A tensor as JSON, flat or nested, which may not be parsed yet."""

    data: object

    def read(self, target: Target) -> np.ndarray:
        name = target.spec.name
        if target.spec.dtype in BINARY_ONLY:
            raise target.wrong(
                f"receiving {target.spec.dtype} data via JSON is not supported. "
                f"Please use the binary data format for input {name}"
            )
        data = read_values(self.data, target.spec.dtype)
        if target.spec.is_strings:
            return target.packed(_strings(data, target))
        values = _values(data, target)
        if values.size != target.values:
            raise target.wrong(
                f"input '{name}' has {values.size} values, its shape {shown(target.shape)} needs {target.values}"
            )
        return values


def _strings(data: object, target: Target) -> list[bytes]:
    wrong = target.wrong(f"data of input '{target.spec.name}' must be a list of strings")
    if not isinstance(data, list):
        raise wrong
    try:
        elements = np.asarray(data, object).reshape(-1).tolist()
        if not all(isinstance(element, str) for element in elements):
            raise wrong
        return [element.encode() for element in elements]
    except (ValueError, RecursionError) as error:  # ragged, absurdly deep, or half a surrogate pair
        raise wrong from error


def _values(data: object, target: Target) -> np.ndarray:
    spec, dtype = target.spec, target.spec.numpy_dtype
    if isinstance(data, np.ndarray):
        return in_range(data, target)
    if not isinstance(data, list):
        raise target.wrong(f"data of input '{spec.name}' must be a list")
    try:
        values = np.asarray(data)
    except (ValueError, OverflowError, RecursionError) as error:
        raise target.wrong(f"data of input '{spec.name}' must be numbers, flat or nested like its shape") from error
    if values.size == 0:
        return values.astype(dtype)
    if dtype.name == "uint64" and values.dtype.kind == "f":
        values = _exact_integers(data, values)
    is_number = dtype.kind != "b"
    if values.dtype.kind not in _ACCEPTED_KINDS[dtype.kind] or (is_number and _has_booleans(data)):
        raise target.wrong(f"data of input '{spec.name}' must be {spec.dtype} values, got {brief(data)}")
    return in_range(values, target)


def _has_booleans(data: list[Any]) -> bool:
    """Whether there are booleans, which numpy would read as numbers among numbers."""
    kinds = set(map(type, data))
    return bool in kinds or (list in kinds and any(_has_booleans(one) for one in data))


def _exact_integers(data: list[Any], rounded: np.ndarray) -> np.ndarray:
    """numpy reads integers on both sides of 2**63 as floats; return exact ones if all are integers."""
    exact = np.asarray(data, dtype=object)
    fits = all(type(value) is int and 0 <= value < 1 << 64 for value in exact.flat)
    return exact.astype(np.uint64) if fits else rounded


def render_infer(request: InferRequest, served: Served, done: Done) -> Reply:
    """Encode the outputs in the requested order.

    The pieces are views of the slab: send them before the call ends. Raises InvalidRequest if an output does not fit
    the requested form.
    """
    outputs: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    is_strict_json = True
    for answer in answers_of(request, served, done):
        spec = answer.spec
        document: dict[str, Any] = {"name": spec.name, "datatype": spec.dtype, "shape": list(answer.shape)}
        if answer.elsewhere:
            pass  # the client has it
        elif answer.binary:
            document["parameters"] = {"binary_data_size": answer.data.nbytes}
            binary.append(answer.data)
        elif spec.is_strings:
            document["data"] = _texts(spec.name, answer.data)
        else:
            values = np.frombuffer(answer.data, spec.numpy_dtype)
            is_strict_json &= values.dtype.kind != "f" or bool(np.isfinite(values).all())
            document["data"] = values
        outputs.append(document)
    envelope: dict[str, Any] = {"id": request.id} if request.id is not None else {}
    envelope |= {"model_name": served.key.model, "model_version": str(served.key.version), "outputs": outputs}
    header = _dump(envelope, is_strict_json)
    if not binary:
        return Reply(200, (header,))
    length = (HEADER_LENGTH, b"%d" % len(header))
    return Reply(200, (header, *binary), "application/octet-stream", (length,))


def _texts(name: str, data: memoryview) -> list[str]:
    try:
        return [element.decode() for element in unpack(data)]
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"output '{name}' holds bytes that are not UTF-8, which JSON cannot carry; ask for it as binary data"
        ) from error


def _dump(document: dict[str, Any], is_strict_json: bool) -> bytes:
    if is_strict_json:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    # NaN and Infinity are the protocol's own extension of JSON; orjson would write null.
    return json.dumps(document, default=lambda values: values.tolist(), separators=(",", ":")).encode()
