"""Read an image file. Everything that has a path goes through here before `convoy.models.images`."""

from __future__ import annotations

import os

from convoy.models.errors import BundleError, ImageError
from convoy.models.files import open_regular

# Suffixes by which images are found in folders; their format is recognised by their bytes.
IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"))


def read_image_file(path: str | os.PathLike[str]) -> bytes:
    """Read the whole file. Raises ImageError if it cannot be read; never waits for a pipe or device."""
    try:
        with open_regular(os.fspath(path)) as file:
            return file.read()
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror or error}; check the file") from error
    except (BundleError, ValueError) as error:
        raise ImageError(f"cannot read {path}: it is not a file") from error
