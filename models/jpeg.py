"""Decode large plain JPEGs with simplejpeg into reused memory.

Pillow and simplejpeg both decode with libjpeg-turbo and give the same pixels. simplejpeg writes four bytes per pixel as
Pillow does, so its pixels become an image without a copy, and it releases the GIL from the header to the last pixel.
For unusual colours and codings, and whatever the library would warn about, the functions here return None: Pillow
decodes those, with its rules and errors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, features

try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

# From this size on, four bytes per pixel pay, although a fourth of them is resized for nothing: in reused memory,
# decoding takes half of Pillow's time, and other threads are not delayed by page faults.
LARGE_PIXELS = 1 << 19

_FRAMES = b"\xc0\xc1\xc2"  # Huffman-coded: baseline, extended, progressive
_SCAN = 0xDA
_TABLES_AND_COMMENTS = b"\xc4\xdb\xdd\xfe"
_APP0, _APP14, _APP15 = 0xE0, 0xEE, 0xEF  # Adobe's segment, APP14, names the colours


class _Layout(NamedTuple):
    """The memory layout of pixels, by simplejpeg's name and by Pillow's."""

    colours: str
    mode: str
    pixel_bytes: int


# By channels: the layouts that Pillow can read in place.
_LARGE = {1: _Layout("GRAY", "L", 1), 3: _Layout("RGBX", "RGBX", 4)}


def _has_pillows_library() -> bool:
    """Whether Pillow uses the same library as simplejpeg; others and older ones differ in some pixels."""
    major = (features.version("libjpeg_turbo") or "").partition(".")[0]
    return simplejpeg is not None and major.isdigit() and int(major) >= 3


_AVAILABLE = _has_pillows_library()


class PlainJpeg(NamedTuple):
    """A file that is decoded here, by its frame header."""

    width: int
    height: int
    channels: int  # 1: grey, 3: RGB after decoding


def plain_jpeg(encoded: bytes) -> PlainJpeg | None:
    """Read the frame header of a file that both libraries decode alike; None for others. Metadata is not read."""
    body = _plain_frame(encoded) if _AVAILABLE else None
    return None if body is None else PlainJpeg(int.from_bytes(body[3:5]), int.from_bytes(body[1:3]), body[5])


def large_jpeg_bytes(plain: PlainJpeg) -> int:
    """How much memory `large_jpeg` writes to."""
    return plain.width * plain.height * _LARGE[plain.channels].pixel_bytes


def large_jpeg(encoded: bytes, plain: PlainJpeg, memory: npt.NDArray[np.uint8]) -> Image.Image | None:
    """The image, with its pixels in `memory`, in mode L or RGBX, as Pillow would decode it; None if Pillow must decode
    it.

    `memory` is uint8 of `large_jpeg_bytes`, contiguous.
    """
    layout, size = _LARGE[plain.channels], (plain.width, plain.height)
    pixels = memory.reshape(plain.height, plain.width, layout.pixel_bytes)
    try:
        simplejpeg.decode_jpeg(encoded, layout.colours, buffer=pixels, strict=True)
    except Exception:  # also for warnings: Pillow decides whether they matter
        return None
    return Image.frombuffer(layout.mode, size, pixels, "raw", layout.mode, 0, 1)


def _plain_frame(encoded: bytes) -> bytes | None:
    """The frame header's body, if only usual segments come before the first scan."""
    frame, position = None, 2
    while True:
        start, marker = encoded[position : position + 1], encoded[position + 1 : position + 2]
        length = int.from_bytes(encoded[position + 2 : position + 4])
        end = position + 2 + length
        if start != b"\xff" or length < 2 or end > len(encoded):
            return None
        if marker[0] == _SCAN:
            return frame
        body = encoded[position + 4 : end]
        if marker in _FRAMES:
            if frame is not None or not _is_plain_colour(body):
                return None
            frame = body
        elif marker not in _TABLES_AND_COMMENTS and (marker[0] == _APP14 or not _APP0 <= marker[0] <= _APP15):
            return None
        position = end


def _is_plain_colour(frame: bytes) -> bool:
    """Whether it is 8-bit grey, or three components not named RGB, which without Adobe's segment are YCbCr."""
    if len(frame) not in (6 + 3 * 1, 6 + 3 * 3):
        return False
    return frame[0] == 8 and len(frame) == 6 + 3 * frame[5] and frame[6::3] != b"RGB"
