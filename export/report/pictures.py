"""Pictures inside a report and its manifest: what the network sees, as text."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

from PIL import Image

from convoy.models.images import preprocess
from convoy.models.spec import ImageSpec


def seen_picture(encoded: bytes | memoryview, image: ImageSpec, most_px: int) -> Image.Image:
    """The part of an image that the network sees, in its own colours, at most so many pixels high and wide.

    Raises ImageError.
    """
    pixels = preprocess(encoded, replace(image, front="uint8_nhwc", channel_order="rgb"))
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    picture.thumbnail((most_px, most_px))
    return picture


def in_base64(picture: Image.Image, form: str, **options: Any) -> str:
    """A file of this format, optimised for size."""
    file = io.BytesIO()
    picture.save(file, form, optimize=True, **options)
    return base64.b64encode(file.getvalue()).decode("ascii")
