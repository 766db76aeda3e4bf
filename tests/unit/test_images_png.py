"""A PNG that is decoded without Pillow's file has Pillow's pixels, and what is not is Pillow's, with Pillow's words."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from convoy.models import images, png
from convoy.models.errors import ImageError
from convoy.models.spec import ImageSpec

SPEC = ImageSpec.plain(16, 16, 3, "uint8_nhwc")
UNLIMITED = 10**6
SIDES = st.one_of(st.integers(1, 40), st.integers(1, 300))


def picture(width: int, height: int, mode: str, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    smooth = np.add.outer(np.arange(height) * 3, np.arange(width) * 5)[..., None] + np.arange(4) * 60
    pixels = (smooth + rng.integers(0, 20, (height, width, 4))) % 256
    return Image.fromarray(pixels.astype(np.uint8), "RGBA").convert(mode)


def saved(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def is_decoded_here(encoded: bytes) -> bool:
    return png.decode_small_png(encoded, UNLIMITED) is not None


def pixels_here(encoded: bytes) -> Any:
    """As they are decoded for one that nobody resizes; None: they are not."""
    plain = png.plain_png(encoded)
    return None if plain is None else png.png_pixels(encoded, plain)


def outcome(encoded: bytes, spec: ImageSpec, max_pixels: int = UNLIMITED) -> bytes | str:
    """The sample's bytes, or the words of the error."""
    try:
        return images.preprocess(encoded, spec, max_pixels).tobytes()
    except ImageError as error:
        return str(error)


def by_pillow(encoded: bytes, spec: ImageSpec, max_pixels: int = UNLIMITED) -> bytes | str:
    with (
        patch.object(images, "decode_small_png", lambda *_: None),
        patch.object(images, "plain_png", lambda *_: None),
        patch.object(images, "is_plainest", lambda *_: False),
    ):
        return outcome(encoded, spec, max_pixels)


def is_as_by_pillow(encoded: bytes, spec: ImageSpec = SPEC, max_pixels: int = UNLIMITED) -> bool:
    return outcome(encoded, spec, max_pixels) == by_pillow(encoded, spec, max_pixels)


def has_all_pixels(encoded: bytes) -> bool:
    """Whether there are a byte and a row of pixels for each row, whatever comes behind."""
    plain = png.plain_png(encoded)
    row_bytes = 1 + plain.width * len(plain.mode)
    deflated = encoded[43 : encoded.rindex(b"IEND") - 8]
    rows = zlib.decompressobj(-zlib.MAX_WBITS).decompress(deflated, row_bytes * plain.height)
    return len(rows) == row_bytes * plain.height


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.tuples(SIDES, SIDES),
    st.sampled_from(["RGB", "RGBA", "L"]),
    st.integers(0, 9),
    st.sampled_from([1, 3]),
    st.integers(0, 99),
)
def test_all_that_pillow_writes_has_the_same_pixels(
    size: tuple[int, int], mode: str, level: int, channels: Any, seed: int
) -> None:
    encoded = saved(picture(*size, mode, seed), compress_level=level)
    every_pixel = ImageSpec.plain(size[1], size[0], channels, "uint8_nhwc")
    assert is_decoded_here(encoded) == (size[0] * size[1] <= png.MAX_PIXELS)
    assert is_as_by_pillow(encoded, every_pixel)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_is_the_input_as_it_is_is_known_by_its_first_and_last_bytes(mode: str) -> None:
    encoded, channels = saved(picture(12, 9, mode)), len(mode)
    assert png.is_plainest(encoded, 12, 9, channels)
    assert not png.is_plainest(encoded, 9, 12, channels)
    assert not png.is_plainest(encoded, 12, 9, 4 - channels)
    assert not png.is_plainest(encoded + b"behind", 12, 9, channels)
    assert not png.is_plainest(saved(picture(12, 9, "RGBA")), 12, 9, channels)
    assert not png.is_plainest(saved(picture(256, 257, mode)), 256, 257, channels)
    pixels = png.plainest_pixels(encoded)
    assert pixels.tobytes() == picture(12, 9, mode).tobytes()
    for position in range(len(encoded)):
        spoiled = encoded[:position] + bytes([encoded[position] ^ 1]) + encoded[position + 1 :]
        assert not png.is_plainest(spoiled, 12, 9, channels) or png.plainest_pixels(spoiled) is None
        assert not png.is_plainest(encoded[:position], 12, 9, channels)


def test_what_is_unusual_is_left_to_pillow() -> None:
    colour = picture(16, 16, "RGB")
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "a")
    turned = Image.Exif()
    turned[0x0112] = 6
    for encoded in (
        saved(colour.quantize(16)),
        saved(colour.convert("1")),
        saved(colour.convert("LA")),
        saved(colour.convert("I;16")),
        saved(colour, transparency=(1, 2, 3)),
        saved(colour, pnginfo=text),
        saved(colour, exif=turned),
        saved(picture(300, 300, "RGB")),
    ):
        assert not is_decoded_here(encoded)
        assert pixels_here(encoded) is None
        assert is_as_by_pillow(encoded)


def test_the_limit_of_the_server_comes_first() -> None:
    small = saved(picture(20, 10, "L"))
    assert png.decode_small_png(small, 200) is not None
    assert png.decode_small_png(small, 199) is None
    assert "more than the 199 allowed" in str(outcome(small, SPEC, 199))
    assert "at most 100 times the shorter" in str(outcome(saved(picture(303, 3, "L")), SPEC))


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["RGB", "RGBA", "L"]),
    st.lists(st.tuples(st.integers(8, 400), st.integers(0, 255)), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(0, 400)),
)
def test_spoiled_files_end_as_with_pillow(mode: str, changes: list[tuple[int, int]], cut_at: int | None) -> None:
    encoded = bytearray(saved(picture(12, 9, mode)))
    for position, value in changes:
        encoded[position % len(encoded)] = value
    assert is_as_by_pillow(bytes(encoded[:cut_at]), replace(SPEC, height=9, width=12), 10_000)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["RGB", "L"]),
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=2),
    st.one_of(st.none(), st.integers(0, 400)),
    st.binary(max_size=8),
)
def test_spoiled_pixels_with_a_right_sum_are_those_of_pillow_where_it_takes_them(
    mode: str, level: int, changes: list[tuple[int, int]], cut_at: int | None, behind: bytes
) -> None:
    whole = saved(picture(12, 9, mode), compress_level=level)
    pixels = bytearray(whole[41 : whole.index(b"IEND") - 8])
    for position, value in changes:
        pixels[position % len(pixels)] = value
    encoded = whole[:33] + chunk(b"IDAT", bytes(pixels[:cut_at]) + behind) + chunk(b"IEND", b"")
    spec = ImageSpec.plain(9, 12, 3 if mode == "RGB" else 1, "uint8_nhwc")
    # Pillow also refuses what has all its pixels, and behind them not the sum that zlib wants.
    assert is_as_by_pillow(encoded, spec) or (isinstance(by_pillow(encoded, spec), str) and has_all_pixels(encoded))


def test_without_the_package_pillow_decodes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = saved(picture(16, 16, "RGB"))
    usual = outcome(encoded, SPEC)
    monkeypatch.setattr(png, "pyspng", None)
    assert pixels_here(encoded) is None
    assert outcome(encoded, SPEC) == usual
