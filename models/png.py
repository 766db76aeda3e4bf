"""Small PNGs of the plain kind, decoded without Pillow's file.

Knows PNG's chunks; knows nothing of models. Pillow finds out what a file is in some thirty Python calls, which cost
more than the pixels of a small one. pyspng gives the pixels of one that nobody resizes as an array, where there is a
wheel of it for this platform, and Pillow's own decoder all others as an image. What is unusual gives None here and is
Pillow's, with its rules and errors: palettes, transparent colours, other depths, interlacing, texts and whatever else
stands beside the pixels, and what is broken.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

try:
    import pyspng
except ImportError:  # no wheel for this platform
    pyspng = None

# Above this the way to the pixels costs little beside them.
MAX_PIXELS = 1 << 16

_IHDR = b"\x00\x00\x00\x0dIHDR"
_PIXELS_AT = 33
_FEW_CHUNKS = 32
_MODES = {0: "L", 2: "RGB", 6: "RGBA"}  # of eight bits a channel


class PlainPng(NamedTuple):
    """A file that is decoded here: what its header says. `mode` is Pillow's word for its colours."""

    width: int
    height: int
    mode: str

    @property
    def channels(self) -> int:
        return len(self.mode)


def plain_png(encoded: bytes) -> PlainPng | None:
    """None for what is Pillow's to decode or to refuse, whatever its size. Only the header is looked at."""
    header = encoded[8:_PIXELS_AT]
    if len(header) < _PIXELS_AT - 8 or not header.startswith(_IHDR):
        return None
    width, height = int.from_bytes(header[8:12]), int.from_bytes(header[12:16])
    depth, colour, *unusual = header[16:21]
    mode = _MODES.get(colour)
    if mode is None or depth != 8 or any(unusual) or zlib.crc32(header[4:21]) != int.from_bytes(header[21:25]):
        return None
    return PlainPng(width, height, mode)


def png_pixels(encoded: bytes, plain: PlainPng) -> npt.NDArray[np.uint8] | None:
    """uint8 [height, width, channels] of a small one, as Pillow would decode them; None for what Pillow is to judge."""
    is_small = 0 < plain.width * plain.height <= MAX_PIXELS
    # The library decodes what has a wrong sum.
    if pyspng is None or not is_small or plain.mode == "RGBA" or _compressed_pixels(encoded, checked=True) is None:
        return None
    try:
        pixels: npt.NDArray[np.uint8] = pyspng.load(encoded)
    except Exception:  # also for what is only odd: whether that counts is for Pillow to say
        return None
    return pixels.reshape(plain.height, plain.width, -1)


def decode_small_png(encoded: bytes, max_pixels: int) -> Image.Image | None:
    """The RGB, RGBA or L image in `encoded`, as Pillow would open it; None for what is Pillow's to open or refuse."""
    plain = plain_png(encoded)
    if plain is None or not 0 < plain.width * plain.height <= min(MAX_PIXELS, max_pixels):
        return None
    if (pixels := _compressed_pixels(encoded)) is None:
        return None
    try:
        return Image.frombytes(plain.mode, (plain.width, plain.height), pixels, "zip", plain.mode)
    except Exception:  # what is wrong with it is for Pillow to say
        return None


def _compressed_pixels(encoded: bytes, *, checked: bool = False) -> bytes | None:
    """None where there is more than an image, and, if `checked`, where a part of it has not the sum that it should."""
    parts: list[bytes] = []
    position = _PIXELS_AT
    for _ in range(_FEW_CHUNKS):
        kind, start = encoded[position + 4 : position + 8], position + 8
        if kind == b"IEND":
            return b"".join(parts)
        if kind != b"IDAT":
            return None
        end = start + int.from_bytes(encoded[position : position + 4])
        if checked and zlib.crc32(encoded[start - 4 : end]) != int.from_bytes(encoded[end : end + 4]):
            return None
        parts.append(encoded[start:end])
        position = end + 4
    return None
