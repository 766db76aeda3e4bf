"""An infer request's JSON, in which most is numbers: long lists of them become arrays without an object per number.

simdjson reads the document; what it does not take, or reads differently from orjson, is left to orjson and its words.
Knows the names that the protocol gives to the fields, and nothing of what they mean.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
import simdjson

from convoy.app.lifecycle.catalog import Served
from convoy.models.errors import InvalidRequest

# To count so much takes some tenths of a millisecond, as does to hand it to a thread.
WEIGHED_INLINE_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10
_COMMA = ord(",")
# "[" and "{" differ from each other in one bit, and in more from all else.
_OPENING, _EITHER = ord("["), 0xFF ^ (ord("[") ^ ord("{"))
# What a request has beside its tensors: shapes, parameters, outputs, and texts with commas.
_MOST_BESIDE = 1 << 16
# The text, simdjson's own copy, and its strings.
_COPIES = 3
# A number: its places in simdjson's indexes, tape and a list, and its object where it becomes one.
_VALUE_BYTES = 64
# A string has more.
_STRING_BYTES = 104
# A list or an object, with its places.
_LIST_BYTES = 160


class Weight(NamedTuple):
    """So many bytes, and at most so many values and so many lists and objects."""

    nbytes: int
    values: int
    lists: int


def weigh(text: memoryview) -> Weight:
    """Any thread may call it."""
    codes, commas, lists = np.frombuffer(text, np.uint8), 0, 0
    for start in range(0, len(codes), _PIECE_BYTES):
        piece = codes[start : start + _PIECE_BYTES]
        commas += int(np.count_nonzero(piece == _COMMA))
        lists += int(np.count_nonzero((piece & _EITHER) == _OPENING))
    return Weight(len(codes), commas + 1, lists)


def check_weight(weight: Weight, served: Served) -> None:
    """Raises InvalidRequest for more than the model's inputs can hold, where that is bounded."""
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
    # One list around all, and one for each of what the dimension before it counts.
    most_lists = sum(1 + sum(math.prod(shape[:depth]) for depth in range(1, len(shape))) for shape in sizes)
    if weight.lists > most_lists + _MOST_BESIDE:
        raise InvalidRequest(
            f"the request's JSON has {weight.lists} lists and objects, and nesting like {of} needs {most_lists} "
            "at most; send flat lists of numbers"
        )


def needed_bytes(weight: Weight, served: Served) -> int:
    """The memory beside such a body while it is read."""
    each = _STRING_BYTES if any(tensor.is_strings for tensor in served.spec.inputs) else _VALUE_BYTES
    return _COPIES * weight.nbytes + each * weight.values + _LIST_BYTES * weight.lists


# Numbers of so much JSON are read in some tenths of a millisecond; to hand it to a thread takes as long.
INLINE_JSON_BYTES = 96 << 10
# The protocol's types that a list of JSON numbers stands for without a doubt, and how simdjson may read such a list.
_Form = Literal["d", "i", "u"]
_FLOAT: tuple[_Form, ...] = ("d",)
_WHOLE: tuple[_Form, ...] = ("i",)
_FORMS: dict[str, tuple[_Form, ...]] = {
    **dict.fromkeys(["FP32", "FP64"], _FLOAT),
    **dict.fromkeys(["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32"], _WHOLE),
    "UINT64": ("i", "u"),
}
_DTYPES: dict[_Form, type[np.generic]] = {"d": np.float64, "i": np.int64, "u": np.uint64}
# numpy's, and so of lists in lists.
_MOST_DIMENSIONS = 64
# Of one object, in which simdjson finds each by looking at all before it; and tensors.
_MOST_MEMBERS = 256
# So many brackets are found faster one by one than by looking at each byte.
_FEW_BRACKETS = 100
# Below, making objects of the numbers costs less than not to.
_SHORTEST_BYTES = 2 << 10
# A parser keeps several times the memory of its largest document.
_LARGEST_KEPT_BYTES = 1 << 20
# Of one document: the garbage collector looks at all lists and objects, and meanwhile nothing else runs.
_MOST_LISTS = 1 << 18
# Of one document that simdjson does not take; until all are made, nothing else runs.
_MOST_OBJECTS = 1 << 20
_CONTAINERS = frozenset({simdjson.Array, simdjson.Object})
_ABSENT = object()
_BOM = b"\xef\xbb\xbf"
_kept = threading.local()


class TooManyObjects(Exception):
    """More than may be made of one document; the words say what there was to make them of."""


def loads(view: memoryview) -> Any:
    """What `orjson.loads` returns, with arrays for lists of numbers in tensors of numbers, flat or evenly nested.

    They are 1-d, of float64, int64 or uint64, and are the only arrays. Raises orjson.JSONDecodeError or TooManyObjects.
    """
    if len(view) >= _SHORTEST_BYTES and view[:3] != _BOM:
        try:
            return _document(bytes(view))
        except (_NotHere, KeyError, ValueError, RuntimeError):  # simdjson's ways to say that it cannot
            pass
    if len(view) > INLINE_JSON_BYTES and (count := sum(weigh(view)[1:])) > _MOST_OBJECTS:
        raise TooManyObjects(f"{count} values in JSON that is invalid, unusual, or has NaN or Infinity")
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
    # In a longer one a list may have more values than simdjson counts: it would write behind the list that it makes.
    plain = _plain if len(text) <= INLINE_JSON_BYTES else _Long().plain
    document = {name: plain(root[name]) for name in _names(root) if name != "inputs"}
    tensors = root["inputs"] if "inputs" in root.keys() else None  # noqa: SIM118 - it has no `in`
    if not isinstance(tensors, simdjson.Array) or len(tensors) > _MOST_MEMBERS:
        raise _NotHere
    inputs: list[dict[str, Any]] = []
    lists: list[Any] = []
    tensor: Any
    for tensor in tensors:
        names = _names(tensor)
        inputs.append({name: plain(tensor[name]) for name in names if name != "data"})
        lists.append(tensor["data"] if "data" in names else _ABSENT)
    # Each list of numbers adds its own brackets to those of the rest; any more are uneven lists, or in a text.
    known = 1 + _count_lists([document, *inputs])
    known += sum([_count_even(data) for data in lists if isinstance(data, simdjson.Array)])
    is_even = not _has_more_brackets(text, known)
    for fields, data in zip(inputs, lists, strict=True):
        if data is not _ABSENT:
            fields["data"] = _numbers(data, fields.get("datatype"), plain) if is_even else plain(data)
    return {**document, "inputs": inputs}


def _names(value: Any) -> list[str]:
    if not isinstance(value, simdjson.Object) or len(value) > _MOST_MEMBERS:
        raise _NotHere
    names = list(value.keys())
    # Of several with a name the last one counts, and simdjson finds the first; it looks for what is before a NUL.
    if len(set(names)) != len(names) or "\0" in "".join(names):
        raise _NotHere
    return names


def _numbers(data: Any, datatype: object, plain: Callable[[Any], Any]) -> Any:
    """An even list as an array, if all in it are numbers that such a tensor may have; else what it is."""
    if isinstance(data, simdjson.Array) and isinstance(datatype, str):
        for form in _FORMS.get(datatype, ()):
            try:
                return np.frombuffer(data.as_buffer(of_type=form), _DTYPES[form])
            except (TypeError, ValueError):  # what is no number, or none of this form
                pass
    return plain(data)


def _count_even(data: Any) -> int:
    """How many lists it is with those in it, if all at one depth are as long; else 1."""
    lengths, first = [len(data)], data
    while isinstance(first := next(iter(first), None), simdjson.Array):
        lengths.append(len(first))
        if len(lengths) > _MOST_DIMENSIONS:
            return 1
    return _count_as_long(data, lengths) or 1


def _count_as_long(data: Any, lengths: list[int]) -> int:
    """How many, and 0 if they are not as long as this, from the outermost to the innermost."""
    if len(data) != lengths[0]:
        return 0
    if len(lengths) == 1:
        return 1
    if len(lengths) == 2:  # most of them are innermost
        found = {len(one) if isinstance(one, simdjson.Array) else -1 for one in data}
        return 1 + lengths[0] if found == {lengths[1]} else 0
    count = 1
    for one in data:
        inside = _count_as_long(one, lengths[1:]) if isinstance(one, simdjson.Array) else 0
        if not inside:
            return 0
        count += inside
    return count


def _has_more_brackets(text: bytes, count: int) -> bool:
    if count > _FEW_BRACKETS:
        return text.count(b"[") > count
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


class _Long:
    """The same of a long document, in which others run between one value and the next."""

    def __init__(self) -> None:
        self._lists = 0

    def plain(self, value: Any) -> Any:
        if type(value) not in _CONTAINERS:
            return value
        self._lists += 1
        if self._lists > _MOST_LISTS:
            raise TooManyObjects(f"more than {_MOST_LISTS} lists and objects that are no flat or even lists of numbers")
        if isinstance(value, simdjson.Object):
            return {name: self.plain(value[name]) for name in _names(value)}
        return [self.plain(one) if type(one) in _CONTAINERS else one for one in value]
