"""Small PNGs of the plain kind, decoded by Pillow's own decoder without its file.

Knows PNG's chunks; knows nothing of models. Pillow finds out what a file is in some thirty Python calls, which cost
more than the pixels of a small one. What is unusual gives None here and is Pillow's, with its rules and errors:
palettes, transparent colours, other depths, interlacing, texts and whatever else stands beside the pixels, and what is
broken.
"""

from __future__ import annotations

import zlib

from PIL import Image

# Above this the way to the pixels costs little beside them.
MAX_PIXELS = 1 << 16

_IHDR = b"\x00\x00\x00\x0dIHDR"
_PIXELS_AT = 33
_FEW_CHUNKS = 32
_MODES = {0: "L", 2: "RGB", 6: "RGBA"}  # of eight bits a channel


def decode_small_png(encoded: bytes, max_pixels: int) -> Image.Image | None:
    """The RGB, RGBA or L image in `encoded`, as Pillow would open it; None for what is Pillow's to open or refuse."""
    header = encoded[8:_PIXELS_AT]
    if len(header) < _PIXELS_AT - 8 or not header.startswith(_IHDR):
        return None
    width, height = int.from_bytes(header[8:12]), int.from_bytes(header[12:16])
    depth, colour, *unusual = header[16:21]
    mode = _MODES.get(colour)
    if mode is None or depth != 8 or any(unusual) or not 0 < width * height <= min(MAX_PIXELS, max_pixels):
        return None
    if zlib.crc32(header[4:21]) != int.from_bytes(header[21:25]) or (pixels := _compressed_pixels(encoded)) is None:
        return None
    try:
        return Image.frombytes(mode, (width, height), pixels, "zip", mode)
    except Exception:  # what is wrong with it is for Pillow to say
        return None


def _compressed_pixels(encoded: bytes) -> bytes | None:
    """None where there is more than an image."""
    parts: list[bytes] = []
    position = _PIXELS_AT
    for _ in range(_FEW_CHUNKS):
        kind, start = encoded[position + 4 : position + 8], position + 8
        if kind == b"IEND":
            return b"".join(parts)
        if kind != b"IDAT":
            return None
        position = start + int.from_bytes(encoded[position : position + 4]) + 4
        parts.append(encoded[start : position - 4])
    return None
