"""What headers say, beside what Pillow finds in the same bytes."""

from __future__ import annotations

import io
import math
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from convoy.models.errors import ImageError
from convoy.models.headers import Header, read_header
from convoy.models.images import _OPENERS, decoding_bytes, preprocess, sniff
from tests.support.pictures import SMALL, png_claiming

TURNED = Image.Exif()
TURNED[274] = 6
UPRIGHT = Image.Exif()
UPRIGHT[274] = 1
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
        with pytest.raises(ImageError, match="does not say that it is 1000x2000"):
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
