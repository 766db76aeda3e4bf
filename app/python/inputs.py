"""What a Python program gives and gets: tensors as numpy arrays, and images as paths, bytes, Pillow images or pixels.

Knows dtypes and bytes; names, shapes and sizes are compared with the model where every wire's are. All images go
through `convoy.models.images`: an open one by the same rules as its file.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from convoy.app.calls.shared_memory import SharedMemory
from convoy.app.pictures.predictor import EncodedPicture, Picture
from convoy.app.protocol.tensors import OutputIn, RawRequest, Target, TensorIn, TensorOut
from convoy.models.errors import ImageError, InvalidRequest
from convoy.models.geometry import Extent
from convoy.models.headers import Header
from convoy.models.image_files import read_image_file
from convoy.models.images import fit_image_into, header_of
from convoy.models.spec import NUMPY_DTYPES, ImageSpec
from convoy.models.tensors import from_bytes

OneImage: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | np.ndarray"
_ARRAYS = "an array is one image, uint8 [height, width], or [height, width, channels] with 1, 3 or 4 channels"
# Pillow reads an image's file when it is first looked at, and the same image may be given twice.
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


def one_or_several(images: OneImage | Iterable[OneImage]) -> OneImage | list[OneImage]:
    """Several as a list in their order, which is read here and not in the thread that they are needed in.

    Raises InvalidRequest.
    """
    if isinstance(images, str | os.PathLike | bytes | bytearray | memoryview | Image.Image | np.ndarray):
        return images
    try:
        return list(images)
    except TypeError as error:
        raise InvalidRequest(
            f"images are paths, bytes, PIL images or uint8 arrays, one or several; got {type(images).__name__}"
        ) from error


async def picture_of(given: object) -> Picture:
    """The image, its file read in a thread. Raises ImageError."""
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


def no_image(given: object) -> ImageError:
    """The error for what is none of them."""
    return ImageError(
        f"an image is a path, the bytes of an image file, a PIL image or a uint8 array; got {type(given).__name__}"
    )


def image_of(array: np.ndarray) -> Image.Image:
    """The pixels as an image that is open in Pillow. Raises ImageError."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        advice = "; pass several images as a list" if array.ndim == 4 else ""
        raise ImageError(f"{_ARRAYS}; got {array.dtype} {list(array.shape)}{advice}")
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        raise ImageError(f"{_ARRAYS}; got {list(array.shape)}, the channels may come first")
    if array.size == 0:
        raise ImageError(f"{_ARRAYS}; got {list(array.shape)}, which has no pixels")
    return Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2:] == (1,) else array))


_BY_NUMPY_DTYPE = {dtype: name for name, dtype in NUMPY_DTYPES.items() if dtype.kind not in "OV"}
_NO_MEMORY = SharedMemory(is_allowed=False)


class ArraySource(NamedTuple):
    """One input's values."""

    array: np.ndarray

    def read(self, target: Target) -> np.ndarray:
        """In the machine's own byte order; strings packed. Raises InvalidRequest."""
        if target.spec.is_strings:
            return target.packed([_string(element, target) for element in self.array.flat])
        dtype = target.spec.numpy_dtype
        return self.array.view(dtype) if dtype.kind == "V" else self.array.astype(dtype, copy=False)


def request_of(
    inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None, priority: int, request_id: str | None
) -> RawRequest:
    """What is asked, as every wire brings it. Raises InvalidRequest where the inputs are no arrays by name."""
    return RawRequest(
        request_id,
        {"priority": priority} if priority else {},
        [TensorIn(name, datatype_of(one), one.shape, ArraySource(one)) for name, one in named_arrays(inputs)],
        [OutputIn(name, {}) for name in outputs or ()],
        _NO_MEMORY,
        binary_by_default=True,
    )


def named_arrays(inputs: Mapping[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    """In their order. Raises InvalidRequest where they are no arrays by name."""
    if not isinstance(inputs, Mapping):
        raise InvalidRequest(f"inputs must be arrays by name, such as {{'images': array}}; got {type(inputs).__name__}")
    return [(str(name), np.asarray(values)) for name, values in inputs.items()]


def bytes_of(request: RawRequest) -> int:
    """So much there is to look at."""
    return sum(one.source.array.nbytes for one in request.inputs if isinstance(one.source, ArraySource))


def datatype_of(array: np.ndarray) -> str:
    """The protocol's name of a dtype; numpy's own where the protocol has none."""
    dtype = array.dtype
    if dtype.kind in "OSU":
        return "BYTES"
    if dtype.kind == "V":  # BF16 is unknown to numpy: two opaque bytes, or ml_dtypes' own
        return "BF16" if dtype.itemsize == 2 and dtype.names is None else str(dtype)
    return _BY_NUMPY_DTYPE.get(dtype.newbyteorder("="), str(dtype))


def array_of(answer: TensorOut) -> np.ndarray:
    """An array that the caller owns."""
    return from_bytes(answer.data, answer.spec, answer.shape).copy()


def string_bytes(element: object) -> bytes | None:
    """A string as it travels; None for what is none."""
    return element.encode() if isinstance(element, str) else element if isinstance(element, bytes) else None


def _string(element: object, target: Target) -> bytes:
    found = string_bytes(element)
    if found is None:
        raise target.wrong(f"input '{target.spec.name}' must hold str or bytes, got {type(element).__name__}")
    return found
