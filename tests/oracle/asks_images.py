"""Requests of images: every format, orientation and colour that the suite knows, whole, broken and in forms."""

from __future__ import annotations

from PIL import Image

from tests.e2e import test_bad_input as bad
from tests.oracle.asks_routes import DIGITS
from tests.oracle.session import Session
from tests.support.pictures import jpeg, png_claiming
from tests.support.stores import DATA, digit
from tests.unit import test_images as known

_MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "F", "YCbCr")
_SIZES = ((1, 1), (7, 300), (300, 7), (33, 32), (640, 480))


def images(session: Session) -> None:
    for path in sorted(DATA.glob("*.png")):
        session.post(f"{DIGITS}/1?top_k=10", path.read_bytes(), path.name)
    for form, name in known.PILLOW_NAMES.items():
        for width, height in _SIZES:
            session.post(DIGITS, known.encoded(known.noise(width, height), name), f"{form} {width}x{height}")
        for mode in _MODES:
            if data := _written(mode, name):
                session.post(DIGITS, data, f"{form} {mode}")
        whole = known.encoded(known.noise(40, 30), name)
        for share in (1, 2, 5, 9):
            session.post(DIGITS, whole[: len(whole) * share // 10], f"{form} cut off at {share}0 %")
        for place in range(0, len(whole), len(whole) // 8):
            flipped = bytes([*whole[:place], whole[place] ^ 0xFF, *whole[place + 1 :]])
            session.post(DIGITS, flipped, f"{form} a byte flipped at {place}")
        for orientation in range(10):
            exif = Image.Exif()
            exif[0x0112] = orientation
            session.post(
                DIGITS, known.encoded(known.noise(20, 12), name, exif=exif), f"{form} orientation {orientation}"
            )
    for seed in known.SEEDS:
        session.post(DIGITS, seed, "seed")
    session.post(DIGITS, known.gif_that_claims_one_pixel(), "a bomb in a GIF's frame")
    session.post(DIGITS, png_claiming(3000, 3000), "cut off in its header")
    session.post(DIGITS, known.encoded(known.noise(8, 8), "PPM"), "a format that is not accepted")
    one, two = (bad.FILE, digit("one")), (bad.FILE, digit("two"))
    for what, parts in {
        "one": [one],
        "a field before": [('name="note"', b"a field that is not a file"), one],
        "some bad": [one, (bad.FILE, b"no image"), two, (bad.FILE, b""), (bad.FILE, jpeg()[:3000])],
        "all bad": [(bad.FILE, b"no image"), (bad.FILE, b"")],
        "boundaries inside": [(bad.FILE, digit("four") + b"\r\n--frontie" * 9000), one],
        "forty": [one] * 40,
    }.items():
        session.post(DIGITS, bad.form(*parts), f"a form of {what}", bad.FORM)


def _written(mode: str, name: str) -> bytes | None:
    """None where the format has no such mode."""
    picture = known.noise(24, 18)
    if mode == "I;16":
        picture = picture.convert("I")  # Pillow does not convert to 16 bits in one step
    try:
        return known.encoded(picture.convert(mode), name)
    except (OSError, KeyError, ValueError):
        return None
