"""Read an image's header without copying or decoding, to know what decoding will cost.

Knows the formats that `images.py` accepts, as far as Pillow reads them. If a header is ambiguous, the larger reading
counts; if it is cut off, there is none, and the decoder raises the error. Refuses only sizes without a bound.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from convoy.models.errors import ImageError

# A marker with a length, or the end: not stuffing (00), padding (ff), restarts or start (d0 to d8), TEM (01).
JPEG_SEGMENT = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
_MOST_PARTS = 5_000
_MOST_JUNK_BYTES = 64 << 10  # Pillow skips it
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_COEFFICIENT_BYTES = 6  # bytes of a pixel, in three components without subsampling
_CANVAS_BYTES = 14  # of WebP
_TIFF_BYTES = {3: 2, 4: 4, 16: 8}  # of its short, long and, since BigTIFF, long of eight bytes
_STRIP_BYTES = 8  # of a pixel in a strip or tile, which is held beside the image
_ORIENTATION, _XMP, _TILE_WIDTH, _TILE_HEIGHT = 274, 700, 322, 323


class Header(NamedTuple):
    """`pixel_bytes` is what Pillow holds of the opened image, `extra_bytes` what opening needs beside that, per pixel.

    If `has_alpha`, `is_deep` (more than 8 bits of grey), not `is_rgb`, or `may_turn` (EXIF), the image may be copied.
    """

    width: int
    height: int
    pixel_bytes: int
    extra_bytes: int = 0
    has_alpha: bool = False
    is_deep: bool = False
    may_turn: bool = False
    is_rgb: bool = False

    @property
    def pixels(self) -> int:
        return self.width * self.height


def read_header(form: str, encoded: memoryview) -> Header | None:
    """The header of a file in this format; None if it has no size. Raises ImageError if the size has no bound."""
    try:
        match form:
            case "JPEG":
                return _jpeg(encoded)
            case "PNG":
                return _png(encoded)
            case "GIF":
                return _gif(encoded)
            case "BMP":
                return _bmp(encoded)
            case "WebP":
                return _webp(encoded)
            case _:
                return _tiff(encoded)
    except IndexError:  # it is cut off
        return None


def _jpeg(encoded: memoryview) -> Header | None:
    """Progressive images are held as coefficients until the last scan."""
    width = height = components = extra_bytes = 0
    may_turn, position = False, 2
    for _ in range(_MOST_PARTS):
        marker = JPEG_SEGMENT.search(encoded, position, position + _MOST_JUNK_BYTES)
        if marker is None and position + _MOST_JUNK_BYTES < len(encoded):
            raise _endless("JPEG")
        if marker is None:
            return None
        kind, start = marker[1][0], marker.end()
        if kind == 0xDA:
            break
        if kind == 0xD9:  # tables for an image that follows
            position = start
            continue
        position = start + _big(encoded, start)
        if kind in _FRAMES:
            height, width = max(height, _big(encoded, start + 3)), max(width, _big(encoded, start + 5))
            components = max(components, encoded[start + 7])
            extra_bytes = extra_bytes if kind in (0xC0, 0xC1) else _COEFFICIENT_BYTES
        elif kind == 0xE1:
            may_turn |= _says_orientation(encoded[start + 2 : position])
    else:
        raise _endless("JPEG")
    if not components:
        return None
    if encoded[start + 2] < components:
        extra_bytes = _COEFFICIENT_BYTES
    pixel_bytes = 1 if components == 1 else 4
    return Header(width, height, pixel_bytes, extra_bytes, may_turn=may_turn, is_rgb=components == 3)


def _says_orientation(segment: memoryview) -> bool:
    """Whether EXIF or XMP has, or may have, another orientation than the usual one."""
    if bytes(segment[:6]) != b"Exif\0\0":
        return b"Orientation" in bytes(segment)
    try:
        return _tiff_tags(segment[6:]).get(_ORIENTATION, 1) != 1
    except (IndexError, ImageError):
        return True


def _png(encoded: memoryview) -> Header | None:
    width = height = channels = depth = 0
    has_alpha = may_turn = False
    position = 8
    for _ in range(_MOST_PARTS):
        kind, start = bytes(encoded[position + 4 : position + 8]), position + 8
        if kind in (b"IDAT", b"IEND", b""):
            break
        if kind == b"IHDR":
            width, height = max(width, _big(encoded, start, 4)), max(height, _big(encoded, start + 4, 4))
            depth, channels = encoded[start + 8], max(channels, _PNG_CHANNELS.get(encoded[start + 9], 4))
        has_alpha |= kind == b"tRNS"
        may_turn |= kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
        position = start + 4 + _big(encoded, position, 4)
    else:
        raise _endless("PNG")
    pixel_bytes = 1 if channels == 1 and depth <= 8 else 4
    is_deep = channels == 1 and depth > 8
    has_alpha |= channels in (2, 4)
    return Header(width, height, pixel_bytes, 0, has_alpha, is_deep, may_turn, channels == 3) if channels else None


def _gif(encoded: memoryview) -> Header | None:
    """The first frame counts if it is larger than the screen."""
    width, height = _little(encoded, 6), _little(encoded, 8)
    position = 13 + (3 << (encoded[10] & 7) + 1 if encoded[10] & 0x80 else 0)
    # An extension ends with an empty block; except for comments, Pillow does not accept it as the first block.
    in_block = reads_on = False
    for _ in range(_MOST_PARTS):
        kind = encoded[position]
        position += 1
        if in_block:
            position += kind
            in_block, reads_on = kind > 0 or reads_on, False
        elif kind == 0x2C:
            left, top = _little(encoded, position), _little(encoded, position + 2)
            width = max(width, left + _little(encoded, position + 4))
            height = max(height, top + _little(encoded, position + 6))
            return Header(width, height, 1, 1, has_alpha=True, may_turn=True)
        elif kind == 0x3B:
            return None
        elif kind == 0x21:
            in_block, reads_on = True, encoded[position] != 0xFE
            position += 1
    raise _endless("GIF")


def _bmp(encoded: memoryview) -> Header:
    if _little(encoded, 14, 4) == 12:
        return Header(_little(encoded, 18), _little(encoded, 20), 4)
    width, height = (_little(encoded, at, 4, signed=True) for at in (18, 22))
    bits = _little(encoded, 28)
    return Header(abs(width), abs(height), 4, has_alpha=bits == 32, is_rgb=bits == 24)


def _webp(encoded: memoryview) -> Header | None:
    """An animation's canvas is held twice, also with a single frame, and once as bytes."""
    kind = bytes(encoded[12:16])
    if kind == b"VP8 ":
        return Header(_little(encoded, 26) & 0x3FFF, _little(encoded, 28) & 0x3FFF, 4, _CANVAS_BYTES, is_rgb=True)
    if kind == b"VP8L":
        bits = _little(encoded, 21, 4)
        has_alpha = bool(bits >> 28 & 1)
        return Header((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 4, _CANVAS_BYTES, has_alpha, is_rgb=not has_alpha)
    if kind != b"VP8X":
        return None
    flags, width, height = encoded[20], _little(encoded, 24, 3) + 1, _little(encoded, 27, 3) + 1
    return Header(width, height, 4, _CANVAS_BYTES, has_alpha=bool(flags & 0x10), may_turn=bool(flags & 0x0C))


def _tiff(encoded: memoryview) -> Header | None:
    """A strip may be the whole image and is held beside it; a tile may be larger."""
    tags = _tiff_tags(encoded)
    width, height, samples, bits = (tags.get(tag, 0) for tag in (256, 257, 277, 258))
    if not width or not height:
        return None
    strips = max(1, -(-tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_HEIGHT, 0) // (width * height)))
    has_alpha, is_deep = samples in (2, 4, 5), samples < 2 and bits > 8
    may_turn = tags.get(_ORIENTATION, 1) != 1 or _XMP in tags
    return Header(width, height, 4, _STRIP_BYTES * strips, has_alpha, is_deep, may_turn, is_rgb=samples == 3)


def _tiff_tags(encoded: memoryview) -> dict[int, int]:
    """The first value of each tag in the first directory; of a repeated tag, the larger one."""
    read = _little if encoded[0] == ord("I") else _big
    first = read(encoded, 4, 4)
    entries = read(encoded, first)
    if entries > _MOST_PARTS:
        raise _endless("TIFF")
    tags: dict[int, int] = {}
    for at in range(first + 2, first + 2 + 12 * entries, 12):
        tag, kind, value_at = read(encoded, at), read(encoded, at + 2), at + 8
        value_bytes = _TIFF_BYTES.get(kind, 4)
        if kind in _TIFF_BYTES and value_bytes * read(encoded, at + 4, 4) > 4:  # the offset of the values
            value_at = read(encoded, value_at, 4)
        if value_at + value_bytes <= len(encoded):  # Pillow also ignores values beyond the end
            tags[tag] = max(read(encoded, value_at, value_bytes), tags.get(tag, 0))
    return tags


def _endless(form: str) -> ImageError:
    return ImageError(f"the {form} has over {_MOST_PARTS} parts before its pixels; save it again")


def _big(encoded: memoryview, at: int, nbytes: int = 2) -> int:
    return _number(encoded, at, nbytes, "big")


def _little(encoded: memoryview, at: int, nbytes: int = 2, *, signed: bool = False) -> int:
    return _number(encoded, at, nbytes, "little", signed=signed)


def _number(encoded: memoryview, at: int, nbytes: int, order: Literal["big", "little"], *, signed: bool = False) -> int:
    piece = encoded[at : at + nbytes]
    if len(piece) < nbytes:
        raise IndexError(at)
    return int.from_bytes(piece, order, signed=signed)
