"""Convert tensors' bytes, as the protocol and the engines exchange them, to and from numpy arrays.

Most dtypes are numpy's. Two are not: BYTES, whose elements are byte strings of any length, each sent as its length
(u32, little-endian) and its bytes; and BF16, which numpy lacks, so an element is two opaque bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np

from convoy.models.spec import TensorSpec

_LENGTH = Struct("<I")


class TensorBytes(NamedTuple):
    """A tensor: its whole shape, and its bytes."""

    shape: tuple[int, ...]
    data: memoryview


class MalformedStrings(ValueError):
    """These bytes are not a sequence of byte strings. The message ends before "for ...", in two parts."""

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(f"{what}, {detail}")
        self.what, self.detail = what, detail


def pack(elements: Iterable[bytes]) -> bytearray:
    """Pack byte strings, each after its length."""
    packed = bytearray()
    for element in elements:
        packed += _LENGTH.pack(len(element))
        packed += element
    return packed


def unpack(data: memoryview) -> list[bytes]:
    """The byte strings in `data`. Raises MalformedStrings."""
    return [bytes(element) for element in _elements(data)]


def objection_to_strings(data: memoryview, count: int, subject: str, *, text_only: bool) -> str:
    """Why `data` is not `count` byte strings, or empty if it is; `subject` names the tensor.

    With `text_only` each of them must be UTF-8.
    """
    found = 0
    try:
        for element in _elements(data):
            if text_only:
                str(element, "utf-8")
            found += 1
    except UnicodeDecodeError:
        return f"element {found} of {subject} is not UTF-8, which this model requires"
    except MalformedStrings as error:
        return f"{error.what} for {subject}, {error.detail}"
    return "" if found == count else f"unexpected number of string elements {found} for {subject}, expecting {count}"


def to_bytes(array: np.ndarray, spec: TensorSpec) -> memoryview:
    """The array's bytes, flat: a view of a C-contiguous array, a copy of strings."""
    if spec.is_strings:
        return memoryview(pack(array.flat))
    return array.reshape(-1).view(np.uint8).data


def from_bytes(data: memoryview, spec: TensorSpec, shape: tuple[int, ...]) -> np.ndarray:
    """The array of these bytes: a view, or a copy of strings. Raises MalformedStrings."""
    if not spec.is_strings:
        return np.frombuffer(data, spec.numpy_dtype).reshape(shape)
    elements = unpack(data)
    strings = np.empty(len(elements), object)
    strings[:] = elements
    return strings.reshape(shape)


def random_values(
    generator: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], *, are_indices: bool = False
) -> np.ndarray:
    """Random numbers from 0 to 100 in the tensor's dtype; for strings, their digits.

    With `are_indices`, integers wider than bytes are 0 or 1, which are valid in every lookup table.
    """
    if spec.dtype == "BOOL" or (are_indices and spec.numpy_dtype.kind in "iu" and spec.numpy_dtype.itemsize > 1):
        return generator.integers(0, 2, shape).astype(spec.numpy_dtype)
    values = np.asarray(generator.random(shape) * 100)
    if spec.is_strings:
        digits = np.empty(shape, object)
        digits.reshape(-1)[:] = [b"%d" % int(value) for value in values.flat]
        return digits
    if spec.dtype == "BF16":
        # The upper half of an FP32 is the same number as BF16, rounded towards zero.
        upper = values.astype("<f4").view("<u4") >> 16
        return np.asarray(upper).astype("<u2").view(spec.numpy_dtype)
    return values.astype(spec.numpy_dtype)


def as_numbers(array: np.ndarray) -> np.ndarray:
    """The array as numbers, if it holds numbers; BF16 as FP32."""
    if array.dtype.kind != "V":
        return array
    return np.asarray(array.view("<u2").astype("<u4") << 16).view("<f4")


def _elements(data: memoryview) -> Iterator[memoryview]:
    end, size = 0, len(data)
    while end < size:
        if size - end < _LENGTH.size:
            detail = f"expecting {_LENGTH.size} bytes but only {size - end} bytes available"
            raise MalformedStrings("incomplete string length indicator", detail)
        (length,) = _LENGTH.unpack_from(data, end)
        end += _LENGTH.size
        if length > size - end:
            detail = f"expecting string of length {length} but only {size - end} bytes available"
            raise MalformedStrings("incomplete string data", detail)
        yield data[end : end + length]
        end += length
