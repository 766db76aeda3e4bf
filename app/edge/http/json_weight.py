"""What an infer request's JSON can be at most, told by its punctuation before anything is made of it.

Who reads JSON holds the interpreter's lock from its first byte to its last, and makes an object of whatever is there: a
value needs two bytes, and takes a hundred. Each value but the first of its list or object has a comma before it. So
commas and brackets bound what there is, and numpy counts them without the lock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

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
