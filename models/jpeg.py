"""JPEGs of the plain kind, decoded by simplejpeg where that costs less than Pillow.

Knows JPEG's segments; knows nothing of models. Both decode with libjpeg-turbo and give the same pixels: Pillow adds a
hundred microseconds of its own to each file, and simplejpeg's pixels must be copied to become an image of Pillow's,
which who only crops does not need. What is unusual gives None here and is Pillow's, with its rules and errors:
metadata that Pillow reads, other colours and codings, and whatever the library would warn of.

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

_BASELINE = b"\xc0"
_FRAMES = b"\xc0\xc1\xc2"  # Huffman-coded: baseline, extended, progressive
_SCAN = 0xDA
_TABLES_AND_COMMENTS = b"\xc4\xdb\xdd\xfe"
_APP0, _APP2 = 0xE0, 0xE2


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


def plain_jpeg(encoded: bytes, most_segments: int = 1 << 16) -> PlainJpeg | None:
    """None for what is Pillow's to decode or to refuse, whatever its size, and what has more segments than these."""
    frame = _plain_frame(encoded, most_segments) if _AVAILABLE else None
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


def _plain_frame(encoded: bytes, most_segments: int) -> tuple[bytes, bytes] | None:
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
        elif marker not in _TABLES_AND_COMMENTS and not _is_plain_application(marker[0], body):
            return None
        position = end
    return None


def _is_plain_colour(frame: bytes) -> bool:
    """Eight bits of grey, or three components that are not called RGB; without Adobe's segment that is YCbCr."""
    if len(frame) not in (6 + 3 * 1, 6 + 3 * 3):
        return False
    return frame[0] == 8 and len(frame) == 6 + 3 * frame[5] and frame[6::3] != b"RGB"


def _is_plain_application(marker: int, body: bytes) -> bool:
    """JFIF's header or a colour profile, which no rule asks for. EXIF and XMP may turn the image."""
    if marker == _APP0:
        return body.startswith(b"JFIF\0") and len(body) >= 14
    return marker == _APP2 and body.startswith(b"ICC_PROFILE\0") and len(body) >= 14
