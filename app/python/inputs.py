"""The inputs of a Python program as the engine takes them: requests of numpy arrays, and pictures.

Names, shapes and sizes are checked against the model as for every protocol. All images go through
`convoy.models.images`: an open image by the same rules as its file.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from convoy.app.calls.shared_memory import SharedMemory
from convoy.app.pictures.predictor import EncodedPicture, Picture
from convoy.app.protocol.tensors import OutputIn, RawRequest, Target, TensorIn, TensorOut
from convoy.app.python.values import datatype_of, image_of, named_arrays, no_image, string_bytes
from convoy.models.geometry import Extent
from convoy.models.headers import Header
from convoy.models.image_files import read_image_file
from convoy.models.images import fit_image_into, header_of
from convoy.models.spec import ImageSpec
from convoy.models.tensors import from_bytes

# Pillow reads an image's file lazily, and the same image may be given twice.
_LOADING = tuple(threading.Lock() for _ in range(64))


class OpenedPicture(Picture):
    """An image that is open in Pillow."""

    kind, slots = "", ()

    def __init__(self, opened: Image.Image) -> None:
        self._opened = opened

    def header(self) -> Header:
        return header_of(self._opened)

    def is_tiny(self, image: ImageSpec) -> bool:
        return False

    def decode_into(self, image: ImageSpec, out: memoryview, max_pixels: int) -> Extent:
        with _LOADING[(id(self._opened) >> 4) % len(_LOADING)]:
            return fit_image_into(self._opened, image, out, max_pixels)


async def picture_of(given: object) -> Picture:
    """Open an image; files are read in a thread. Raises ImageError."""
    match given:
        case str() | os.PathLike():
            return EncodedPicture(memoryview(await asyncio.to_thread(read_image_file, given)))
        case bytes() | bytearray() | memoryview():
            return EncodedPicture(memoryview(bytes(given)))
        case Image.Image():
            return OpenedPicture(given)
        case np.ndarray():
            return OpenedPicture(image_of(given))
    raise no_image(given)


_NO_MEMORY = SharedMemory(is_allowed=False)


class ArraySource(NamedTuple):
    """The values of one input."""

    array: np.ndarray

    def read(self, target: Target) -> np.ndarray:
        """Read the values in native byte order; strings are packed. Raises InvalidRequest."""
        if target.spec.is_strings:
            return target.packed([_string(element, target) for element in self.array.flat])
        dtype = target.spec.numpy_dtype
        return self.array.view(dtype) if dtype.kind == "V" else self.array.astype(dtype, copy=False)


def request_of(
    inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None, priority: int, request_id: str | None
) -> RawRequest:
    """Make a RawRequest, as every protocol does. Raises InvalidRequest if the inputs are not named arrays."""
    return RawRequest(
        request_id,
        {"priority": priority} if priority else {},
        [TensorIn(name, datatype_of(one), one.shape, ArraySource(one)) for name, one in named_arrays(inputs)],
        [OutputIn(name, {}) for name in outputs or ()],
        _NO_MEMORY,
        binary_by_default=True,
    )


def bytes_of(request: RawRequest) -> int:
    """The number of bytes to check."""
    return sum(one.source.array.nbytes for one in request.inputs if isinstance(one.source, ArraySource))


def array_of(answer: TensorOut) -> np.ndarray:
    """Make an array that the caller owns."""
    return from_bytes(answer.data, answer.spec, answer.shape).copy()


def _string(element: object, target: Target) -> bytes:
    found = string_bytes(element)
    if found is None:
        raise target.wrong(f"input '{target.spec.name}' must hold str or bytes, got {type(element).__name__}")
    return found
