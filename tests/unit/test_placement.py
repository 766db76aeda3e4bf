"""Where in a picture an input comes from: windows of resized images, and places of answers."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from convoy.models.geometry import UNSEEN, Extent, ImagePlacement, crop_corner, full_size
from convoy.models.images import preprocess
from convoy.models.opencv_linear import resize_linear
from convoy.models.spec import ImageSpec, Interpolation, PadPosition
from convoy.models.windowed import resized_window

sides = st.integers(1, 700)
sizes = st.tuples(sides, sides).filter(lambda size: max(size) <= 100 * min(size))


def shorter_side(resize_px: int, height: int, width: int) -> ImageSpec:
    plain = ImageSpec.plain(height, width, 3, "uint8_nhwc")
    return ImageSpec(
        *(height, width, 3, "shorter_side", resize_px, "nearest", True, plain.mean, plain.std, plain.front),
    )


def exact(height: int, width: int) -> ImageSpec:
    return ImageSpec.plain(height, width, 3, "uint8_nhwc")


def letterbox(height: int, width: int, position: PadPosition = "center", *, scale_up: bool = True) -> ImageSpec:
    plain = replace(ImageSpec.plain(height, width, 3, "uint8_nhwc"), resize_mode="letterbox", antialias=False)
    return replace(plain, pad_position=position, scale_up=scale_up)


small = st.integers(1, 64)
positions: st.SearchStrategy[PadPosition] = st.sampled_from(["center", "top_left"])
letterboxes = st.builds(letterbox, small, small, positions, scale_up=st.booleans())
images = st.one_of(
    letterboxes,
    st.builds(exact, small, small),
    st.builds(lambda more, height, width: shorter_side(max(height, width) + more, height, width), small, small, small),
)


def to_input(boxes: np.ndarray, size: tuple[int, int], image: ImageSpec) -> np.ndarray:
    """What resizing and cropping make of a box, written down by itself."""
    full, corner = full_size(size, image), crop_corner(full_size(size, image), image)
    scale = [full[0] / size[0], full[1] / size[1]]
    return boxes * [*scale, *scale] - [*corner, *corner]


@given(sizes, images, st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_a_box_comes_back_to_where_it_was(size: tuple[int, int], image: ImageSpec, shares: list[float]) -> None:
    boxes = np.array([shares]) * [*size, *size]
    back = ImagePlacement.of(size, image).boxes_on_picture(to_input(boxes, size, image))
    np.testing.assert_allclose(back, boxes, rtol=0, atol=1e-9 * max(size))


@given(
    st.tuples(st.integers(1, 4000), st.integers(1, 3000)),
    letterboxes,
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_a_box_comes_back_through_a_letterbox(size: tuple[int, int], image: ImageSpec, shares: list[float]) -> None:
    """To half a pixel of the picture or of the input, whichever is larger, with Ultralytics' own sums on the way."""
    ratio = min(image.height / size[1], image.width / size[0])
    ratio = ratio if image.scale_up else min(ratio, 1.0)
    width, height = (max(1, round(side * ratio)) for side in size)
    pads = ((image.width - width) / 2, (image.height - height) / 2)
    left, top = (round(pad - 0.1) for pad in pads) if image.pad_position == "center" else (0, 0)
    boxes = np.array([shares[:4]]) * [*size, *size]
    at_input = boxes * ([width / size[0], height / size[1]] * 2) + [left, top, left, top]
    assert left + width + round(pads[0] + 0.1) == image.width or image.pad_position == "top_left"
    back = ImagePlacement.of(size, image).boxes_on_picture(at_input)
    np.testing.assert_allclose(back, boxes, rtol=0, atol=1e-9 * max(size))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_letterbox_is_the_one_of_cv2(interpolation: Interpolation) -> None:
    rng = np.random.default_rng(3)
    fixed = ((4000, 3000), (1, 1), (1, 90), (640, 640), (1300, 21))
    for size in (*fixed, *(tuple(map(int, rng.integers(9, 900, 2))) for _ in range(40))):
        image = replace(letterbox(96, 160), interpolation=interpolation, pad_value=int(rng.integers(0, 256)))
        width, height = full_size(size, image)
        pixels = cv2.blur(rng.integers(0, 256, (size[1], size[0], 3), np.uint8), (3, 3))
        kernel = cv2.INTER_LINEAR if interpolation == "bilinear" else cv2.INTER_CUBIC
        resized = cv2.resize(pixels, (width, height), interpolation=kernel)
        across, down = (160 - width) / 2, (96 - height) / 2
        edges = round(down - 0.1), round(down + 0.1), round(across - 0.1), round(across + 0.1)
        expected = cv2.copyMakeBorder(resized, *edges, cv2.BORDER_CONSTANT, value=(image.pad_value,) * 3)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG", compress_level=1)
        difference = np.abs(preprocess(file.getvalue(), image).astype(int) - expected).max()
        assert difference <= (0 if interpolation == "bilinear" else 1), size


@given(st.tuples(small, small), st.tuples(small, small), st.sampled_from([(), (1,), (3,)]), st.integers(0, 2**32 - 1))
@example((40, 30), (20, 15), (3,), 0)
@example((40, 30), (20, 30), (), 0)
def test_bilinear_pixels_are_those_of_cv2(size: Extent, of: Extent, channels: tuple[int, ...], seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (of[1], of[0], *channels), np.uint8)
    expected = cv2.resize(pixels, size, interpolation=cv2.INTER_LINEAR).reshape(size[1], size[0], *channels)
    assert np.array_equal(resize_linear(pixels, size), expected)


@given(sizes, images)
def test_boxes_end_at_the_picture(size: tuple[int, int], image: ImageSpec) -> None:
    beyond = np.array([[-1e4, -1e4, 1e4 * size[0], 1e4 * size[1]]])
    assert ImagePlacement.of(size, image).boxes_on_picture(beyond).tolist() == [[0, 0, *size]]


@given(sizes, images, small, small)
def test_a_class_map_covers_what_the_crop_shows_and_nothing_else(
    size: tuple[int, int], image: ImageSpec, rows: int, columns: int
) -> None:
    placement = ImagePlacement.of(size, image)
    numbers = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
    placed = placement.map_on_picture((numbers % 200).astype(np.uint8))
    assert placed.shape == (size[1], size[0])
    # Each pixel's centre, forward, tells the cell.
    y, x = np.mgrid[: size[1], : size[0]] + 0.5
    forward = to_input(np.stack([x, y, x, y], axis=-1).reshape(-1, 4), size, image)[:, :2]
    cells = forward * [columns / image.width, rows / image.height]
    is_seen = ((forward >= 0) & (forward < [image.width, image.height])).all(axis=1)
    # Where a centre lies on an edge to the last bit, either side is right.
    is_clear = (np.abs(cells - np.round(cells)) > 1e-6).all(axis=1)
    assert (placed.reshape(-1) == UNSEEN)[is_clear].tolist() == (~is_seen)[is_clear].tolist()
    found = np.floor(cells[is_seen & is_clear]).astype(int)
    assert placed.reshape(-1)[is_seen & is_clear].tolist() == (numbers[found[:, 1], found[:, 0]] % 200).tolist()


@pytest.mark.parametrize(
    "image", [exact(20, 30), shorter_side(40, 20, 30), letterbox(20, 30)], ids=["exact", "crop", "letterbox"]
)
@pytest.mark.parametrize("size", [(80, 80), (160, 80), (80, 240)])
def test_what_is_painted_in_the_picture_is_found_where_it_was(image: ImageSpec, size: tuple[int, int]) -> None:
    """The way there is the real preprocessing, with nearest pixels so that edges stay sharp."""
    sharp = replace(image, interpolation="nearest", antialias=True, pad_value=0)
    box = (size[0] // 2 - 12, size[1] // 2 - 8, size[0] // 2 + 20, size[1] // 2 + 16)
    picture = Image.new("RGB", size, "black")
    picture.paste("white", box)
    file = io.BytesIO()
    picture.save(file, "PNG")
    is_white = preprocess(file.getvalue(), sharp)[:, :, 0] > 128
    rows, columns = np.flatnonzero(is_white.any(axis=1)), np.flatnonzero(is_white.any(axis=0))
    found = np.array([[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]], np.float32)
    placement = ImagePlacement.of(size, sharp)
    # A pixel of the input is so many of the picture.
    one_px = max(size[0] / placement.full[0], size[1] / placement.full[1])
    np.testing.assert_allclose(placement.boxes_on_picture(found)[0], box, atol=one_px)
    on_picture = placement.map_on_picture(is_white.astype(np.uint8))
    wrong = (on_picture != UNSEEN) & (on_picture != (np.asarray(picture)[:, :, 0] > 128))
    assert wrong.sum() <= 2 * (32 + 24) * one_px


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
