"""What a Python program may give as an image, as the bytes of an image file, which every wire takes."""

from __future__ import annotations

import io
import os

import numpy as np
from PIL import Image

from convoy.app.python.pictures import image_of, no_image
from convoy.models.errors import ImageError
from convoy.models.image_files import read_image_file

_PNG_MODES = frozenset(("1", "L", "LA", "I;16", "P", "RGB", "RGBA"))


def encoded(given: object) -> bytes:
    """A file and bytes as they are; pixels as a file that loses nothing. Raises ImageError."""
    match given:
        case str() | os.PathLike():
            return read_image_file(given)
        case bytes() | bytearray() | memoryview():
            return bytes(given)
        case Image.Image():
            return _file_of(given)
        case np.ndarray():
            return _file_of(image_of(given))
    raise no_image(given)


def _file_of(image: Image.Image) -> bytes:
    # TIFF has what PNG has not (CMYK, floats and others), and the server reads a file of either by the same rules.
    name, options = ("PNG", {"compress_level": 1}) if image.mode in _PNG_MODES else ("TIFF", {})
    file = io.BytesIO()
    try:
        image.save(file, name, exif=image.getexif(), **options)  # its orientation counts at the server
    except (OSError, ValueError, KeyError) as error:
        raise ImageError(f"an image of mode {image.mode} cannot be sent ({error}); convert it to RGB") from error
    return file.getvalue()
