"""Requests of images: every format, orientation and colour that the suite knows, whole, broken and in forms."""

from __future__ import annotations

from tests.e2e import test_bad_input as bad
from tests.oracle.asks_routes import DIGITS
from tests.oracle.session import Ask, post
from tests.support.pictures import exif_of, jpeg, png_claiming
from tests.support.stores import DATA, digit
from tests.unit import test_images as known

_MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "F", "YCbCr")
_SIZES = ((1, 1), (7, 300), (300, 7), (33, 32), (640, 480))


def images() -> list[Ask]:
    one, two = (bad.FILE, digit("one")), (bad.FILE, digit("two"))
    forms = {
        "one": [one],
        "a field before": [('name="note"', b"a field that is not a file"), one],
        "some bad": [one, (bad.FILE, b"no image"), two, (bad.FILE, b""), (bad.FILE, jpeg()[:3000])],
        "all bad": [(bad.FILE, b"no image"), (bad.FILE, b"")],
        "boundaries inside": [(bad.FILE, digit("four") + b"\r\n--frontie" * 9000), one],
        "forty": [one] * 40,
    }
    return [
        *(post(f"{DIGITS}/1?top_k=10", path.read_bytes(), path.name) for path in sorted(DATA.glob("*.png"))),
        *(one for form, name in known.PILLOW_NAMES.items() for one in _of_format(form, name)),
        *(post(DIGITS, seed, "seed") for seed in known.SEEDS),
        post(DIGITS, known.gif_that_claims_one_pixel(), "a bomb in a GIF's frame"),
        post(DIGITS, png_claiming(3000, 3000), "cut off in its header"),
        post(DIGITS, known.encoded(known.noise(8, 8), "PPM"), "a format that is not accepted"),
        *(post(DIGITS, bad.form(*parts), f"a form of {what}", bad.FORM) for what, parts in forms.items()),
    ]


def _of_format(form: str, name: str) -> list[Ask]:
    """Of every size, colour and orientation, cut off, and with a byte flipped."""
    asks = [post(DIGITS, known.encoded(known.noise(*size), name), f"{form} {size[0]}x{size[1]}") for size in _SIZES]
    asks += [post(DIGITS, data, f"{form} {mode}") for mode in _MODES if (data := _written(mode, name))]
    whole = known.encoded(known.noise(40, 30), name)
    asks += [post(DIGITS, whole[: len(whole) * share // 10], f"{form} cut off at {share}0 %") for share in (1, 2, 5, 9)]
    for place in range(0, len(whole), len(whole) // 8):
        flipped = bytes([*whole[:place], whole[place] ^ 0xFF, *whole[place + 1 :]])
        asks.append(post(DIGITS, flipped, f"{form} a byte flipped at {place}"))
    for orientation in range(10):
        turned = known.encoded(known.noise(20, 12), name, exif=exif_of(orientation))
        asks.append(post(DIGITS, turned, f"{form} orientation {orientation}"))
    return asks


def _written(mode: str, name: str) -> bytes | None:
    """None where the format has no such mode."""
    picture = known.noise(24, 18)
    if mode == "I;16":
        picture = picture.convert("I")  # Pillow does not convert to 16 bits in one step
    try:
        return known.encoded(picture.convert(mode), name)
    except (OSError, KeyError, ValueError):
        return None
