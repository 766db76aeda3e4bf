"""What a Python program may give as an image: a path, encoded bytes, a Pillow image, an array of pixels.

All of them go through `convoy.models.images`: an open image by the rules that its file would go by.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable
from typing import TypeAlias, TypeGuard

import numpy as np
from PIL import Image

from convoy.app.pictures.predictor import EncodedPicture, Picture
from convoy.models.errors import ImageError, InvalidRequest
from convoy.models.geometry import Extent
from convoy.models.headers import Header
from convoy.models.image_files import read_image_file
from convoy.models.images import fit_image_into, header_of
from convoy.models.spec import ImageSpec

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

    def is_quick(self, image: ImageSpec) -> bool:
        return False

    def decode_into(self, image: ImageSpec, out: memoryview, max_pixels: int) -> Extent:
        with _LOADING[(id(self._opened) >> 4) % len(_LOADING)]:
            return fit_image_into(self._opened, image, out, max_pixels)


def is_one(images: OneImage | Iterable[OneImage]) -> TypeGuard[OneImage]:
    """Whether this is one image and not several."""
    return isinstance(images, str | os.PathLike | bytes | bytearray | memoryview | Image.Image | np.ndarray)


def one_or_several(images: OneImage | Iterable[OneImage]) -> OneImage | list[OneImage]:
    """Several as a list in their order, which is read here and not in the thread that they are needed in.

    Raises InvalidRequest.
    """
    if is_one(images):
        return images
    try:
        return list(images)  # type: ignore[arg-type]
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
        advice = "; give several as a list" if array.ndim == 4 else ""
        raise ImageError(f"{_ARRAYS}; got {array.dtype} {list(array.shape)}{advice}")
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        raise ImageError(f"{_ARRAYS}; got {list(array.shape)}, maybe the channels come first")
    if array.size == 0:
        raise ImageError(f"{_ARRAYS}; got {list(array.shape)}, which has no pixels")
    return Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2:] == (1,) else array))
