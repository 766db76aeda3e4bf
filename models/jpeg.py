"""JPEGs of the plain kind, decoded by simplejpeg where that costs less than Pillow.

Knows JPEG's segments; knows nothing of models. Both decode with libjpeg-turbo and give the same pixels: Pillow adds a
hundred microseconds of its own to each file, and simplejpeg's pixels must be copied to become an image of Pillow's,
which who only crops does not need, nor who gives a pixel four bytes as Pillow does: then they are one where they lie.
What is unusual gives None here and is Pillow's, with its rules and errors: metadata that Pillow reads, other colours
and codings, and whatever the library would warn of.

Both release the GIL: simplejpeg once, from the header to the last pixel, Pillow for every 64 KB of the file.
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

# Measured on an AMD EPYC: decoding takes 0.6 of Pillow's time at 64x64, 0.75 at 224x224, and 0.8 to 1.1 of it above
# this, where the copy of each pixel into Pillow's own form costs what the rest saves.
MAX_PIXELS = 1 << 16
# From here on pixels of four bytes pay, although a fourth of them is resized for nothing: in memory that is used again
# decoding takes half of Pillow's time, and what else the process does is not held up by fresh pages.
LARGE_PIXELS = 1 << 19

_BASELINE = b"\xc0"
_FRAMES = b"\xc0\xc1\xc2"  # Huffman-coded: baseline, extended, progressive
_SCAN = 0xDA
_TABLES_AND_COMMENTS = b"\xc4\xdb\xdd\xfe"
_APP0, _APP2, _APP14, _APP15 = 0xE0, 0xE2, 0xEE, 0xEF


class _Layout(NamedTuple):
    """How pixels lie in memory: by simplejpeg's name and by Pillow's."""

    colours: str
    mode: str
    pixel_bytes: int


# By channels, those that Pillow can read where they are.
_LARGE = {1: _Layout("GRAY", "L", 1), 3: _Layout("RGBX", "RGBX", 4)}


def _has_pillows_library() -> bool:
    """Whether Pillow decodes with the library that is in simplejpeg, too; others and old ones differ in some pixels."""
    major = (features.version("libjpeg_turbo") or "").partition(".")[0]
    return simplejpeg is not None and major.isdigit() and int(major) >= 3


_AVAILABLE = _has_pillows_library()


class PlainJpeg(NamedTuple):
    """A file that is decoded here: what its frame header says. `is_baseline`: it is decoded in one go."""

    width: int
    height: int
    channels: int  # 1: grey, 3: RGB once decoded
    is_baseline: bool

    def decode_ns(self, nbytes: int) -> float:
        """About what decoding a file of so many bytes takes on a core of an AMD EPYC.

        Fitted to 60 files of 64x64 to 500x375, from flat to noise, which are within a third of it.
        """
        return 5_500 + 1.3 * self.width * self.height + 6.3 * nbytes


def plain_jpeg(encoded: bytes, most_segments: int = 1 << 16, *, any_metadata: bool = False) -> PlainJpeg | None:
    """None for what is Pillow's to decode or to refuse, whatever its size, and what has more segments than these.

    `any_metadata`: Pillow reads what may turn the image, and judges it; only the pixels are to be had here.
    """
    frame = _plain_frame(encoded, most_segments, any_metadata) if _AVAILABLE else None
    if frame is None:
        return None
    marker, body = frame
    return PlainJpeg(int.from_bytes(body[3:5]), int.from_bytes(body[1:3]), body[5], marker == _BASELINE)


def jpeg_pixels(encoded: bytes, plain: PlainJpeg) -> npt.NDArray[np.uint8] | None:
    """uint8 [height, width, channels], as Pillow would decode them; None for what Pillow is to judge."""
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            encoded, "GRAY" if plain.channels == 1 else "RGB", strict=True
        )
    except Exception:  # also for what is only odd: whether that counts is for Pillow to say
        return None
    return pixels


def decode_small_jpeg(encoded: bytes, max_pixels: int) -> Image.Image | None:
    """The RGB or L image in `encoded`, as Pillow would decode it; None for what is Pillow's to decode or to refuse."""
    plain = plain_jpeg(encoded)
    if plain is None or not 0 < plain.width * plain.height <= min(MAX_PIXELS, max_pixels):
        return None
    pixels, mode = jpeg_pixels(encoded, plain), "L" if plain.channels == 1 else "RGB"
    return pixels if pixels is None else Image.frombuffer(mode, (plain.width, plain.height), pixels, "raw", mode, 0, 1)


def large_jpeg_bytes(plain: PlainJpeg) -> int:
    """How much memory `large_jpeg` writes to."""
    return plain.width * plain.height * _LARGE[plain.channels].pixel_bytes


def large_jpeg(encoded: bytes, plain: PlainJpeg, memory: npt.NDArray[np.uint8]) -> Image.Image | None:
    """The image, whose pixels are in `memory`: mode L, or RGBX, as Pillow would decode them; None for what is Pillow's.

    `memory`: uint8 of `large_jpeg_bytes`, contiguous.
    """
    layout, size = _LARGE[plain.channels], (plain.width, plain.height)
    pixels = memory.reshape(plain.height, plain.width, layout.pixel_bytes)
    try:
        simplejpeg.decode_jpeg(encoded, layout.colours, buffer=pixels, strict=True)
    except Exception:  # as in `jpeg_pixels`
        return None
    return Image.frombuffer(layout.mode, size, pixels, "raw", layout.mode, 0, 1)


def _plain_frame(encoded: bytes, most_segments: int, any_metadata: bool) -> tuple[bytes, bytes] | None:
    """The frame header's marker and body, if what stands before the first scan is nothing but what most files have."""
    frame, position = None, 2
    for _ in range(most_segments):
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
            frame = marker, body
        elif marker not in _TABLES_AND_COMMENTS and not _is_plain_application(marker[0], body, any_metadata):
            return None
        position = end
    return None


def _is_plain_colour(frame: bytes) -> bool:
    """Eight bits of grey, or three components that are not called RGB; without Adobe's segment that is YCbCr."""
    if len(frame) not in (6 + 3 * 1, 6 + 3 * 3):
        return False
    return frame[0] == 8 and len(frame) == 6 + 3 * frame[5] and frame[6::3] != b"RGB"


def _is_plain_application(marker: int, body: bytes, any_metadata: bool) -> bool:
    """JFIF's header or a colour profile, which no rule asks for. EXIF and XMP may turn it, Adobe names its colours."""
    if any_metadata and _APP0 <= marker <= _APP15:
        return marker != _APP14
    if marker == _APP0:
        return body.startswith(b"JFIF\0") and len(body) >= 14
    return marker == _APP2 and body.startswith(b"ICC_PROFILE\0") and len(body) >= 14
