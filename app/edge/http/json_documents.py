"""An infer request's JSON, in which most is numbers: long lists of them become arrays without an object per number.

simdjson reads the document; what it does not take, or reads differently from orjson, is left to orjson and its words.
Knows the names that the protocol gives to the fields, and nothing of what they mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import orjson
import simdjson

# Numbers of so much JSON are read in some tenths of a millisecond; to hand it to a thread takes as long.
INLINE_JSON_BYTES = 96 << 10
# The protocol's types that a list of JSON numbers of any form stands for without a doubt.
_FLOATS = ("FP32", "FP64")
# Below, making objects of the numbers costs less than not to.
_SHORTEST_BYTES = 2 << 10
# A parser keeps several times the memory of its largest document.
_LARGEST_KEPT_BYTES = 1 << 20
# simdjson counts a list's values up to 2**24 - 1 and writes all there are behind the list that it made for so many. Two
# bytes a value are the least, with the commas.
_LARGEST_LISTED_BYTES = 2 << 24
# In larger documents, what is beside the numbers is short.
_MOST_SHORT = 1 << 16
_ABSENT = object()
_BOM = b"\xef\xbb\xbf"
_kept = threading.local()


def loads(view: memoryview) -> Any:
    """What `orjson.loads` returns, with arrays for flat lists of numbers in FP32 and FP64 tensors.

    They are 1-d, of float64, and are the only arrays. Raises orjson.JSONDecodeError.
    """
    if len(view) >= _SHORTEST_BYTES and view[:3] != _BOM:
        try:
            return _document(bytes(view))
        except (_NotHere, KeyError, ValueError, RuntimeError):  # simdjson's ways to say that it cannot
            pass
    return orjson.loads(view)


class _NotHere(Exception):
    """Not the form that a request has."""


def _parse(text: bytes) -> Any:
    """The document in simdjson's own objects, which must be gone when the thread's next one is parsed."""
    if len(text) > _LARGEST_KEPT_BYTES:
        return simdjson.Parser().parse(text)
    parser: simdjson.Parser | None = getattr(_kept, "parser", None)
    if parser is None:
        parser = _kept.parser = simdjson.Parser()
    return parser.parse(text)


def _document(text: bytes) -> dict[str, Any]:
    root = _parse(text)
    plain = _plain if len(text) <= _LARGEST_LISTED_BYTES else _short
    document = {name: plain(root[name]) for name in _names(root) if name != "inputs"}
    tensors = root["inputs"] if "inputs" in root.keys() else None  # noqa: SIM118 - it has no `in`
    if not isinstance(tensors, simdjson.Array):
        raise _NotHere
    inputs: list[dict[str, Any]] = []
    lists: list[Any] = []
    tensor: Any
    for tensor in tensors:
        names = _names(tensor)
        inputs.append({name: plain(tensor[name]) for name in names if name != "data"})
        lists.append(tensor["data"] if "data" in names else _ABSENT)
    # Each list of numbers adds one bracket to those of the rest; any more are lists in lists, or in a text.
    known = 1 + _count_lists([document, *inputs]) + sum([isinstance(data, simdjson.Array) for data in lists])
    is_flat = not _has_more_brackets(text, known)
    for fields, data in zip(inputs, lists, strict=True):
        if data is not _ABSENT:
            is_float = is_flat and fields.get("datatype") in _FLOATS
            fields["data"] = _numbers(data, plain) if is_float else plain(data)
    return {**document, "inputs": inputs}


def _names(value: Any) -> list[str]:
    if not isinstance(value, simdjson.Object):
        raise _NotHere
    names = list(value.keys())
    if len(set(names)) != len(names):  # the last one counts, and simdjson finds the first
        raise _NotHere
    return names


def _numbers(data: Any, plain: Callable[[Any], Any]) -> Any:
    """A list in which is no other as an array, if all in it are numbers; else what it is."""
    if isinstance(data, simdjson.Array):
        try:
            return np.frombuffer(data.as_buffer(of_type="d"), np.float64)
        except TypeError:
            pass
    return plain(data)


def _has_more_brackets(text: bytes, count: int) -> bool:
    at = -1  # `bytes.count` looks at each byte by itself
    for _ in range(count + 1):
        at = text.find(b"[", at + 1)
        if at < 0:
            return False
    return True


def _count_lists(values: Iterable[Any]) -> int:
    """How many lists these values are or have in them."""
    count = 0
    for value in values:
        if isinstance(value, list):
            count += 1 + _count_lists(value)
        elif isinstance(value, dict):
            count += _count_lists(value.values())
    return count


def _plain(value: Any) -> Any:
    if isinstance(value, simdjson.Array):
        return value.as_list()
    if isinstance(value, simdjson.Object):
        return value.as_dict()
    return value


def _short(value: Any) -> Any:
    """The same in a document so large that a list in it may be longer than simdjson makes one."""
    if isinstance(value, simdjson.Object):
        return {name: _short(value[name]) for name in _names(value)}
    if not isinstance(value, simdjson.Array):
        return value
    if len(value) > _MOST_SHORT:
        raise _NotHere
    return [_short(one) for one in value]
