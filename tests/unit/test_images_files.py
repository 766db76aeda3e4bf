"""What a file says of itself: its header, its size, its places, and what becomes of a JPEG."""

from __future__ import annotations

import io
import math
import random
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from PIL import Image, features

from convoy.models import images, jpeg
from convoy.models.errors import ImageError
from convoy.models.headers import Header, read_header
from convoy.models.images import _OPENERS, decoding_bytes, preprocess, sniff
from convoy.models.spec import ImageSpec
from tests.support.pictures import (
    BODIES,
    MARKERS,
    SMALL,
    SPEC,
    Way,
    exif_of,
    is_decoded_as_large,
    other_jpeg,
    outcome,
    picture,
    pillow_jpeg,
    png_claiming,
    sound_files,
    usual_outcome,
)

TURNED, UPRIGHT = exif_of(6), exif_of(1)
COLOURS: dict[str, Any] = {
    "RGB": (1, 2, 3),
    "RGBA": (1, 2, 3, 100),
    "L": 5,
    "LA": (3, 100),
    "P": 4,
    "1": 1,
    "I;16": 777,
    "CMYK": (1, 2, 3, 4),
}
# (format, mode, how it is saved, (has alpha, is deep, may turn))
FILES: list[tuple[str, str, dict[str, Any], tuple[bool, bool, bool]]] = [
    ("JPEG", "RGB", {}, (False, False, False)),
    ("JPEG", "RGB", {"exif": TURNED}, (False, False, True)),
    ("JPEG", "RGB", {"exif": UPRIGHT}, (False, False, False)),
    ("JPEG", "RGB", {"progressive": True, "comment": b"\xff\xc0 is no frame"}, (False, False, False)),
    ("JPEG", "RGB", {"xmp": b'<x tiff:Orientation="6"/>'}, (False, False, True)),
    ("JPEG", "L", {}, (False, False, False)),
    ("JPEG", "CMYK", {}, (False, False, False)),
    ("PNG", "RGB", {}, (False, False, False)),
    ("PNG", "RGBA", {}, (True, False, False)),
    ("PNG", "LA", {}, (True, False, False)),
    ("PNG", "P", {}, (False, False, False)),
    ("PNG", "P", {"transparency": 4}, (True, False, False)),
    ("PNG", "1", {}, (False, False, False)),
    ("PNG", "I;16", {}, (False, True, False)),
    ("PNG", "RGB", {"exif": TURNED}, (False, False, True)),
    ("WebP", "RGB", {}, (False, False, False)),
    ("WebP", "RGB", {"lossless": True}, (False, False, False)),
    ("WebP", "RGBA", {"lossless": True}, (True, False, False)),
    ("WebP", "RGBA", {}, (True, False, False)),
    ("WebP", "RGB", {"exif": TURNED}, (False, False, True)),
    ("GIF", "P", {}, (True, False, True)),
    ("GIF", "L", {"comment": b"," * 600}, (True, False, True)),
    ("BMP", "RGB", {}, (False, False, False)),
    ("BMP", "RGBA", {}, (True, False, False)),
    ("BMP", "L", {}, (False, False, False)),
    ("TIFF", "RGB", {}, (False, False, False)),
    ("TIFF", "RGBA", {"compression": "tiff_lzw"}, (True, False, False)),
    ("TIFF", "I;16", {}, (False, True, False)),
    ("TIFF", "RGB", {"big_endian": True}, (False, False, False)),
    ("TIFF", "RGB", {"exif": TURNED}, (False, False, True)),
]


def saved(form: str, mode: str, options: dict[str, Any], size: tuple[int, int] = (37, 91)) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, COLOURS[mode]).save(out, form, **options)
    return out.getvalue()


def header_of(encoded: bytes) -> Header | None:
    form = sniff(encoded)
    return None if form is None else read_header(form, memoryview(encoded))


@pytest.mark.parametrize(("form", "mode", "options", "traits"), FILES)
def test_size_and_traits_are_those_of_the_file(form: str, mode: str, options: dict[str, Any], traits: object) -> None:
    encoded = saved(form, mode, options)
    header = header_of(encoded)
    assert (header.width, header.height) == (37, 91)
    assert (header.has_alpha, header.is_deep, header.may_turn) == traits
    with Image.open(io.BytesIO(encoded)) as opened:
        assert not header.is_rgb or opened.mode == "RGB"
        assert header.pixel_bytes >= (1 if opened.mode in ("1", "L", "P") else 2 if opened.mode == "I;16" else 4)


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(FILES),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
    st.sampled_from([b"", b"\xff", b"\x00\x00\x00"]),
)
def test_what_can_be_decoded_has_a_header_that_says_enough(
    file: tuple[str, str, dict[str, Any], object], spoilt: list[tuple[float, int]], cut: float, inserted: bytes
) -> None:
    """Whatever is wrong with the bytes: else somebody would be let in with less memory than he takes."""
    form, mode, options, _ = file
    data = bytearray(saved(form, mode, options))
    for place, value in spoilt:
        data[int(place * min(len(data) - 1, 200))] = value
    middle = int(cut * min(len(data), 400))
    encoded = bytes(data[:middle] + inserted + data[middle:]) if inserted else bytes(data)
    try:
        header = header_of(encoded)
    except ImageError:
        return
    try:
        with _OPENERS[sniff(encoded) or ""](io.BytesIO(encoded)) as opened:
            size = opened.size
        preprocess(encoded, SMALL, 100_000)
    except Exception:
        return
    assert all(said >= is_ for said, is_ in zip(sorted(header[:2]), sorted(size), strict=True))  # of TIFF it is turned


def test_a_frame_larger_than_its_screen_counts() -> None:
    screen_of_one = b"GIF89a" + bytes((1, 0, 1, 0, 0x80, 0, 0)) + bytes(6)
    frame = b"!\xf9\x04" + bytes(5) + b"," + bytes((2, 0, 3, 0, 100, 0, 50, 0, 0))
    header = header_of(screen_of_one + frame)
    assert (header.width, header.height) == (102, 53)


@pytest.mark.parametrize(
    "endless",
    [
        b"\xff\xd8" + b"\xff\xfe\x00\x02" * 6000,
        b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0tEXt\0\0\0\0" * 6000,
        b"\xff\xd8\xff\xfe\x00\x02" + bytes(200_000),
        b"GIF89a" + bytes(7) + b"!\xfe\0" * 6000,
        b"GIF89a" + bytes(7) + b"!\xfe" + b"\x01," * 6000,
        b"II*\0\x08\0\0\0" + (6000).to_bytes(2, "little") + bytes(12 * 6000),
        b"\xff\xd8" + b"\xff\xd9" * 6000,
    ],
    ids=["JPEG", "PNG", "JPEG junk", "GIF", "GIF block", "TIFF", "JPEG tables"],
)
def test_what_never_comes_to_its_pixels_is_refused(endless: bytes) -> None:
    with pytest.raises(ImageError, match="parts before its pixels"):
        header_of(endless)


def gif_with_an_empty_extension(image: bytes) -> bytes:
    """What Pillow skips as the extension's second block is an image of one pixel to who takes the first for the end."""
    colours_end = 13 + (3 << (image[10] & 7) + 1 if image[10] & 0x80 else 0)
    looks_like_a_frame = b"," + struct.pack("<HHHH", 0, 0, 1, 1)
    extension = b"!\x01\0" + looks_like_a_frame + bytes(ord(",") + 2 - len(looks_like_a_frame))
    return image[:6] + struct.pack("<HH", 1, 1) + image[10:colours_end] + extension + image[colours_end:]


def grey_tiff(size: tuple[int, int], *, dimension_bytes: int = 4, tile: tuple[int, int] | None = None) -> bytes:
    """Of one strip, or of one tile of that size."""
    width, height = size
    pixels = zlib.compress(bytes(math.prod(tile or size)), 9)
    place, count = (324, 325) if tile else (273, 279)
    entries = [(256, width), (257, height), (258, 8), (259, 8), (262, 1), (place, 0), (277, 1), (count, len(pixels))]
    entries += [(322, tile[0]), (323, tile[1])] if tile else [(278, height)]
    values_at = 8 + 2 + 12 * len(entries) + 4
    directory, values = struct.pack("<H", len(entries)), b""
    for tag, value in sorted(entries):
        if tag in (256, 257) and dimension_bytes == 8:
            directory += struct.pack("<HHII", tag, 16, 1, values_at + len(values))
            values += struct.pack("<Q", value)
        else:
            directory += struct.pack("<HHII", tag, 4, 1, values_at + 16 if tag == place else value)
    return b"II*\0" + struct.pack("<I", 8) + directory + bytes(4) + values.ljust(16, b"\0") + pixels


LARGE = (1000, 2000)
TABLES_ALONE = b"\xff\xd8\xff\xd9"
ODD: dict[str, bytes] = {
    "JPEG behind tables": TABLES_ALONE + saved("JPEG", "RGB", {}, LARGE),
    "JPEG in scans behind tables": TABLES_ALONE + saved("JPEG", "RGB", {"progressive": True}, LARGE),
    "GIF behind an extension": gif_with_an_empty_extension(saved("GIF", "P", {}, LARGE)),
    "TIFF with long dimensions": grey_tiff(LARGE, dimension_bytes=8),
}


@pytest.mark.parametrize("encoded", ODD.values(), ids=ODD)
def test_odd_files_are_as_large_as_pillow_finds_them(encoded: bytes) -> None:
    header = header_of(encoded)
    assert (header.width, header.height) == LARGE
    preprocess(encoded, SMALL)
    with pytest.raises(ImageError, match="1000x2000"):
        preprocess(encoded, SMALL, 10_000)


def test_scans_behind_tables_are_counted() -> None:
    """Each goes over the whole image."""
    encoded = saved("JPEG", "RGB", {"progressive": True}, LARGE)
    last = encoded[encoded.rindex(b"\xff\xda") : -2]
    with pytest.raises(ImageError, match="scans"):
        preprocess(TABLES_ALONE + encoded[:-2] + last * 150 + b"\xff\xd9", SMALL)


def test_a_size_that_its_header_does_not_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is had by the header: whoever finds a way past it has none."""
    encoded = saved("GIF", "P", {}, LARGE)
    for said in (None, Header(2000, 999, 1), Header(1999, 1000, 1)):
        monkeypatch.setattr("convoy.models.images.read_header", lambda *_, said=said: said)
        with pytest.raises(ImageError, match="does not match its size of 1000x2000"):
            preprocess(encoded, SMALL)
    monkeypatch.setattr("convoy.models.images.read_header", lambda *_: Header(2000, 1000, 1))  # it may be turned
    preprocess(encoded, SMALL)


@pytest.mark.parametrize(("kind", "value"), [(2, b"255\0"), (1, b"\1\4\0\0"), (7, b"\xff\xff\xff\xff"), (2, b"ab\0\0")])
def test_what_other_programs_add_to_a_tiff_is_no_place(kind: int, value: bytes) -> None:
    """Such values stand where those of numbers say where they are."""
    plain = grey_tiff(LARGE)
    (entries,) = struct.unpack_from("<H", plain, 8)
    end = 10 + 12 * entries
    moved = bytearray(plain[:end] + struct.pack("<HHI", 65000, kind, 4) + value + plain[end:])
    struct.pack_into("<H", moved, 8, entries + 1)
    for at in range(10, end, 12):
        if struct.unpack_from("<H", moved, at) == (273,):  # where the strip is
            struct.pack_into("<I", moved, at + 8, struct.unpack_from("<I", moved, at + 8)[0] + 12)
    header = header_of(bytes(moved))
    assert header[:2] == LARGE
    preprocess(bytes(moved), SMALL)


def test_memory_follows_from_the_header() -> None:
    def need(encoded: bytes) -> int:
        header = header_of(encoded)
        assert header is not None
        return decoding_bytes(header, SMALL)

    assert need(grey_tiff((160, 160), tile=(4000, 4000))) > 8 * 4000 * 4000
    assert need(grey_tiff((160, 160), tile=(16, 16))) == need(grey_tiff((160, 160)))
    pixels = 3000 * 4000
    photo = saved("JPEG", "RGB", {}, (3000, 4000))
    assert 4 * pixels < need(photo) < 5 * pixels
    assert 8 * pixels < need(saved("JPEG", "RGB", {"exif": TURNED}, (3000, 4000))) < 9 * pixels
    assert need(png_claiming(30_000, 30_000)) > 3_600_000_000


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
    xmp = f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()
    for options in ({"exif": exif_of(orientation)}, {"xmp": xmp}):
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
    encoded = pillow_jpeg(picture(1000, 700, seed=8), exif=exif_of(orientation))
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
