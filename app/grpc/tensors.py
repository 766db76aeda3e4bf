"""Convert the protocol's protobuf messages to requests, and answers to protobuf messages.

Tensors come raw, as bytes in `raw_input_contents`, or typed, as numbers in `contents`; `inference` checks them. Answers
are always raw, as clients expect, one entry per output in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from convoy.app.calls.shared_memory import SharedMemory
from convoy.app.lifecycle.catalog import Served
from convoy.app.protocol.inference import InferRequest, answers_of
from convoy.app.protocol.tensors import (
    REGION,
    OutputIn,
    RawRequest,
    SharedInput,
    Source,
    Target,
    TensorIn,
    TensorOut,
    in_range,
    shared_place,
)
from convoy.app.scheduling.request import Done
from convoy.models.errors import InvalidRequest

# The field of `contents` for each type. 16-bit floats have none.
_FIELDS = {
    "BOOL": ("bool_contents", np.bool_),
    "INT8": ("int_contents", np.int32),
    "INT16": ("int_contents", np.int32),
    "INT32": ("int_contents", np.int32),
    "INT64": ("int64_contents", np.int64),
    "UINT8": ("uint_contents", np.uint32),
    "UINT16": ("uint_contents", np.uint32),
    "UINT32": ("uint_contents", np.uint32),
    "UINT64": ("uint64_contents", np.uint64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
}

# Tags of length-delimited fields: field number and wire type.
_HAS_LENGTH = 2
_RAW_INPUT = 7 << 3 | _HAS_LENGTH  # ModelInferRequest.raw_input_contents
_RAW_OUTPUT = bytes((6 << 3 | _HAS_LENGTH,))  # ModelInferResponse.raw_output_contents, its last field
_STREAM_ANSWER = bytes((2 << 3 | _HAS_LENGTH,))  # ModelStreamInferResponse.infer_response


def split(data: bytes) -> tuple[bytes, list[memoryview]]:
    """Split a ModelInferRequest into the message without raw tensors, and views of these.

    The library would copy them twice. It still parses malformed messages: those with unknown fields, which all have a
    length, and those with so many fields that it is faster.
    """
    view, position = memoryview(data), 0
    rest, raw = list[memoryview](), list[memoryview]()
    try:
        while position < len(data):
            tag, start = _varint(data, position)
            nbytes, start = _varint(data, start)
            end = start + nbytes
            # As many fields as fit into a message would each cost a thousand times their bytes.
            is_many = len(rest) + len(raw) == 500
            if tag & 7 != _HAS_LENGTH or end > len(data) or is_many:
                return data, []
            if tag == _RAW_INPUT:
                raw.append(view[start:end])
            else:
                rest.append(view[position:end])
            position = end
    except IndexError:
        return data, []
    return b"".join(rest), raw


def asked_of(message: Any, raw: Sequence[bytes | memoryview], memory: SharedMemory) -> RawRequest:
    """Convert a ModelInferRequest to a RawRequest. Raises InvalidRequest, NotFound or Unsupported."""
    sources = _sources(message, raw, memory)
    inputs = [
        TensorIn(tensor.name, tensor.datatype, list(tensor.shape), source)
        for tensor, source in zip(message.inputs, sources, strict=True)
    ]
    outputs = [OutputIn(output.name, parameters_of(output.parameters)) for output in message.outputs]
    parameters = parameters_of(message.parameters)
    return RawRequest(message.id or None, parameters, inputs, outputs, memory, binary_by_default=True)


def parameters_of(field: Any) -> dict[str, object]:
    """Convert a map of InferParameter to plain values, without empty ones."""
    kinds = ((name, parameter, parameter.WhichOneof("parameter_choice")) for name, parameter in field.items())
    return {name: getattr(parameter, kind) for name, parameter, kind in kinds if kind is not None}


def infer_response(request: InferRequest, served: Served, done: Done, *, is_final: bool = False) -> bytes:
    """Encode a ModelInferResponse, which owns its bytes.

    `is_final` is the parameter of a stream's last response, if the client asked for it.
    """
    return response_of(request.id, served, answers_of(request, served, done), is_final=is_final)


def response_of(own_id: str | None, served: Served, answers: Sequence[TensorOut], *, is_final: bool) -> bytes:
    """Encode a response around given outputs."""
    message = service_pb2.ModelInferResponse(
        model_name=served.key.model, model_version=str(served.key.version), id=own_id or ""
    )
    if is_final:
        message.parameters["triton_final_response"].bool_param = True
    for answer in answers:
        message.outputs.add(name=answer.spec.name, datatype=answer.spec.dtype, shape=answer.shape)
    parts: list[bytes | memoryview] = [message.SerializeToString()]
    for answer in answers:  # copied once, and never by the library
        parts += (_RAW_OUTPUT, _as_varint(answer.data.nbytes), answer.data)
    return b"".join(parts)


def stream_response(infer_response: bytes) -> bytes:
    """Encode a ModelStreamInferResponse around an encoded response."""
    return b"".join((_STREAM_ANSWER, _as_varint(len(infer_response)), infer_response))


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Decode a varint. Returns the number and its end. Raises IndexError if it is cut off."""
    value = 0
    for shift in range(0, 64, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError


def _as_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _sources(message: Any, raw: Sequence[bytes | memoryview], memory: SharedMemory) -> Iterator[Source]:
    """The source of each input, in order; inputs in shared memory have no raw contents."""
    used = 0
    for tensor in message.inputs:
        where = f"'{tensor.name[:100]}' for model '{message.model_name[:100]}'"
        is_shared = REGION in tensor.parameters
        if tensor.HasField("contents") and (raw or is_shared):
            other = "a shared memory region" if is_shared else "raw_input_contents"
            raise InvalidRequest(
                f"contents field must not be specified when using {other} for {where}; use one of them"
            )
        if is_shared:
            yield SharedInput(shared_place(parameters_of(tensor.parameters), f"input {where}", memory))
        elif tensor.HasField("contents"):
            yield _Typed(tensor.contents)
        elif used < len(raw):
            used += 1
            yield _Raw(raw[used - 1])
        else:
            raise InvalidRequest(
                f"unable to find data for input tensor {where} in request; "
                f"there are {len(raw)} raw_input_contents for {len(message.inputs)} inputs"
            )
    if len(raw) > used:
        raise InvalidRequest(
            f"unexpected additional input data for model '{message.model_name[:100]}': "
            f"{len(raw)} raw_input_contents for {len(message.inputs)} inputs"
        )


@dataclass(frozen=True, slots=True)
class _Raw:
    """A tensor as little-endian bytes."""

    data: bytes | memoryview

    def read(self, target: Target) -> np.ndarray:
        target.check_bytes(memoryview(self.data))
        return np.frombuffer(self.data, np.uint8)


@dataclass(frozen=True, slots=True)
class _Typed:
    """A tensor as numbers in one field of InferTensorContents."""

    contents: Any

    def read(self, target: Target) -> np.ndarray:
        spec = target.spec
        if spec.is_strings:
            return target.packed(self.contents.bytes_contents)
        if spec.dtype not in _FIELDS:
            raise target.wrong(
                f"unexpected explicit tensor data for input tensor '{spec.name}' for model {target.model} "
                f"of type '{spec.dtype}'; send it in raw_input_contents"
            )
        field, dtype = _FIELDS[spec.dtype]
        numbers = getattr(self.contents, field)
        if len(numbers) != target.values:
            raise target.wrong(
                f"input byte size mismatch for input '{spec.name}' for model {target.model}. "
                f"Expected {target.values} values in {field}, got {len(numbers)}"
            )
        return in_range(np.fromiter(numbers, dtype, count=len(numbers)), target)
