"""The rules of convoy.models.images, one by one, on files that Pillow wrote and on bytes that nobody would write."""

from __future__ import annotations

import contextlib
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from convoy.models.errors import ImageError
from convoy.models.images import (
    DEFAULT_MAX_PIXELS,
    FORMATS,
    MAX_JPEG_SCANS,
    MAX_JPEG_SEGMENTS,
    TINY_BYTES,
    decode_image_into,
    is_tiny,
    preprocess,
    sniff,
)
from convoy.models.spec import ImageSpec
from tests.support.pictures import exif_of
from tests.support.pictures import saved as encoded

EXACT = ImageSpec(
    height=8,
    width=8,
    channels=3,
    resize_mode="exact",
    resize_px=8,
    interpolation="bilinear",
    antialias=True,
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
    front="uint8_nhwc",
)
GREY = replace(EXACT, channels=1, mean=(0.0,), std=(1.0,))
CROPPED = replace(EXACT, resize_mode="shorter_side", resize_px=10)
# convoy.models.images silences Pillow's warnings on odd metadata, but pytest puts its own filters back around a test.
AS_IN_PRODUCTION = pytest.mark.filterwarnings(r"ignore::UserWarning:PIL\.")
PILLOW_NAMES = {"JPEG": "JPEG", "PNG": "PNG", "WebP": "WEBP", "GIF": "GIF", "BMP": "BMP", "TIFF": "TIFF"}


def is_tiny_file(picture: memoryview, image: ImageSpec) -> bool:
    return is_tiny(sniff(picture) or "", picture, image)


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    shape = (height, width) if bands == 1 else (height, width, bands)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8), mode or None)


def plain(width: int, height: int, colour: Any, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height), colour)


# --- format


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_told_by_its_bytes_and_decoded(name: str) -> None:
    picture = encoded(plain(20, 10, (200, 100, 50)), PILLOW_NAMES[name])
    assert sniff(picture) == name
    assert np.abs(preprocess(picture, EXACT).astype(int) - (200, 100, 50)).max() <= 3


@pytest.mark.parametrize("body", [b"", b"hello", b"%PDF-1.7", b"\x00" * 100, b"RIFF\x00\x00\x00\x00WAVE", b"<svg/>"])
def test_what_is_no_accepted_image_is_refused_with_the_accepted_formats(body: bytes) -> None:
    assert sniff(body) is None
    with pytest.raises(ImageError, match=r"send .*JPEG, PNG, WebP, GIF, BMP or TIFF"):
        preprocess(body, EXACT)


# --- size


def png_that_claims(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 100)
    chunks = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data, b"IEND")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def gif_that_claims_one_pixel() -> bytes:
    picture = bytearray(encoded(plain(20, 10, "red"), "GIF"))
    picture[6:10] = struct.pack("<HH", 1, 1)
    return bytes(picture)


STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\x00", b"RIFF....WEBP")
TOO_DIFFERENT = r"1000.*at most 100 times the shorter"


@pytest.mark.parametrize(
    ("picture", "image", "max_pixels", "words"),
    [
        *((start, EXACT, DEFAULT_MAX_PIXELS, "broken or cut off") for start in STARTS),
        (
            png_that_claims(30000, 30000),
            EXACT,
            DEFAULT_MAX_PIXELS,
            "30000x30000 = 900000000 pixels, more than the 64000000 allowed",
        ),
        (gif_that_claims_one_pixel(), EXACT, 100, "20x10 = 200 pixels"),
        *(
            (encoded(plain(*size, "red")), image, DEFAULT_MAX_PIXELS, TOO_DIFFERENT)
            for size in ((1000, 1), (1, 1000))
            for image in (EXACT, CROPPED)
        ),
    ],
)
def test_what_is_no_sound_picture_of_a_fitting_size_is_refused(
    picture: bytes, image: ImageSpec, max_pixels: int, words: str
) -> None:
    with pytest.raises(ImageError, match=words):
        preprocess(picture, image, max_pixels=max_pixels)


@pytest.mark.parametrize("name", FORMATS)
def test_the_limit_holds_for_every_format_and_is_inclusive(name: str) -> None:
    picture = encoded(plain(20, 10, "red"), PILLOW_NAMES[name])
    preprocess(picture, EXACT, max_pixels=200)
    with pytest.raises(ImageError, match="20x10 = 200 pixels, more than the 199 allowed"):
        preprocess(picture, EXACT, max_pixels=199)


def test_pillows_own_limit_stands_in_the_way_of_nothing_but_what_its_header_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 65)
    for name in ("JPEG", "PNG", "BMP", "GIF"):
        preprocess(encoded(plain(20, 10, "red"), name), EXACT)
    with pytest.raises(ImageError, match="too many pixels"):
        preprocess(gif_that_claims_one_pixel(), EXACT)


def test_a_jpeg_of_countless_scans_is_refused_before_it_is_decoded() -> None:
    picture = encoded(noise(32, 32), "JPEG", progressive=True)
    last = picture.rindex(b"\xff\xda")
    scan = picture[last:-2]
    with pytest.raises(ImageError, match=f"over {MAX_JPEG_SCANS} scans"):
        preprocess(picture[:last] + scan * (MAX_JPEG_SCANS + 1) + b"\xff\xd9", EXACT)
    with pytest.raises(ImageError, match=f"{MAX_JPEG_SEGMENTS} segments"):
        preprocess(picture[:2] + b"\xff\xfe\x00\x02" * MAX_JPEG_SEGMENTS + picture[2:], EXACT)


def test_what_a_phone_appends_to_a_jpeg_does_not_count() -> None:
    picture = encoded(noise(32, 32), "JPEG", progressive=True, icc_profile=b"\xff\xda" * 500)
    video = b"\xff\xda" * 1000
    assert np.array_equal(preprocess(picture + video, EXACT), preprocess(picture, EXACT))


# --- cut off


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_off_file_is_refused_or_has_all_its_pixels(name: str) -> None:
    picture = encoded(noise(40, 30), PILLOW_NAMES[name])
    whole = preprocess(picture, EXACT)
    refused = 0
    for length in range(1, len(picture), max(1, len(picture) // 60)):
        try:
            assert np.array_equal(preprocess(picture[:length], EXACT), whole)
        except ImageError:
            refused += 1
    assert refused > 40


# --- EXIF


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WebP", "TIFF"])
def test_orientation_is_applied_exactly_once(name: str, orientation: int) -> None:
    upright = np.zeros((8, 8, 3), np.uint8)
    upright[:4, :4] = 250  # one bright corner tells all eight apart together with the second
    upright[4:, :4] = 120
    turned = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = Image.fromarray(upright)
    if orientation in turned:
        stored = stored.transpose(turned[orientation])
    options = {"quality": 100} if name in ("JPEG", "WebP") else {}
    got = preprocess(encoded(stored, PILLOW_NAMES[name], exif=exif_of(orientation), **options), EXACT)
    assert np.abs(got.astype(int) - upright).max() <= 12


@AS_IN_PRODUCTION
def test_a_broken_exif_block_counts_as_absent() -> None:
    picture = noise(16, 16)
    whole = preprocess(encoded(picture, "PNG"), EXACT)
    for exif in (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        assert np.array_equal(preprocess(encoded(picture, "PNG", exif=exif), EXACT), whole)
        preprocess(encoded(picture, "JPEG", exif=exif), EXACT)


# --- colour


def test_cmyk_becomes_rgb_also_when_adobe_inverts_it() -> None:
    red = plain(16, 16, (0, 255, 255, 0), "CMYK")
    picture = encoded(red, "JPEG", quality=100)  # Pillow writes CMYK as Adobe does: inverted, with its marker
    assert b"Adobe" in picture
    assert np.abs(preprocess(picture, EXACT).astype(int) - (255, 0, 0)).max() <= 4
    assert preprocess(encoded(red, "TIFF"), EXACT)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (encoded(plain(8, 8, (0, 0, 0, 0), "RGBA")), 255),
        (encoded(plain(8, 8, (0, 0, 0, 255), "RGBA")), 0),
        (encoded(plain(8, 8, (0, 0, 0, 51), "RGBA")), 204),
        (encoded(plain(8, 8, (0, 51), "LA")), 204),
        (encoded(plain(8, 8, (100, 255), "LA")), 100),
        (encoded(plain(8, 8, 0, "P"), transparency=b"\x33"), 204),
        (encoded(plain(8, 8, (9, 9, 9)), transparency=(9, 9, 9)), 255),
        (encoded(plain(8, 8, 9, "L"), transparency=9), 255),
        (encoded(plain(8, 8, 1, "1")), 255),
    ],
)
def test_what_is_seen_through_is_composited_onto_white(picture: bytes, expected: int) -> None:
    assert (preprocess(picture, EXACT) == expected).all()
    assert (preprocess(picture, GREY) == expected).all()


def test_a_transparent_palette_entry_is_white_and_others_keep_their_colour() -> None:
    picture = Image.new("P", (8, 8), 0)
    picture.putpalette([10, 20, 30, 200, 100, 50])
    picture.paste(1, (4, 0, 8, 8))
    for name in ("PNG", "GIF"):
        got = preprocess(encoded(picture, name, transparency=0), EXACT)
        assert got[0, 0].tolist() == [255, 255, 255]
        assert got[0, 7].tolist() == [200, 100, 50]
    assert preprocess(encoded(picture, "PNG"), EXACT)[0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("name", ["PNG", "TIFF"])
@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
def test_sixteen_bit_grey_is_scaled_not_clipped(name: str, dtype: str) -> None:
    values = np.linspace(0, 65535, 64).astype(dtype).reshape(8, 8)
    got = preprocess(encoded(Image.fromarray(values), name), EXACT)
    assert np.array_equal(got[..., 0], values >> 8)
    assert np.array_equal(got[..., 0], got[..., 2])


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(ImageError, match="floating-point"):
        preprocess(encoded(plain(8, 8, 0.5, "F"), "TIFF"), EXACT)


def test_grey_is_replicated_and_colour_is_weighed_for_a_grey_model() -> None:
    assert preprocess(encoded(plain(8, 8, 77, "L")), EXACT)[0, 0].tolist() == [77, 77, 77]
    assert preprocess(encoded(plain(8, 8, (255, 0, 0))), GREY)[0, 0].tolist() == [76]  # 0.299 * 255


# --- frames


@pytest.mark.parametrize("name", ["GIF", "WebP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation_counts(name: str) -> None:
    frames = [plain(8, 8, colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    options: dict[str, Any] = {"lossless": True} if name == "WebP" else {}
    picture = encoded(frames[0], PILLOW_NAMES[name], save_all=True, append_images=frames[1:], **options)
    assert preprocess(picture, EXACT)[0, 0].tolist() == [250, 0, 0]


# --- resizing and values


def test_the_crop_is_the_centre_and_halves_round_to_even() -> None:
    picture = noise(13, 10)
    # (13 - 8) / 2 = 2.5 and (10 - 8) / 2 = 1: left 2, as torchvision's CenterCrop has it.
    assert np.array_equal(preprocess(encoded(picture), CROPPED), np.asarray(picture)[1:9, 2:10])


def test_antialiasing_averages_and_sampling_does_not() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, 3::8] = stripes[:, 4::8] = 255  # only columns that plain sampling at 8 to 1 hits
    picture = encoded(Image.fromarray(stripes))
    assert preprocess(picture, EXACT).max() < 100
    assert (preprocess(picture, replace(EXACT, antialias=False)) == 255).all()


def test_the_float_front_is_normalised_and_channels_first() -> None:
    picture = noise(8, 8)
    image = replace(EXACT, front="float32_nchw", mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    expected = (np.asarray(picture).transpose(2, 0, 1) / 255 - np.c_[[0.1, 0.2, 0.3]][..., None]) / np.c_[
        [0.5, 0.6, 0.7]
    ][..., None]
    got = preprocess(encoded(picture), image)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_the_sample_is_written_into_the_view_wherever_it_lies() -> None:
    picture = encoded(noise(8, 8))
    for image in (EXACT, replace(EXACT, front="float32_nchw")):
        sample = preprocess(picture, image).tobytes()
        memory = bytearray(b"\xaa" * (len(sample) + 5))
        decode_image_into(memoryview(picture), image, memoryview(memory)[1:-4])
        assert memory == b"\xaa" + sample + b"\xaa" * 4


# --- any bytes at all

SEEDS = [encoded(noise(12, 9, seed=1), PILLOW_NAMES[name]) for name in FORMATS] + [
    encoded(noise(12, 9).convert("P"), "PNG"),
    encoded(noise(12, 9).convert("P"), "GIF", save_all=True, append_images=[noise(12, 9, seed=2).convert("P")]),
    encoded(noise(12, 9), "TIFF", compression="tiff_lzw"),
    encoded(noise(12, 9, "L"), "JPEG", progressive=True),
]


def gives_a_sample_or_an_image_error(body: bytes, image: ImageSpec) -> None:
    with contextlib.suppress(ImageError):
        sample = preprocess(body, image, max_pixels=100_000)
        assert sample.shape == image.tensor_shape


@given(st.binary(max_size=200), st.sampled_from([b"", *(seed[:16] for seed in SEEDS)]))
def test_arbitrary_bytes_give_a_sample_or_an_image_error(body: bytes, start: bytes) -> None:
    gives_a_sample_or_an_image_error(start + body, EXACT)


@pytest.mark.parametrize("front", ["uint8_nhwc", "float32_nchw"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_bgr_is_rgb_with_its_channels_reversed(front: Any, kind: str) -> None:
    """`mean` and `std` are in the order of the network."""
    body = encoded(noise(300, 200, seed=1), kind)
    rgb = replace(CROPPED, front=front, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    bgr = replace(rgb, channel_order="bgr", mean=rgb.mean[::-1], std=rgb.std[::-1])
    axis = 2 if front == "uint8_nhwc" else 0
    assert np.array_equal(preprocess(body, bgr), np.flip(preprocess(body, rgb), axis))
    assert np.array_equal(preprocess(body, replace(GREY, channel_order="bgr")), preprocess(body, GREY))


@AS_IN_PRODUCTION
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8),
    st.sampled_from([EXACT, CROPPED, GREY, replace(EXACT, antialias=False)]),
)
def test_damaged_files_give_a_sample_or_an_image_error(
    seed: bytes, changes: list[tuple[float, int]], image: ImageSpec
) -> None:
    damaged = bytearray(seed)
    for place, value in changes:
        damaged[int(place * len(damaged))] = value
    gives_a_sample_or_an_image_error(bytes(damaged), image)


# --- against torchvision


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_pil_pipeline_of_torchvision_is_matched_bit_for_bit(interpolation: Any) -> None:
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode

    rng = np.random.default_rng(7)
    for _ in range(40):
        width, height, crop_h, crop_w = (int(n) for n in rng.integers((5, 5, 3, 3), (300, 300, 60, 60)))
        resize_px = int(rng.integers(max(crop_h, crop_w), 90))
        picture = noise(width, height, seed=width)
        image = replace(
            EXACT,
            height=crop_h,
            width=crop_w,
            resize_mode="shorter_side",
            resize_px=resize_px,
            interpolation=interpolation,
        )
        mode = InterpolationMode(interpolation)
        cropped = transforms.Compose([transforms.Resize(resize_px, mode), transforms.CenterCrop((crop_h, crop_w))])
        assert np.array_equal(preprocess(encoded(picture), image), np.asarray(cropped(picture)))
        exact = transforms.Resize((crop_h, crop_w), mode)
        assert np.array_equal(
            preprocess(encoded(picture), replace(image, resize_mode="exact")), np.asarray(exact(picture))
        )


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_tensor_pipeline_of_torchvision_without_antialias_is_matched(interpolation: Any) -> None:
    import torch
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode

    rng = np.random.default_rng(8)
    for _ in range(40):
        width, height, crop = (int(n) for n in rng.integers((5, 5, 3), (200, 200, 60)))
        picture = noise(width, height, seed=width)
        image = replace(
            EXACT,
            height=crop,
            width=crop,
            resize_mode="shorter_side",
            resize_px=crop + 3,
            interpolation=interpolation,
            antialias=False,
        )
        pipeline = transforms.Compose(
            [
                transforms.Resize(crop + 3, InterpolationMode(interpolation), antialias=False),
                transforms.CenterCrop(crop),
            ]
        )
        expected = pipeline(torch.from_numpy(np.array(picture)).permute(2, 0, 1)).permute(1, 2, 0).numpy()
        difference = np.abs(preprocess(encoded(picture), image).astype(int) - expected)
        # torch's uint8 kernels work in fixed point: a value near the edge between two may round the other way.
        assert difference.max() <= 1
        assert (difference > 0).mean() < 0.05


# --- what may be decoded where others wait


def with_text(nbytes: int) -> bytes:
    """A small PNG with a text that is a thousand times as long as its bytes."""
    text = PngImagePlugin.PngInfo()
    text.add_text("a", "a" * nbytes, zip=True)
    return encoded(plain(8, 8, "red"), pnginfo=text)


def with_segments(segment: bytes, times: int) -> bytes:
    whole = encoded(plain(8, 8, "red"), "JPEG")
    return whole[:2] + segment * times + whole[2:]


def with_chunks(times: int) -> bytes:
    whole = encoded(plain(8, 8, "red"))
    empty = b"\x00\x00\x00\x00prIv" + zlib.crc32(b"prIv").to_bytes(4)
    return whole[:33] + empty * times + whole[33:]


@pytest.mark.parametrize(
    ("picture", "is_expected_tiny"),
    [
        pytest.param(encoded(noise(64, 64)), True, id="png"),
        pytest.param(encoded(noise(32, 32, "L")), True, id="grey"),
        pytest.param(encoded(noise(8, 8, "RGBA")), True, id="alpha"),
        pytest.param(encoded(noise(32, 32).convert("P")), True, id="palette"),
        pytest.param(encoded(noise(65, 64)), False, id="many-pixels"),
        pytest.param(encoded(noise(64, 64)) + bytes(TINY_BYTES), False, id="many-bytes"),
        pytest.param(with_text(500_000), False, id="a-text"),
        pytest.param(encoded(plain(8, 8, "red"), icc_profile=bytes(3000)), False, id="a-profile"),
        pytest.param(encoded(noise(64, 64))[:-20], True, id="cut-off"),
        pytest.param(encoded(noise(32, 32), "JPEG"), True, id="jpeg"),
        pytest.param(encoded(noise(32, 32), "JPEG", progressive=True), True, id="progressive"),
        pytest.param(encoded(plain(65, 64, "red"), "JPEG"), False, id="jpeg-with-many-pixels"),
        pytest.param(encoded(plain(8, 8, "red"), "JPEG", exif=Image.Exif().tobytes()), False, id="exif"),
        pytest.param(with_segments(b"\xff\xe1\x00\x02", 3900), False, id="many-segments"),
        pytest.param(with_chunks(1000), False, id="many-chunks"),
        pytest.param(encoded(noise(8, 8), "GIF"), False, id="gif"),
        pytest.param(b"", False, id="nothing"),
    ],
)
def test_only_small_images_without_long_texts_are_tiny(picture: bytes, is_expected_tiny: bool) -> None:
    assert is_tiny_file(memoryview(picture), EXACT) == is_expected_tiny
    assert not is_tiny_file(memoryview(encoded(plain(6, 600, "red"), "JPEG")), CROPPED), "long before it is cropped"
    assert not is_tiny_file(memoryview(picture), replace(EXACT, height=224, width=224))


@given(st.binary(max_size=400), st.integers(0, 400))
def test_any_bytes_are_tiny_or_not(noise_bytes: bytes, at: int) -> None:
    for whole in (encoded(plain(8, 8, "red")), encoded(plain(8, 8, "red"), "JPEG")):
        spoilt = whole[:at] + noise_bytes + whole[at + len(noise_bytes) :]
        assert is_tiny_file(memoryview(spoilt), EXACT) in (True, False)
