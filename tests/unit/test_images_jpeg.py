"""What simplejpeg decodes has Pillow's pixels, and what it does not is Pillow's, with Pillow's words."""

from __future__ import annotations

import builtins
import importlib
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, reject, settings
from hypothesis import strategies as st
from PIL import Image, features

from convoy.models import images, jpeg
from convoy.models.spec import ImageSpec
from tests.support.mutated_jpegs import (
    SPEC,
    Way,
    is_decoded_as_large,
    other_jpeg,
    outcome,
    picture,
    pillow_jpeg,
    usual_outcome,
)
from tests.support.stores import ROOT

SIDES = st.one_of(st.integers(1, 40), st.integers(1, 256), st.integers(1, 700))
UNLIMITED = 10**6
WAYS: tuple[Way, ...] = ("usual", "large", "pillow")


def is_decoded_here(encoded: bytes) -> bool:
    return jpeg.decode_small_jpeg(encoded, UNLIMITED) is not None


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
    assert is_decoded_here(encoded) == (size[0] * size[1] <= jpeg.MAX_PIXELS)
    is_alike = channels == (1 if mode == "L" else 3)
    small = ImageSpec.plain(8, 8, channels, "uint8_nhwc")
    is_large = is_decoded_as_large(encoded, small, max_pixels=UNLIMITED)
    assert is_large == (is_alike and min(size) * 100 >= max(size))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(8, 300),
    st.integers(0, 200),
    st.booleans(),
    st.floats(0.02, 1),
    st.sampled_from(["RGB", "L"]),
    st.sampled_from(["uint8_nhwc", "float32_nchw"]),
)
def test_the_crop_of_what_need_not_be_resized_has_the_same_pixels(
    shorter: int, more: int, is_wide: bool, kept: float, mode: str, front: Any
) -> None:
    size = (shorter + more, shorter) if is_wide else (shorter, shorter + more)
    encoded = pillow_jpeg(picture(*size, seed=more, mode=mode))
    crop = max(1, int(kept * shorter))
    channels: Any = 3 if mode == "RGB" else 1
    spec = replace(
        ImageSpec.plain(crop, crop, channels, front),
        resize_mode="shorter_side",
        resize_px=shorter,
        mean=(0.4,) * channels,
        std=(0.2,) * channels,
    )
    here, *others = (outcome(encoded, spec, way, max_pixels=UNLIMITED) for way in WAYS)
    assert others == [here, here]
    assert isinstance(here, bytes)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.sampled_from(["444", "422", "420", "440", "411"]),
    st.integers(1, 100),
)
def test_every_subsampling_has_the_same_pixels(size: tuple[int, int], subsampling: str, quality: int) -> None:
    encoded = other_jpeg(picture(*size, seed=quality), subsampling, quality)
    assert is_decoded_here(encoded)
    assert is_as_by_pillow(encoded, *size)


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.floats(0, 1))
def test_a_cut_off_file_is_refused_or_filled_as_by_pillow(progressive: bool, share: float) -> None:
    encoded = pillow_jpeg(picture(40, 30, seed=1), progressive=progressive)
    length = int(share * len(encoded))
    assume(length >= 3)
    assert is_as_by_pillow(encoded[:length], 40, 30)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_what_may_turn_the_image_is_pillows(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    xmp = f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()
    for options in ({"exif": exif}, {"xmp": xmp}):
        encoded = pillow_jpeg(picture(20, 10, seed=2), **options)
        assert not is_decoded_here(encoded)
        assert is_decoded_as_large(encoded), "there Pillow says how it lies, and does not decode it"
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
        assert not is_decoded_here(encoded)
        assert not is_decoded_as_large(encoded)
        assert is_as_by_pillow(encoded, 16, 16)


def test_more_pixels_are_pillows_and_the_limit_of_the_server_comes_first() -> None:
    assert is_decoded_here(pillow_jpeg(picture(256, 256, seed=4)))
    assert not is_decoded_here(pillow_jpeg(picture(256, 257, seed=4)))
    small = pillow_jpeg(picture(20, 10, seed=4))
    assert jpeg.decode_small_jpeg(small, 200) is not None
    assert jpeg.decode_small_jpeg(small, 199) is None


def test_sides_too_different_are_refused_in_the_same_words() -> None:
    encoded = pillow_jpeg(picture(303, 3, seed=5))
    assert "at most 100 times the shorter" in str(outcome(encoded))
    assert outcome(encoded) == outcome(encoded, way="pillow") == outcome(encoded, way="large")


@pytest.mark.parametrize("missing", ["simplejpeg", "libjpeg-turbo"])
def test_without_the_package_or_pillows_library_pillow_decodes_all(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = pillow_jpeg(picture(20, 10, seed=6))
    usual = outcome(encoded)
    if missing == "simplejpeg":
        importing = builtins.__import__

        def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == "simplejpeg":
                raise ImportError(name)
            return importing(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)
    else:
        monkeypatch.setattr(features, "version", lambda _: None)
    try:
        bare = importlib.reload(jpeg)
        assert bare.decode_small_jpeg(encoded, UNLIMITED) is None
        assert bare.plain_jpeg(encoded) is None
        monkeypatch.setattr(images, "decode_small_jpeg", bare.decode_small_jpeg)
        monkeypatch.setattr(images, "plain_jpeg", bare.plain_jpeg)
        assert outcome(encoded) == usual
    finally:
        monkeypatch.undo()
        importlib.reload(jpeg)


def test_the_pixels_outlive_the_upload() -> None:
    encoded = bytearray(pillow_jpeg(picture(30, 20, seed=7, mode="L")))
    image = jpeg.decode_small_jpeg(bytes(encoded), UNLIMITED)
    assert image is not None
    before = np.array(image)
    encoded[:] = bytes(len(encoded))
    assert np.array_equal(np.asarray(image), before)
    assert outcome(pillow_jpeg(image), replace(SPEC, channels=1, mean=(0.0,), std=(1.0,)))


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.long)])
def test_spoiled_files_neither_crash_nor_differ(count: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.mutated_jpegs", "7", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert " 0 differ" in done.stdout
    assert ", 0 " not in done.stdout.replace(", 0 differ", "")


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
