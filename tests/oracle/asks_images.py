"""Asks that are images: every file, format, orientation and colour that the suite knows, whole, broken and in forms."""

from __future__ import annotations

from PIL import Image

from tests.e2e import test_bad_input as bad
from tests.oracle.asks_routes import DIGITS, table
from tests.oracle.book import Book
from tests.support.pictures import jpeg, png_claiming
from tests.support.stores import DATA, digit
from tests.unit import test_images as known

_ORIENTATION_TAG = 0x0112
_MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "F", "YCbCr")
_SIZES = ((1, 1), (7, 300), (300, 7), (33, 32), (640, 480), (1000, 1), (1, 1000), (600, 500))


def images() -> Book:
    book = Book()
    for path in sorted(DATA.glob("*.png")):
        book.post(DIGITS, path.read_bytes(), path.name)
        book.post(f"{DIGITS}/1?top_k=10", path.read_bytes(), path.name)
    for form, name in known.PILLOW_NAMES.items():
        for width, height in _SIZES:
            book.post(DIGITS, known.encoded(known.noise(width, height), name), f"{form} {width}x{height}")
        for mode in _MODES:
            if data := _written(mode, name):
                book.post(DIGITS, data, f"{form} {mode}")
        whole = known.encoded(known.noise(40, 30), name)
        for share in (1, 2, 5, 9):
            book.post(DIGITS, whole[: len(whole) * share // 10], f"{form} cut off at {share}0 %")
        for place in range(0, len(whole), max(1, len(whole) // 8)):
            flipped = bytearray(whole)
            flipped[place] ^= 0xFF
            book.post(DIGITS, bytes(flipped), f"{form} a byte flipped at {place}")
    for form in ("JPEG", "PNG", "WebP", "TIFF"):
        for orientation in range(10):
            exif = Image.Exif()
            exif[_ORIENTATION_TAG] = orientation
            data = known.encoded(known.noise(20, 12), known.PILLOW_NAMES[form], exif=exif)
            book.post(DIGITS, data, f"{form} orientation {orientation}")
    for number, exif_bytes in enumerate((b"Exif\0\0garbage", b"", b"Exif\0\0II*\0\xff\xff\xff\xff")):
        book.post(DIGITS, known.encoded(known.noise(16, 16), "JPEG", exif=exif_bytes), f"broken EXIF {number}")
    for number, seed in enumerate(known.SEEDS):
        book.post(DIGITS, seed, f"seed {number}")
    for number, (body, _) in enumerate(table(bad.test_bytes_that_are_no_image_are_a_400)):
        book.post(DIGITS, body, f"no image {number}")
    progressive = known.encoded(known.noise(32, 32), "JPEG", progressive=True)
    last = progressive.rindex(b"\xff\xda")
    endless = progressive[:last] + progressive[last:-2] * 101 + b"\xff\xd9"
    for what, data in (
        ("progressive", progressive),
        ("of countless scans", endless),
        ("of countless segments", progressive[:2] + b"\xff\xfe\x00\x02" * 5000 + progressive[2:]),
        ("with something appended", progressive + b"\xff\xda" * 1000),
        ("a bomb by its header", png_claiming(50_000, 50_000)),
        ("a bomb in a GIF's frame", known.gif_that_claims_one_pixel()),
        ("cut off in its header", png_claiming(3000, 3000)),
        ("a format that is not accepted", known.encoded(known.noise(8, 8), "PPM")),
        (
            "animated",
            known.encoded(known.noise(9, 9).convert("P"), "GIF", save_all=True, append_images=[known.noise(9, 9)]),
        ),
    ):
        book.post(DIGITS, data, what)
    for kind in (
        "application/x-www-form-urlencoded",
        "text/plain",
        "application/json",
        bad.FORM["Content-Type"],
        "\xe9;=",
    ):
        book.post(DIGITS, digit("nine"), "by another content type", {"Content-Type": kind})
    return book.extend(_forms())


def _forms() -> Book:
    book = Book()
    one, two = (bad.FILE, digit("one")), (bad.FILE, digit("two"))
    for what, parts in (
        ("one", [one]),
        ("two", [one, two]),
        ("a field before", [('name="note"', b"a field that is not a file"), one]),
        ("some bad", [one, (bad.FILE, b"no image"), two, (bad.FILE, b""), (bad.FILE, jpeg()[:3000])]),
        ("all bad", [(bad.FILE, b"no image"), (bad.FILE, b"")]),
        ("boundaries inside", [(bad.FILE, digit("four") + b"\r\n--frontie" * 9000), one]),
        ("forty", [one] * 40),
    ):
        book.post(DIGITS, bad.form(*parts), f"a form of {what}", bad.FORM)
    return book


def _written(mode: str, name: str) -> bytes | None:
    """None where the format has no such mode."""
    picture = known.noise(24, 18).convert("RGB" if mode in ("I;16", "F") else mode)
    if mode in ("I;16", "F"):
        picture = known.noise(24, 18).convert("I" if mode == "I;16" else "F")
        picture = picture.convert("I;16") if mode == "I;16" else picture
    try:
        return known.encoded(picture, name)
    except (OSError, KeyError, ValueError):
        return None
