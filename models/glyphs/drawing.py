"""Draw characters from a seed: random face, size, place, slant, blur, noise and background.

After FreeType has drawn the outline, everything is computed with integers from the generator's raw bits, so a seed
gives the same bytes on every processor and with every NumPy. Image `n` of a character depends only on the seed, the
stream, the character, the faces and `n`: a smaller set is a prefix of a larger one.

Source of the method: synthetic text for training, Jaderberg et al., Synthetic Data and Artificial Neural Networks for
Natural Scene Text Recognition, 2014, here for single characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from convoy.models.glyphs.faces import Face

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# Another version draws other pictures; pictures kept from an earlier one are not used.
DRAWING_VERSION = 1

Ints = npt.NDArray[np.int32]

# Of 32 pixels; other sizes are in proportion.
_UNIT_PX = 32
_EM_PX = (20, 31)
_SHIFT_PX = 3
_TILT_DEGREES = 8
# Horizontal shift per vertical pixel.
_SLANT_PERCENT = 20
_MOST_BLURS = 3
_LEAST_CONTRAST = 72
_TINT = 32
_MOST_RELIEF = 48
_MOST_NOISE = 20
# The background is uneven: heights at this many points per side, interpolated in between.
_RELIEF_POINTS = 5
# Denominators of integer fractions.
_FRACTION_BITS = 12
_ONE = 1 << _FRACTION_BITS
# Outline pixels per picture pixel and side, and sampled points per pixel and side.
_OUTLINE_SCALE = 3
_POINTS = 2
_PARAMETERS = 17
_NOISE_BYTES = 4
# The mean and deviation of the sum of this many uniform bytes.
_NOISE_MEAN, _NOISE_DEVIATION = 510, 148
# More would not fit into a processor's cache.
_IMAGES_AT_ONCE = 128


def draw(
    character: str, faces: Sequence[Face], count: int, seed: int, stream: int, px: int, *, is_grey: bool
) -> npt.NDArray[np.uint8]:
    """`count` pictures of one of `CHARACTERS`: uint8 [count, px, px, 3]; if `is_grey`, the three channels are equal.

    `stream` separates pictures drawn from the same seed. `px` is even.
    """
    outlines = np.stack([_outline(face, character, px) for face in faces])
    bits = np.random.PCG64(np.random.SeedSequence([seed, stream, CHARACTERS.index(character)]))
    drawn = [_draw(outlines, part, px, is_grey=is_grey) for part in _shares(bits, count, px)]
    return np.concatenate(drawn)


def _shares(bits: np.random.PCG64, count: int, px: int) -> Iterator[npt.NDArray[np.uint64]]:
    """The random bits of some images at a time, [n, words]."""
    words = _PARAMETERS + _RELIEF_POINTS**2 + px * px * 3 * _NOISE_BYTES // 8
    for start in range(0, count, _IMAGES_AT_ONCE):
        here = min(_IMAGES_AT_ONCE, count - start)
        yield bits.random_raw(here * words).reshape(here, words)


def _outline(face: Face, character: str, px: int) -> npt.NDArray[np.uint8]:
    """The character at its largest, white on black, in the middle of a square with a margin."""
    side = _OUTLINE_SCALE * px
    em = 2 * side // 3
    canvas = Image.new("L", (side, side))
    # Capitals are 0.7 em tall: their middle is the picture's.
    baseline = side // 2 + 7 * em // 20
    ImageDraw.Draw(canvas).text((side // 2, baseline), character, fill=255, font=_font(face.path, em), anchor="ms")
    return np.asarray(canvas)


# All faces: opening them for each character would take longer than drawing a few pictures.
@lru_cache(maxsize=128)
def _font(path: Path, em: int) -> ImageFont.FreeTypeFont:
    # Not raqm, which is not everywhere; single characters need no shaping.
    return ImageFont.truetype(str(path), em, layout_engine=ImageFont.Layout.BASIC)


def _draw(
    outlines: npt.NDArray[np.uint8], bits: npt.NDArray[np.uint64], px: int, *, is_grey: bool
) -> npt.NDArray[np.uint8]:
    chance = _Chance(bits[:, :_PARAMETERS])
    ink = _placed(outlines, chance, px)
    blurs = chance.between(0, _MOST_BLURS)
    for done in range(_MOST_BLURS):
        blurred = blurs > done
        ink[blurred] = _blurred(ink[blurred])
    ground, colour = _colours(chance, is_grey=is_grey)
    relief = _relief(chance, bits[:, _PARAMETERS : _PARAMETERS + _RELIEF_POINTS**2], px)
    picture = ground[:, None, None, :] + ((colour - ground)[:, None, None, :] * ink[..., None] >> 8)
    picture += relief[..., None]
    noise = _noise(bits[:, _PARAMETERS + _RELIEF_POINTS**2 :], px)
    if is_grey:
        noise = noise[..., :1]
    picture += noise * chance.between(0, _MOST_NOISE)[:, None, None, None] // _NOISE_DEVIATION
    return np.clip(picture, 0, 255).astype(np.uint8)


class _Chance:
    """Integers for each image, from one word of random bits each."""

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._words = iter(words.T)

    def between(self, low: int, high: int) -> Ints:
        """Uniform numbers from `low` to `high`, [n]."""
        upper = next(self._words) >> np.uint64(32)
        chosen: Ints = (upper * np.uint64(high - low + 1) >> np.uint64(32)).astype(np.int32) + np.int32(low)
        return chosen


def _placed(outlines: npt.NDArray[np.uint8], chance: _Chance, px: int) -> Ints:
    """The ink of each pixel, from 0 to 256, [n, px, px]: an outline scaled, slanted, rotated and shifted."""
    side = outlines.shape[1]
    face = chance.between(0, len(outlines) - 1)
    # In eighths of a pixel, for 32 pixels.
    em = chance.between(8 * _EM_PX[0], 8 * _EM_PX[1])
    degrees = chance.between(-_TILT_DEGREES, _TILT_DEGREES)
    slant = chance.between(-_SLANT_PERCENT, _SLANT_PERCENT)[:, None, None]
    shift_x, shift_y = (chance.between(-8 * _SHIFT_PX, 8 * _SHIFT_PX)[:, None, None] for _ in range(2))
    # Twice the distance of each point from the middle, in points.
    line = 2 * np.arange(_POINTS * px, dtype=np.int32) - (_POINTS * px - 1)
    x = line[None, None, :] - shift_x * (2 * _POINTS * px) // (8 * _UNIT_PX)
    y = line[None, :, None] - shift_y * (2 * _POINTS * px) // (8 * _UNIT_PX)
    x = x + slant * y // 100
    cosine, sine = (table[degrees + _TILT_DEGREES][:, None, None] for table in _turns())
    # Outline pixels per half point, as a fraction: the outline's em is two thirds of its side.
    per_half = (2 * side * _ONE * 8 * _UNIT_PX) // (3 * em * 2 * _POINTS * px)
    scale = per_half[:, None, None].astype(np.int64)
    middle = side * _ONE // 2 - _ONE // 2
    from_x = ((x * cosine + y * sine) * scale >> _FRACTION_BITS) + middle
    from_y = ((y * cosine - x * sine) * scale >> _FRACTION_BITS) + middle
    points = _looked_up(outlines, face, from_x.astype(np.int32), from_y.astype(np.int32))
    cells = points.reshape(len(face), px, _POINTS, px, _POINTS).sum(axis=(2, 4), dtype=np.int32)
    scaled: Ints = (cells * 257 // (_POINTS**2 * 256)).astype(np.int32)
    return scaled


def _turns() -> tuple[Ints, Ints]:
    """Cosine and sine of every whole degree, as fractions."""
    angles = [math.radians(degrees) for degrees in range(-_TILT_DEGREES, _TILT_DEGREES + 1)]
    cosine, sine = (np.array([round(_ONE * of(angle)) for angle in angles], np.int32) for of in (math.cos, math.sin))
    return cosine, sine


def _looked_up(outlines: npt.NDArray[np.uint8], face: Ints, x: Ints, y: Ints) -> Ints:
    """Outlines [faces, side, side] at points between their pixels, from 0 to 255, by bilinear interpolation."""
    side = outlines.shape[1]
    most = (side - 1) * _ONE - 1
    x, y = np.clip(x, 0, most), np.clip(y, 0, most)
    column, row = x >> _FRACTION_BITS, y >> _FRACTION_BITS
    # Seven bits of each fraction: two of them and a byte fit into 32 bits.
    right, below = ((of & (_ONE - 1)) >> (_FRACTION_BITS - 7) for of in (x, y))
    flat = outlines.reshape(-1)
    at = face[:, None, None] * (side * side) + row * side + column
    upper = flat[at].astype(np.int32) * (128 - right) + flat[at + 1].astype(np.int32) * right
    at += side
    lower = flat[at].astype(np.int32) * (128 - right) + flat[at + 1].astype(np.int32) * right
    between: Ints = (upper * (128 - below) + lower * below) >> 14
    return between


def _blurred(ink: Ints) -> Ints:
    """Each pixel [n, h, w] mixed with its neighbours, 1:2:1 along both axes; borders are repeated."""
    for axis in (1, 2):
        padding = [(0, 0)] * 3
        padding[axis] = (1, 1)
        wide = np.moveaxis(np.pad(ink, padding, "edge"), axis, 0)
        ink = np.moveaxis((wide[:-2] + 2 * wide[1:-1] + wide[2:] + 2) >> 2, 0, axis)
    return ink


def _colours(chance: _Chance, *, is_grey: bool) -> tuple[Ints, Ints]:
    """The colours of background and ink, [n, 3] each, with at least the minimum contrast in brightness."""
    ground = chance.between(0, 255)
    contrast = chance.between(_LEAST_CONTRAST, 255)
    # Away from the background, on the side with room.
    is_darker = ground > 127
    colour = np.where(is_darker, np.maximum(ground - contrast, 0), np.minimum(ground + contrast, 255))
    tints = [np.stack([chance.between(-_TINT, _TINT) for _ in range(3)], axis=1) for _ in range(2)]
    if is_grey:
        tints = [np.zeros_like(tint) for tint in tints]
    return (np.clip(ground[:, None] + tints[0], 0, 255), np.clip(colour[:, None] + tints[1], 0, 255))


def _relief(chance: _Chance, words: npt.NDArray[np.uint64], px: int) -> Ints:
    """How much brighter each pixel of background and ink is than its colour, [n, px, px]."""
    height = chance.between(0, _MOST_RELIEF)
    points = (words >> np.uint64(48)).astype(np.int32).reshape(-1, _RELIEF_POINTS, _RELIEF_POINTS) - (1 << 15)
    # The position of each pixel between the first and the last point, in 64ths of a gap.
    along = np.arange(px, dtype=np.int32) * (64 * (_RELIEF_POINTS - 1)) // px
    gap, part = along >> 6, along & 63
    rows = (points[:, gap] * (64 - part)[None, :, None] + points[:, gap + 1] * part[None, :, None]) >> 6
    slopes = (rows[:, :, gap] * (64 - part) + rows[:, :, gap + 1] * part) >> 6
    relief: Ints = (slopes * height[:, None, None]) >> 16
    return relief


def _noise(words: npt.NDArray[np.uint64], px: int) -> Ints:
    """Approximately normal noise, [n, px, px, 3], around 0 with a deviation of `_NOISE_DEVIATION`."""
    parts = np.ascontiguousarray(words.astype("<u8")).view(np.uint8).reshape(len(words), px, px, 3, _NOISE_BYTES)
    noise: Ints = parts.sum(axis=-1, dtype=np.int32) - _NOISE_MEAN
    return noise
