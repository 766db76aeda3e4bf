"""An infer request's JSON: its fields by a typed decoder, and long lists of numbers as arrays.

A JSON parser holds the GIL from the first byte to the last, and makes an object of each value, which takes a hundred
bytes for two of text. So a large document is weighed before it is parsed, by its commas and brackets, which numpy
counts without the GIL.
"""

from __future__ import annotations

import json
import math
import operator
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import orjson
import simdjson

from convoy.app.lifecycle.catalog import Served
from convoy.app.protocol.tensors import OutputIn
from convoy.models.errors import InvalidJson, InvalidRequest

_PIECE_BYTES = 64 << 10
# "[" and "{" differ from each other in one bit, and from all other bytes in more.
_OPENING, _EITHER = ord("["), 0xFF ^ (ord("[") ^ ord("{"))
# What a request has beside its tensors: shapes, parameters, outputs, and text with commas.
_MOST_BESIDE = 1 << 16


class Weight(NamedTuple):
    """Upper bounds for a text of `nbytes`: its values, and its lists and objects."""

    nbytes: int
    values: int
    lists: int


def weigh(text: memoryview) -> Weight:
    """Weigh a text. Any thread may call it."""
    codes, commas, lists = np.frombuffer(text, np.uint8), 0, 0
    for start in range(0, len(codes), _PIECE_BYTES):
        piece = codes[start : start + _PIECE_BYTES]
        commas += int(np.count_nonzero(piece == ord(",")))
        lists += int(np.count_nonzero((piece & _EITHER) == _OPENING))
    return Weight(len(codes), commas + 1, lists)


def check_weight(weight: Weight, served: Served) -> None:
    """Raise InvalidRequest for more than the model's inputs can hold, if that is bounded."""
    spec = served.spec
    sizes = [(spec.max_batch_size or 1, *tensor.shape) for tensor in spec.inputs]
    if any(tensor.is_strings for tensor in spec.inputs) or any(size < 0 for shape in sizes for size in shape):
        return
    names = ", ".join(tensor.name for tensor in spec.inputs)[:100]
    of = f"the inputs of model '{served.key.model}' ({names})"
    most = sum(math.prod(shape) for shape in sizes)
    if weight.values > most + _MOST_BESIDE:
        raise InvalidRequest(
            f"the request's JSON has {weight.values} values, and {of} hold {most} at most, "
            f"in a batch of {max(1, spec.max_batch_size)}; send no more than they hold"
        )
    # One list around all, and one for each index of the dimensions before the last.
    most_lists = sum(1 + sum(math.prod(shape[:depth]) for depth in range(1, len(shape))) for shape in sizes)
    if weight.lists > most_lists + _MOST_BESIDE:
        raise InvalidRequest(
            f"the request's JSON has {weight.lists} lists and objects, and nesting like {of} needs {most_lists} "
            "at most; send flat lists of numbers"
        )


def needed_bytes(weight: Weight, served: Served) -> int:
    """The memory that parsing such a body takes beside the body."""
    # A value takes space in simdjson's indexes, tape and a list, and an object if it becomes one.
    each = 104 if any(tensor.is_strings for tensor in served.spec.inputs) else 64
    # The text exists three times: the body, simdjson's copy, and its strings. A list takes 160 bytes.
    return 3 * weight.nbytes + each * weight.values + 160 * weight.lists


# Parsing numbers from this much JSON takes some tenths of a millisecond, like a hop to a thread.
INLINE_JSON_BYTES = 96 << 10
_MOST_TENSORS = 256
# numpy's limit, and so the limit for nested lists.
_MOST_DIMENSIONS = 64
# The number of values that become objects while nothing else runs.
_MOST_OBJECTS = 1 << 20
# The protocol's types that a list of JSON numbers represents without ambiguity, and how simdjson may read such a list.
_FORMS = {
    **dict.fromkeys(["FP32", "FP64"], "d"),
    **dict.fromkeys(["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32"], "i"),
    "UINT64": "iu",
}
# All bytes but brackets and commas.
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
_DTYPES = {"d": np.float64, "i": np.int64, "u": np.uint64}


class JsonTensor(msgspec.Struct, gc=False):
    """An input. `data` is unparsed JSON, or what the standard library has made of it."""

    name: str
    datatype: str
    shape: Annotated[list[int], msgspec.Meta(max_length=_MOST_DIMENSIONS)]
    parameters: dict[str, Any] = {}
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class InferDocument(msgspec.Struct, gc=False):
    """An infer request; other members are ignored."""

    inputs: Annotated[list[JsonTensor], msgspec.Meta(max_length=_MOST_TENSORS)]
    id: str | None = None
    parameters: dict[str, Any] = {}
    outputs: Annotated[list[OutputIn], msgspec.Meta(max_length=_MOST_TENSORS)] | None = None


_decoder = msgspec.json.Decoder(InferDocument)


def read_document(view: memoryview) -> InferDocument:
    """Parse a request, except for the `data` of its tensors. Raises InvalidRequest."""
    try:
        try:
            return _decoder.decode(view)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _read_with_nan(view)
    except (ValueError, RecursionError) as error:
        raise _invalid(error) from None


def _invalid(error: Exception) -> InvalidRequest:
    """The client's error for what a JSON parser raised."""
    if isinstance(error, msgspec.ValidationError):
        return InvalidRequest(f"the request is not an infer request of the Open Inference Protocol: {error}")
    if isinstance(error, RecursionError):
        return InvalidJson("JSON nesting depth exceeds maximum allowed limit (100); send flat lists")
    return InvalidJson(f"failed to parse the request JSON buffer: {error}; send valid JSON")


def _read_with_nan(view: memoryview) -> InferDocument:
    """NaN and Infinity are legal in tensors but not in JSON; the standard library reads them."""
    _check_count(view, "in JSON that is invalid, unusual, or has NaN or Infinity")
    document = json.loads(bytes(view))
    tensors = document.get("inputs") if isinstance(document, dict) else None
    lists = [
        one.pop("data", msgspec.UNSET) if isinstance(one, dict) else msgspec.UNSET
        for one in (tensors if isinstance(tensors, list) else ())
    ]
    request = msgspec.convert(document, InferDocument)
    for tensor, data in zip(request.inputs, lists, strict=True):
        tensor.data = data
    return request


def _check_count(text: memoryview, what: str) -> None:
    if len(text) > INLINE_JSON_BYTES and (count := sum(weigh(text)[1:])) > _MOST_OBJECTS:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {count} values {what}; send binary tensor data")


def read_values(data: object, datatype: str) -> object:
    """A tensor's `data`: an array if it is a list of numbers that fits the tensor, flat or evenly nested.

    The array is 1-d, of float64, int64 or uint64. Anything else is what JSON makes of it. Raises InvalidRequest.
    """
    if not isinstance(data, msgspec.Raw):
        return data
    text, forms = memoryview(data), _FORMS.get(datatype, "")
    if forms:
        values = _numbers(bytes(text), forms)
        if values is not None:
            return values
    _check_count(text, "that are no flat or even lists of numbers")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # 1e999, for example, or half a surrogate pair
        try:
            return json.loads(bytes(text))
        except (ValueError, RecursionError) as error:
            raise _invalid(error) from None


def _numbers(text: bytes, forms: str) -> np.ndarray | None:
    try:
        data = simdjson.Parser().parse(text)
        if not isinstance(data, simdjson.Array):
            return None
        lengths = _lengths(data)
        if not _is_even(text, lengths):
            return None
        for form in forms:
            try:
                values: np.ndarray = np.frombuffer(data.as_buffer(of_type=form), _DTYPES[form])  # type: ignore[arg-type]
            except (TypeError, ValueError):  # not a number, or not in this form
                continue
            return values if values.size == math.prod(lengths) else None
    except (ValueError, RuntimeError):  # simdjson's errors for unsupported values
        pass
    return None


def _lengths(data: object) -> list[int]:
    """The lengths of a list and of the first list in each: the shape, if lists at one depth have equal lengths."""
    lengths: list[int] = []
    while isinstance(data, simdjson.Array) and len(lengths) <= _MOST_DIMENSIONS:
        lengths.append(len(data))
        data = next(iter(data), None)
    return lengths


def _is_even(text: bytes, lengths: list[int]) -> bool:
    """Whether the lists in this text have these lengths, judged by brackets and commas: `[]` looks like `[1]`."""
    if len(lengths) > _MOST_DIMENSIONS:
        return False
    lists = 1 + sum(accumulate(lengths[:-1], operator.mul))
    # These two bound what is built below.
    if text.count(b"[") != lists or math.prod(lengths) > text.count(b",") + 1:
        return False
    expected = b""
    for length in reversed(lengths):
        expected = b"[" + b",".join([expected] * length) + b"]"
    return text.translate(None, _NO_STRUCTURE) == expected
