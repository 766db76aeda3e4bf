"""Images that nobody should send, and what the small ones are that networks with random weights are given."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from convoy.models.spec import ImageSpec
from tests.support.stores import digit

SMALL = ImageSpec(
    height=64,
    width=64,
    channels=3,
    resize_mode="exact",
    resize_px=64,
    interpolation="bilinear",
    antialias=True,
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.3, 0.4),
    front="uint8_nhwc",
)


def png_claiming(width: int, height: int) -> bytes:
    """A small PNG whose header promises a huge image."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _png_chunk(b"IHDR", header) + _png_chunk(b"IDAT", zlib.compress(b"\0" * 1000))


def jpeg(width: int = 640, height: int = 480) -> bytes:
    """A sound JPEG with something to see."""
    image = Image.radial_gradient("L").resize((width, height)).convert("RGB")
    out = io.BytesIO()
    image.save(out, "JPEG", quality=95)
    return out.getvalue()


def assortment() -> dict[str, bytes]:
    """Digits in every form that has a rule of its own, and what is none, by a name for a file."""
    seven, four = (Image.open(io.BytesIO(digit(word))) for word in ("seven", "four"))
    large = seven.convert("RGB").resize((300, 200))
    turned = Image.Exif()
    turned[0x0112] = 6
    whole = saved(large, "JPEG", quality=90)
    return {
        "plain.png": digit("seven"),
        "large.jpg": whole,
        "turned.jpg": saved(large, "JPEG", exif=turned),
        "deep.png": saved(Image.fromarray(np.asarray(four.convert("L")).astype(np.uint16) * 257), "PNG"),
        "cmyk.jpg": saved(four.resize((64, 64)).convert("CMYK"), "JPEG"),
        "alpha.png": saved(four.convert("RGBA"), "PNG"),
        "grey.webp": saved(four.resize((50, 50)), "WEBP", lossless=True),
        "palette.gif": saved(seven.convert("P"), "GIF"),
        "cut.jpg": whole[: len(whole) // 2],
        "words.jpg": b"no image at all",
        "empty.png": b"",
    }


def enlarged(word: str, side: int, form: str, **options: Any) -> bytes:
    """A digit as a square file of this format; its pixels stay hard, so that the network still knows it."""
    image = Image.open(io.BytesIO(digit(word))).resize((side, side), Image.Resampling.NEAREST)
    return saved(image, form, **options)


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The file's bytes."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
