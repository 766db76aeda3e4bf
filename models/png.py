"""Small PNGs of the plain kind, decoded without Pillow's file.

Knows PNG's chunks; knows nothing of models. Pillow finds out what a file is in some thirty Python calls, which cost
more than the pixels of a small one. pyspng gives the pixels of one that nobody resizes as an array, where there is a
wheel of it for this platform, and Pillow's own decoder all others as an image. What is unusual gives None here and is
Pillow's, with its rules and errors: palettes, transparent colours, other depths, interlacing, texts and whatever else
stands beside the pixels, and what is broken.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
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

# Behind the signature: length and kind of IHDR, width, height, depth, colour, three methods, and IHDR's sum.
_IHDR = struct.Struct(">I4sIIBBBBBI")
_IHDR_BYTES = 13
_CHUNK = struct.Struct(">I4s")  # length and kind; the sum stands behind what it is of
_SUM_BYTES = 4
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIGNATURE_BYTES = len(_SIGNATURE)
_IEND = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_PIXELS_AT = _SIGNATURE_BYTES + _IHDR.size
# Beside the pixels, what cannot become much longer than it is in the file.
_NOT_COMPRESSED = frozenset((b"PLTE", b"tRNS", b"IDAT", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"sBIT", b"bKGD", b"tIME"))
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
    if len(encoded) < _PIXELS_AT:
        return None
    length, kind, width, height, depth, colour, *unusual, told_sum = _IHDR.unpack_from(encoded, _SIGNATURE_BYTES)
    mode = _MODES.get(colour)
    if mode is None or depth != 8 or any(unusual) or length != _IHDR_BYTES or kind != b"IHDR":
        return None
    is_right = zlib.crc32(encoded[_SIGNATURE_BYTES + 4 : _PIXELS_AT - _SUM_BYTES]) == told_sum
    return PlainPng(width, height, mode) if is_right else None


def is_plainest(encoded: bytes, width: int, height: int, channels: int) -> bool:
    """Whether this is a small PNG of the plain kind, of this size, and all its pixels in one part.

    What such a file says before and behind its pixels is known to the last bit, so that there is little to find out.
    """
    head = _plainest_head(width, height, channels)
    if width * height > MAX_PIXELS or not encoded.startswith(head) or not encoded.endswith(_IEND):
        return False
    length, kind = _CHUNK.unpack_from(encoded, _PIXELS_AT)
    return bool(kind == b"IDAT" and len(encoded) == _PIXELS_AT + _CHUNK.size + length + _SUM_BYTES + len(_IEND))


def plainest_pixels(encoded: bytes) -> npt.NDArray[np.uint8] | None:
    """uint8 [height, width, 3] or [height, width] of such a PNG; None for what Pillow is to judge."""
    end = len(encoded) - len(_IEND) - _SUM_BYTES
    return _load(encoded) if _has_sum(encoded, _PIXELS_AT + 4, end) else None


@lru_cache(256)
def _plainest_head(width: int, height: int, channels: int) -> bytes:
    mode = 0 if channels == 1 else 2
    header = _IHDR.pack(_IHDR_BYTES, b"IHDR", width, height, 8, mode, 0, 0, 0, 0)[:-_SUM_BYTES]
    return _SIGNATURE + header + zlib.crc32(header[4:]).to_bytes(_SUM_BYTES)


def pixels_alone(encoded: memoryview) -> int | None:
    """How many pixels a PNG says that it has; None where there is more than an image.

    Texts and profiles are compressed, and may become very long.
    """
    if len(encoded) < _PIXELS_AT:
        return None
    length, kind, width, height, *_ = _IHDR.unpack_from(encoded, _SIGNATURE_BYTES)
    if length != _IHDR_BYTES or kind != b"IHDR":
        return None
    for kind, _, _ in _chunks(encoded):
        if kind == b"IEND":
            return int(width * height)
        if kind not in _NOT_COMPRESSED:
            return None
    return None


def png_pixels(encoded: bytes, plain: PlainPng) -> npt.NDArray[np.uint8] | None:
    """uint8 [height, width, channels] of a small one, as Pillow would decode them; None for what Pillow is to judge."""
    is_small = 0 < plain.width * plain.height <= MAX_PIXELS
    # The library decodes what has a wrong sum.
    if pyspng is None or not is_small or plain.mode == "RGBA" or not _has_right_sums(encoded):
        return None
    pixels = _load(encoded)
    return None if pixels is None else pixels.reshape(plain.height, plain.width, -1)


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


def _load(encoded: bytes) -> npt.NDArray[np.uint8] | None:
    if pyspng is None:
        return None
    try:
        pixels: npt.NDArray[np.uint8] = pyspng.load(encoded)
    except Exception:  # also for what is only odd: whether that counts is for Pillow to say
        return None
    return pixels


def _compressed_pixels(encoded: bytes) -> bytes | None:
    """None where there is more than an image, or a part of it is missing."""
    parts = _parts(encoded)
    return None if parts is None else b"".join([encoded[start:end] for start, end in parts])


def _has_right_sums(encoded: bytes) -> bool:
    """Whether there is nothing but an image, all of it, whose parts have the sums that they should."""
    parts = _parts(encoded)
    return parts is not None and all(_has_sum(encoded, start - 4, end) for start, end in parts)


def _has_sum(encoded: bytes, start: int, end: int) -> bool:
    """Whether the sum that stands behind these bytes is theirs."""
    return zlib.crc32(memoryview(encoded)[start:end]) == int.from_bytes(encoded[end : end + _SUM_BYTES])


def _parts(encoded: bytes) -> list[tuple[int, int]] | None:
    """Where the compressed pixels begin and end; None where there is more than an image, or a part of it is missing."""
    parts: list[tuple[int, int]] = []
    for kind, start, end in _chunks(encoded):
        if kind == b"IEND":
            return parts
        if kind != b"IDAT":
            return None
        parts.append((start, end))
    return None


def _chunks(encoded: bytes | memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Kinds of the chunks behind the header, a few at most, and where what they hold begins and should end."""
    position, last = _PIXELS_AT, len(encoded) - _CHUNK.size
    for _ in range(32):
        if position > last:
            return
        length, kind = _CHUNK.unpack_from(encoded, position)
        start = position + _CHUNK.size
        yield kind, start, start + length
        position = start + length + _SUM_BYTES
