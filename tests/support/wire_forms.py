"""Tensors of every dtype that the protocol defines, and every way in which one may travel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import tritonclient.utils.shared_memory as shm

from convoy.models.spec import NUMPY_DTYPES
from convoy.models.tensors import pack, unpack

DTYPES = tuple(NUMPY_DTYPES)
BINARY_ONLY = ("FP16", "BF16")
_ANY_BYTES = [b"", b"\0", b"\xff\xfe", b"ends with \0", bytes(range(256)), "é 漢 😀".encode()]
_numbers = count()


@dataclass(frozen=True)
class Sample:
    """A tensor to send: the bytes that must come back, and the same as JSON values where JSON has them."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def array(self) -> np.ndarray:
        """What tritonclient takes."""
        if self.dtype == "BYTES":
            strings = np.empty(self.shape, object)
            strings.reshape(-1)[:] = unpack(memoryview(self.data))
            return strings
        if self.dtype == "BF16":
            import ml_dtypes

            return np.frombuffer(self.data, ml_dtypes.bfloat16).reshape(self.shape)
        return np.frombuffer(self.data, NUMPY_DTYPES[self.dtype]).reshape(self.shape)

    @property
    def values(self) -> list[Any]:
        flat = self.array.reshape(-1).tolist()
        return [value.decode() for value in flat] if self.dtype == "BYTES" else flat


def extremes(dtype: str, *, text: bool = False) -> Sample:
    """Two rows of what is at the ends of a type. With `text` strings are UTF-8."""
    if dtype == "BYTES":
        strings = [string for string in _ANY_BYTES if not text or _is_text(string)]
        strings += [b"x" * 3000] * (len(strings) % 2)
        return Sample(dtype, (2, len(strings) // 2), bytes(pack(strings)))
    if dtype == "BF16":
        bits = np.array([0, 0x8000, 1, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0], "<u2")
        return Sample(dtype, (2, 4), bits.tobytes())
    return _sample(dtype, np.array(_numbers_of(NUMPY_DTYPES[dtype])))


def nothing(dtype: str) -> Sample:
    """Two rows without an element."""
    return Sample(dtype, (2, 0), b"")


def scalar(dtype: str) -> Sample:
    """One element, no dimension."""
    if dtype == "BYTES":
        return Sample(dtype, (), bytes(pack([b"one"])))
    if dtype == "BF16":
        return Sample(dtype, (), b"\x80\x3f")
    return _sample(dtype, np.array(1, NUMPY_DTYPES[dtype]))


def bytes_of(array: np.ndarray) -> bytes:
    """An answer's bytes, as they travelled."""
    if array.dtype != object:
        return array.tobytes()
    return bytes(pack(one.encode() if isinstance(one, str) else one for one in array.reshape(-1)))


class Region:
    """A piece of shared memory that the client owns, filled with 0xEE where nothing was put."""

    def __init__(self, data: bytes, nbytes: int) -> None:
        self.name = f"convoy-test-{next(_numbers)}-{np.random.default_rng().integers(1 << 40)}"
        self.key, self.nbytes = f"/{self.name}", nbytes
        self._handle = shm.create_shared_memory_region(self.name, self.key, nbytes, create_only=True)
        whole = np.frombuffer(data.ljust(nbytes, b"\xee"), np.uint8)
        shm.set_shared_memory_region(self._handle, [whole])

    @property
    def contents(self) -> bytes:
        view = shm.get_contents_as_numpy(self._handle, np.uint8, [self.nbytes])
        return bytes(view.tobytes())

    def close(self) -> None:
        shm.destroy_shared_memory_region(self._handle)


@contextmanager
def region(client: Any, data: bytes = b"", nbytes: int = 0) -> Iterator[Region]:
    """A region that is registered with the server while it is used."""
    own = Region(data, max(nbytes, len(data), 1))
    try:
        client.register_system_shared_memory(own.name, own.key, own.nbytes)
        yield own
        client.unregister_system_shared_memory(own.name)
    finally:
        own.close()


def _sample(dtype: str, array: np.ndarray) -> Sample:
    return Sample(dtype, array.shape, array.tobytes())


def _is_text(string: bytes) -> bool:
    try:
        string.decode()
    except UnicodeDecodeError:
        return False
    return True


def _numbers_of(dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.kind == "b":
        return np.array([[True, False, True], [False, False, True]])
    if dtype.kind != "f":
        limits = np.iinfo(dtype)
        return np.array([[limits.min, limits.max, 0], [1, 2, limits.max]], dtype)
    ends = np.finfo(dtype)
    rows = [[ends.min, ends.max, -0.0, np.nan], [np.inf, -np.inf, ends.smallest_subnormal, 0.1]]
    return np.array(rows, dtype)
