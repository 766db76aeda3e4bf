"""Images and tensors as a Python program gives them: paths, bytes, Pillow images, pixels, and numpy arrays by name.

Needs only numpy, so that the client can be installed alone. Pillow is imported only for pixels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from convoy.models.errors import ImageError, InvalidRequest
from convoy.models.spec import NUMPY_DTYPES

if TYPE_CHECKING:
    from PIL import Image
    from typing_extensions import TypeIs

OneImage: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | np.ndarray"
_ARRAYS = "an array is one image, uint8 [height, width], or [height, width, channels] with 1, 3 or 4 channels"
_BY_NUMPY_DTYPE = {dtype: name for name, dtype in NUMPY_DTYPES.items() if dtype.kind not in "OV"}


def is_pillow_image(given: object) -> TypeIs[Image.Image]:
    """Whether it is an open Pillow image, in which case its owner has imported Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(given, pillow.Image)


def one_or_several(images: OneImage | Iterable[OneImage]) -> OneImage | list[OneImage]:
    """Return several images as a list. The iterable is read here, in the caller's thread. Raises InvalidRequest."""
    if isinstance(images, str | os.PathLike | bytes | bytearray | memoryview | np.ndarray) or is_pillow_image(images):
        return images
    try:
        return list(images)
    except TypeError as error:
        raise InvalidRequest(
            f"images are paths, bytes, PIL images or uint8 arrays, one or several; got {type(images).__name__}"
        ) from error


def no_image(given: object) -> ImageError:
    """The error for an argument that is not an image."""
    return ImageError(
        f"an image is a path, the bytes of an image file, a PIL image or a uint8 array; got {type(given).__name__}"
    )


def image_of(array: np.ndarray) -> Image.Image:
    """Convert pixels to an open Pillow image. Raises ImageError."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        advice = "; give several as a list" if array.ndim == 4 else ""
        raise ImageError(f"{_ARRAYS}; got {array.dtype} {list(array.shape)}{advice}")
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        raise ImageError(f"{_ARRAYS}; got {list(array.shape)}, maybe the channels come first")
    if array.size == 0:
        raise ImageError(f"{_ARRAYS}; got {list(array.shape)}, which has no pixels")
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ImageError("an array becomes a PNG by Pillow; install it with `pip install Pillow`") from None
    return Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2:] == (1,) else array))


def named_arrays(inputs: Mapping[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    """The arrays in their order. Raises InvalidRequest if they are not named arrays."""
    if not isinstance(inputs, Mapping):
        raise InvalidRequest(f"inputs must be arrays by name, such as {{'images': array}}; got {type(inputs).__name__}")
    return [(str(name), np.asarray(values)) for name, values in inputs.items()]


def datatype_of(array: np.ndarray) -> str:
    """The protocol's name of a dtype, or numpy's if the protocol has none."""
    dtype = array.dtype
    if dtype.kind in "OSU":
        return "BYTES"
    if dtype.kind == "V":  # numpy has no BF16: two opaque bytes, or ml_dtypes' own type
        return "BF16" if dtype.itemsize == 2 and dtype.names is None else str(dtype)
    return _BY_NUMPY_DTYPE.get(dtype.newbyteorder("="), str(dtype))


def string_bytes(element: object) -> bytes | None:
    """Encode a string; None if it is not one."""
    return element.encode() if isinstance(element, str) else element if isinstance(element, bytes) else None
