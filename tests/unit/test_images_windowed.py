"""A part of a resized image is bit for bit what would have been cropped from the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from convoy.models.windowed import resized_window

BILINEAR = Image.Resampling.BILINEAR
KERNELS = (BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS, Image.Resampling.NEAREST)
# Widths and heights whose ratio, and with it the place of the window, is common.
COMMON = ((500, 375), (500, 333), (640, 360), (640, 480), (1280, 720), (600, 400), (333, 517), (340, 256), (320, 320))
SIZES = st.one_of(
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.integers(60, 700), st.integers(60, 700)),
    st.sampled_from([*COMMON, *(size[::-1] for size in COMMON)]),
)
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (1280, 1280, 3), np.uint8))


def window_of(size: tuple[int, int], crop: int) -> tuple[int, int, int, int]:
    left, top = round((size[0] - crop) / 2), round((size[1] - crop) / 2)
    return left, top, left + crop, top + crop


def resized_to(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    width, height = size
    return (shorter, shorter * height // width) if width <= height else (shorter * width // height, shorter)


def assert_equal(source: Image.Image, size: tuple[int, int], window: tuple[int, int, int, int], kernel: Any) -> None:
    whole = source.resize(size, kernel).crop(window)
    part = resized_window(source, size, window, kernel)
    assert (part.mode, part.size) == (whole.mode, whole.size)
    assert part.tobytes() == whole.tobytes()


@settings(max_examples=250, deadline=None)
@given(
    SIZES,
    st.sampled_from([(256, 224), (256, 224), (232, 224), (64, 56), (320, 288), (48, 20), (35, 33)]),
    st.sampled_from(KERNELS),
    st.sampled_from(["RGB", "RGB", "L"]),
)
def test_the_centre_is_that_of_the_whole(size: tuple[int, int], px: tuple[int, int], kernel: Any, mode: str) -> None:
    shorter, crop = px
    whole = resized_to(size, shorter)
    if max(whole) <= 2000:
        assert_equal(NOISE.crop((0, 0, *size)).convert(mode), whole, window_of(whole, crop), kernel)


@settings(max_examples=150, deadline=None)
@given(st.tuples(*(st.integers(1, 200),) * 4), st.tuples(*(st.floats(0, 1),) * 4), st.sampled_from(KERNELS))
def test_any_part_at_any_size_is_that_of_the_whole(
    sides: tuple[int, int, int, int], places: tuple[float, float, float, float], kernel: Any
) -> None:
    width, height, to_width, to_height = sides
    left, right = sorted(int(place * to_width) for place in places[:2])
    top, bottom = sorted(int(place * to_height) for place in places[2:])
    window = min(left, to_width - 1), min(top, to_height - 1), max(right, left + 1), max(bottom, top + 1)
    window = *window[:2], min(window[2], to_width), min(window[3], to_height)
    assert_equal(NOISE.crop((0, 0, width, height)), (to_width, to_height), window, kernel)


@pytest.mark.parametrize("size", [(720, 1280), (333, 517), (200, 700), (240, 427)])
def test_a_part_keeps_the_order_in_which_pillow_takes_rows_and_columns(size: tuple[int, int]) -> None:
    # Between the passes the values are rounded: in the other order a sixth of them are one off.
    whole = resized_to(size, 256)
    assert_equal(NOISE.crop((0, 0, *size)), whole, window_of(whole, 224), BILINEAR)


@pytest.mark.parametrize(
    ("size", "computed"), [((1280, 720), (273, 224)), ((500, 333), (228, 224)), ((500, 375), (341, 224))]
)
def test_most_of_what_is_cropped_away_is_not_computed(
    size: tuple[int, int], computed: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    resize = Image.Image.resize

    def observed(self: Image.Image, to: tuple[int, int], *args: Any) -> Image.Image:
        asked.append(to)
        return resize(self, to, *args)

    monkeypatch.setattr(Image.Image, "resize", observed)
    whole = resized_to(size, 256)
    resized_window(NOISE.crop((0, 0, *size)), whole, window_of(whole, 224), BILINEAR)
    assert asked == [computed]
