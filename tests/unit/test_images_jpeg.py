"""simplejpeg gives Pillow's pixels; what it does not decode is decoded or refused by Pillow, in Pillow's words."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from PIL import Image, features

from convoy.models import images, jpeg
from convoy.models.spec import ImageSpec
from tests.support.jpegs import (
    BODIES,
    MARKERS,
    SPEC,
    Way,
    is_decoded_as_large,
    other_jpeg,
    outcome,
    picture,
    pillow_jpeg,
    sound_files,
    usual_outcome,
)

SIDES = st.one_of(st.integers(1, 40), st.integers(1, 256), st.integers(1, 700))
UNLIMITED = 10**6
WAYS: tuple[Way, ...] = ("large", "pillow")


def is_as_by_pillow(encoded: bytes, width: int, height: int, channels: Any = 3) -> bool:
    every_pixel = ImageSpec.plain(height, width, channels, "uint8_nhwc")
    return len({outcome(encoded, every_pixel, way, max_pixels=UNLIMITED) for way in WAYS}) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.tuples(SIDES, SIDES),
    st.sampled_from(["RGB", "RGB", "L"]),
    st.integers(1, 100),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from([1, 3]),
)
@example((247, 405), "RGB", 1, 0, False, 0, False, 3)
def test_all_that_pillow_writes_has_the_same_pixels(
    size: tuple[int, int],
    mode: str,
    quality: int,
    subsampling: int,
    progressive: bool,
    restart_blocks: int,
    has_profile: bool,
    channels: int,
) -> None:
    options: dict[str, Any] = {"icc_profile": b"a profile"} if has_profile else {}
    options |= {"subsampling": subsampling} if mode == "RGB" else {}
    options |= {"quality": quality, "progressive": progressive, "restart_marker_blocks": restart_blocks}
    try:
        encoded = pillow_jpeg(picture(*size, seed=quality, mode=mode), **options)
    except OSError:  # where a file with many restarts becomes longer than it expects, Pillow cannot write it
        reject()
    assert is_as_by_pillow(encoded, *size, channels)
    is_alike = channels == (1 if mode == "L" else 3)
    small = ImageSpec.plain(8, 8, channels, "uint8_nhwc")
    is_large = is_decoded_as_large(encoded, small, max_pixels=UNLIMITED)
    assert is_large == (is_alike and min(size) * 100 >= max(size))


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.sampled_from(["444", "422", "420", "440", "411"]),
    st.integers(1, 100),
)
def test_every_subsampling_has_the_same_pixels(size: tuple[int, int], subsampling: str, quality: int) -> None:
    encoded = other_jpeg(picture(*size, seed=quality), subsampling, quality)
    assert is_as_by_pillow(encoded, *size)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_image_is_turned_alike(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    xmp = f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()
    for options in ({"exif": exif}, {"xmp": xmp}):
        encoded = pillow_jpeg(picture(20, 10, seed=2), **options)
        assert is_decoded_as_large(encoded)
        assert is_as_by_pillow(encoded, 20, 10)


def test_other_colours_and_codings_are_pillows() -> None:
    colour = picture(16, 16, seed=3)
    sound = pillow_jpeg(colour)
    frame = sound.index(b"\xff\xc0")
    adobe = b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0\0"  # says that these are red, green and blue
    twelve_bits, arithmetic, three_to_rgb = bytearray(sound), bytearray(sound), bytearray(sound)
    twelve_bits[frame + 4], arithmetic[frame + 1] = 12, 0xC9
    three_to_rgb[frame + 10 : frame + 19 : 3] = b"RGB"
    strange = (sound[:2] + adobe + sound[2:], bytes(twelve_bits), bytes(arithmetic), bytes(three_to_rgb))
    for encoded in (pillow_jpeg(colour.convert("CMYK")), *strange, pillow_jpeg(colour, keep_rgb=True)):
        assert not is_decoded_as_large(encoded)
        assert is_as_by_pillow(encoded, 16, 16)


def test_without_pillows_own_library_pillow_decodes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = pillow_jpeg(picture(20, 10, seed=6))
    usual = outcome(encoded)
    monkeypatch.setattr(features, "version", lambda _: None)
    assert not jpeg._has_pillows_library()
    monkeypatch.setattr(jpeg, "_AVAILABLE", False)
    assert jpeg.plain_jpeg(encoded) is None
    assert outcome(encoded) == usual


EDITS = st.tuples(
    st.floats(0, 1),  # where
    st.sampled_from([0, 0, 1, 2, 40]),  # so many bytes are gone
    st.one_of(
        st.binary(max_size=3),
        st.builds(
            lambda marker, body: bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2) + body,
            st.sampled_from(MARKERS),
            st.sampled_from(BODIES),
        ),
    ),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sound_files()), st.lists(EDITS, max_size=3), st.booleans(), st.floats(0, 1))
def test_spoiled_files_end_as_with_pillow(
    whole: bytes, edits: list[tuple[float, int, bytes]], in_header: bool, share: float
) -> None:
    data = bytearray(whole)
    for place, gone, put in edits:
        at = int(place * (data.find(b"\xff\xda") if in_header else len(data)))
        data[at : at + gone] = put
    encoded = bytes(data[: int(share * len(data))] if not edits else data)
    assert len({outcome(encoded, way=way) for way in WAYS}) == 1
    plain = jpeg.plain_jpeg(encoded)
    if plain is not None and 0 < plain.width * plain.height <= 100_000:  # what need not be resized
        assert is_as_by_pillow(encoded, plain.width, plain.height, 1 if plain.channels == 1 else 3)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_photograph_is_the_same_as_by_pillow_however_it_is_resized(
    interpolation: Any, antialias: bool, orientation: int
) -> None:
    """As large as it must be, as a camera writes it, to a network's input."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = pillow_jpeg(picture(1000, 700, seed=8), exif=exif)
    spec = replace(
        SPEC,
        height=96,
        width=96,
        resize_mode="shorter_side",
        resize_px=110,
        interpolation=interpolation,
        antialias=antialias,
    )
    here, there = (outcome(encoded, spec, way, max_pixels=UNLIMITED) for way in ("usual", "pillow"))
    assert here == there
    assert isinstance(here, bytes)


def test_memory_that_is_used_again_never_shows_what_was_in_it() -> None:
    """Of several sizes, in several threads at once, with broken ones in between."""
    files = [pillow_jpeg(picture(800 + 40 * number, 700, seed=number)) for number in range(4)]
    files.append(files[0][: len(files[0]) // 2])
    expected = [outcome(encoded, way="pillow", max_pixels=UNLIMITED) for encoded in files]

    order = random.Random(1).choices(range(len(files)), k=60)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: usual_outcome(files[number], SPEC, UNLIMITED), order))
    assert found == [expected[number] for number in order]
    assert 0 < images.KEPT_MEMORY.kept_bytes <= 128 << 20
