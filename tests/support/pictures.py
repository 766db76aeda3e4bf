"""Images that nobody should send, and what the small ones are that networks with random weights are given."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any, Literal
from unittest.mock import MagicMock, patch

import numpy as np
import simplejpeg
from PIL import Image

from convoy.models import images
from convoy.models.errors import ImageError
from convoy.models.jpeg import large_jpeg
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


def exif_of(orientation: int) -> Image.Exif:
    """What a camera writes of how the picture is to be turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


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
    whole = saved(large, "JPEG", quality=90)
    return {
        "plain.png": digit("seven"),
        "large.jpg": whole,
        "turned.jpg": saved(large, "JPEG", exif=exif_of(6)),
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


# As usual, by Pillow alone, or every file that can be like a large one.
Way = Literal["usual", "pillow", "large"]
# Every source pixel counts: nothing is resized away.
WHOLE_PX = 16
SPEC = ImageSpec.plain(WHOLE_PX, WHOLE_PX, 3, "uint8_nhwc")
MARKERS = (*range(0xC0, 0xE3), 0xED, 0xEE, 0xFE, 0x00, 0x01, 0xFF)
BODIES = (
    b"JFIF\0",
    b"JFIF\0\1\1\0\0\1\0\1\0\0",
    b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0",
    b"ICC_PROFILE\0",
    b"ICC_PROFILE\0\1\1x",
    b"Adobe\0d\0\0\0\0\0",
    b"Adobe\0d\0\0\0\0\1",
    b"",
    b"\0" * 67,
)


def picture(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    """Smooth colours under noise, so that every frequency and the chroma count."""
    rng = np.random.default_rng(seed)
    rough = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((smooth + rng.integers(-20, 21, smooth.shape)).clip(0, 255).astype(np.uint8)).convert(mode)


def pillow_jpeg(image: Image.Image, **options: Any) -> bytes:
    return saved(image, "JPEG", **options)


def other_jpeg(image: Image.Image, subsampling: str, quality: int = 85) -> bytes:
    """With a subsampling that Pillow does not write, such as 440."""
    return simplejpeg.encode_jpeg(np.asarray(image), quality, "RGB", subsampling)


def outcome(encoded: bytes, spec: ImageSpec = SPEC, way: Way = "usual", *, max_pixels: int = 100_000) -> bytes | str:
    """The sample's bytes, or the words of the error."""
    with patch.multiple(images, **_ways(way)):
        return usual_outcome(encoded, spec, max_pixels)


def usual_outcome(encoded: bytes, spec: ImageSpec, max_pixels: int) -> bytes | str:
    """The same as it comes, from any thread."""
    try:
        return images.preprocess(encoded, spec, max_pixels).tobytes()
    except ImageError as error:
        return str(error)


def _ways(way: Way) -> dict[str, Any]:
    if way == "pillow":
        return {"plain_jpeg": MagicMock(return_value=None)}
    return {"LARGE_PIXELS": 1 if way == "large" else images.LARGE_PIXELS}


def is_decoded_as_large(encoded: bytes, spec: ImageSpec = SPEC, *, max_pixels: int = 100_000) -> bool:
    """Whether the pixels were simplejpeg's, in memory that is used again."""
    found: list[Image.Image | None] = []

    def decode(*args: Any) -> Image.Image | None:
        found.append(large_jpeg(*args))
        return found[-1]

    with patch.object(images, "large_jpeg", decode):
        outcome(encoded, spec, "large", max_pixels=max_pixels)
    return found != [None] * len(found)


def sound_files() -> list[bytes]:
    colour, grey = picture(24, 17, 1), picture(19, 23, 2, "L")
    return [
        pillow_jpeg(colour, subsampling=0),
        pillow_jpeg(colour, subsampling=2, optimize=True),
        pillow_jpeg(colour, subsampling=1, progressive=True),
        pillow_jpeg(colour, restart_marker_blocks=1, comment="a comment"),
        pillow_jpeg(colour, icc_profile=b"profile" * 20),
        pillow_jpeg(colour, exif=exif_of(6)),
        pillow_jpeg(colour.convert("CMYK")),
        pillow_jpeg(grey),
        pillow_jpeg(grey, progressive=True),
        other_jpeg(colour, "440"),
    ]
