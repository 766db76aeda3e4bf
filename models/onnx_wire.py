"""Protobuf in an ONNX file: the fields of a message, without their meaning and without the onnx library.

Reads everything that protobuf parsers read: fields in any order and repeated, unknown fields, groups.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

_VARINT, _FIXED64, _LENGTH, _GROUP, _GROUP_END, _FIXED32 = range(6)  # protobuf's wire types
_MOST_BITS = 70


def fields(
    data: mmap.mmap | bytes, start: int, end: int, numbers: dict[int, int] | None = None
) -> Iterator[tuple[int, int, int]]:
    """Each length-delimited field of a message: its number, and the start and end of its bytes.

    Numeric fields are put into `numbers`. Raises ValueError and IndexError if it is not a message.
    """
    groups: list[int] = []  # open groups; their contents are of unknown type
    while start < end:
        tag, start = _varint(data, start)
        number, kind = tag >> 3, tag & 7
        if not number:
            raise ValueError("a field without a number")
        first = start
        if kind == _VARINT:
            value, start = _varint(data, start)
            if numbers is not None and not groups:
                numbers[number] = value
        elif kind == _LENGTH:
            length, first = _varint(data, start)
            start = first + length
        elif kind in (_FIXED32, _FIXED64):
            start += 4 if kind == _FIXED32 else 8
        elif kind == _GROUP:
            groups.append(number)
        elif kind != _GROUP_END or not groups or groups.pop() != number:
            raise ValueError(f"wire type {kind}")
        if start > end:
            raise ValueError("a field is longer than what it is in")
        if kind == _LENGTH and not groups:
            yield number, first, start
    if groups:
        raise ValueError("a group that does not end")


def _varint(data: mmap.mmap | bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    while shift < _MOST_BITS:
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
        shift += 7
    raise ValueError("a number that does not end")
