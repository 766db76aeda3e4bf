"""Draw pictures of shapes from a seed: number, kind, size, place, angle, colour, background and noise.

Everything is computed with integers from the generator's raw bits, so a seed gives the same pixels on every processor
and with every NumPy. Picture `n` depends only on the seed, the stream, the size and `n`: a smaller set is a prefix of a
larger one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from convoy.models.shapes.shape_set import MOST_SHAPES, PX, SHAPES, ShapePart, ShapeSet

Pixels = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]

# Streams keep the parts apart for every seed; a part's number never changes.
_STREAMS: Mapping[ShapePart, int] = {"train": 0, "val": 1}
# The distance from the middle of a shape to its corners, in percent of a picture's side.
_RADIUS_PERCENT = (9, 22)
# Shapes stand upright, but for this much.
_TILT_DEGREES = 20
# A star's inner corners, in percent of its radius.
_STAR_PERCENT = 45
# At least this much of a shape is visible, in percent.
_LEAST_VISIBLE = 50
# Attempts to place a shape where it hides little of the others.
_ATTEMPTS = 8
# Drawn points per pixel and side.
_POINTS = 4
_MOST_NOISE = 16
# The colour of each kind, about which shapes vary: with outlines alone, networks would learn for an hour.
_COLOURS = {"circle": (215, 65, 65), "square": (65, 185, 75), "triangle": (75, 90, 215), "star": (220, 205, 65)}
_COLOUR_RANGE = 45
# The background is nearly grey: its channels differ by less than those of any shape.
_TINT = 25
_SLOPE = 40
_NOISE_BYTES = 4
# The mean and deviation of the sum of this many uniform bytes.
_NOISE_MEAN, _NOISE_DEVIATION = 510, 148


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture and what it shows.

    `pixels` is uint8 [px, px, 3]. `instances` is uint8 [px, px]: 1 + the index of the shape that is visible there, 0
    for the background. `classes` is int64 [n], indices into `SHAPES`. `boxes` is int64 [n, 4], (x1, y1, x2, y2) around
    the visible part of each shape, in pixels; x2 and y2 are excluded.
    """

    pixels: Pixels
    instances: Pixels
    classes: npt.NDArray[np.int64]
    boxes: npt.NDArray[np.int64]

    @property
    def mask(self) -> Pixels:
        """The class of each pixel, uint8 [px, px]: 0 for the background, 1 + an index into `SHAPES`."""
        return np.append(0, self.classes + 1).astype(np.uint8)[self.instances]


@dataclass(frozen=True, slots=True)
class _Shape:
    """A shape's class and place: the coverage of each pixel from 0 to 16, [h, w], and its first row and column."""

    kind: int
    coverage: Ints
    top: int
    left: int

    @property
    def place(self) -> tuple[slice, slice]:
        height, width = self.coverage.shape
        return slice(self.top, self.top + height), slice(self.left, self.left + width)

    @property
    def inside(self) -> npt.NDArray[np.bool_]:
        """The pixels that belong to it: at least half covered."""
        return 2 * self.coverage >= _POINTS**2


def pictures(wanted: ShapeSet, part: ShapePart) -> Iterator[Picture]:
    """The pictures of a part, in order, drawn one by one."""
    for number in range(wanted.images(part)):
        yield draw(number, wanted.seed, _STREAMS[part], wanted.px)


def draw(number: int, seed: int, stream: int, px: int = PX) -> Picture:
    """Picture `number` of `seed`. `stream` separates the parts of a set. It has one shape at least."""
    chance = _Chance(np.random.PCG64(np.random.SeedSequence([seed, stream, px, number])))
    picture = _ground(chance, px)
    instances = np.zeros((px, px), np.uint8)
    shapes: list[_Shape] = []
    for _ in range(chance.between(1, MOST_SHAPES)):
        shape = _placed(chance, instances, shapes, px)
        if shape is None:
            continue
        colour = _colour(chance, shape.kind)
        under = picture[shape.place]
        part = shape.coverage[..., None]
        picture[shape.place] = under + (colour - under) * part // _POINTS**2
        shapes.append(shape)
        instances[shape.place][shape.inside] = len(shapes)
    picture = picture + _noise(chance, px) * chance.between(0, _MOST_NOISE) // _NOISE_DEVIATION
    return Picture(
        pixels=np.clip(picture, 0, 255).astype(np.uint8),
        instances=instances,
        classes=np.array([shape.kind for shape in shapes], np.int64),
        boxes=np.array([_box(instances == index) for index in range(1, len(shapes) + 1)], np.int64),
    )


class _Chance:
    """Random integers from raw bits, whose stream NumPy promises to keep."""

    def __init__(self, bits: np.random.PCG64) -> None:
        self._bits = bits

    def between(self, low: int, high: int) -> int:
        """A uniform number from `low` to `high`."""
        upper = int(self._bits.random_raw()) >> 32
        return low + (upper * (high - low + 1) >> 32)

    def raw_bytes(self, count: int) -> npt.NDArray[np.uint8]:
        """Uniform bytes, [count]."""
        words = self._bits.random_raw(-(-count // 8)).astype("<u8")
        return words.view(np.uint8)[:count]


def _ground(chance: _Chance, px: int) -> Ints:
    """A background whose brightness changes linearly between four corners, [px, px, 3]."""
    grey = chance.between(_SLOPE, 255 - _SLOPE)
    base = np.array([grey + chance.between(-_TINT, _TINT) for _ in range(3)], np.int32)
    corners = np.array([base + chance.between(-_SLOPE, _SLOPE) for _ in range(4)], np.int32)
    along = np.arange(px, dtype=np.int32)[:, None]
    top, bottom = (corners[at] * (px - 1 - along) // (px - 1) + corners[at + 1] * along // (px - 1) for at in (0, 2))
    down = along[:, None]
    ground: Ints = (top[None] * (px - 1 - down) + bottom[None] * down) // (px - 1)
    return ground


def _placed(chance: _Chance, instances: Pixels, shapes: list[_Shape], px: int) -> _Shape | None:
    """A new shape that leaves enough of the others visible; None if no attempt succeeds."""
    least, most = (px * percent // 100 for percent in _RADIUS_PERCENT)
    for _ in range(_ATTEMPTS):
        kind = chance.between(0, len(SHAPES) - 1)
        radius = chance.between(least, most)
        coverage = _coverage(kind, radius, chance.between(-_TILT_DEGREES, _TILT_DEGREES))
        side = len(coverage)
        shape = _Shape(kind, coverage, chance.between(0, px - side), chance.between(0, px - side))
        after = instances[shape.place].copy()
        after[shape.inside] = 0
        lost = np.bincount(instances[shape.place].ravel(), minlength=len(shapes) + 1)
        lost -= np.bincount(after.ravel(), minlength=len(shapes) + 1)
        if all(
            100 * (np.count_nonzero(instances == index) - lost[index]) >= _LEAST_VISIBLE * other.inside.sum()
            for index, other in enumerate(shapes, start=1)
        ):
            return shape
    return None


def _coverage(kind: int, radius: int, degrees: int) -> Ints:
    """How many of each pixel's points a shape covers, [side, side]."""
    side = 2 * radius + 2
    canvas = Image.new("1", (_POINTS * side, _POINTS * side))
    pen = ImageDraw.Draw(canvas)
    middle, reach = _POINTS * side // 2, _POINTS * radius
    if SHAPES[kind] == "circle":
        pen.ellipse((middle - reach, middle - reach, middle + reach, middle + reach), fill=1)
    else:
        pen.polygon(_corners(kind, middle, reach, degrees), fill=1)
    points = np.asarray(canvas).reshape(side, _POINTS, side, _POINTS)
    covered: Ints = points.sum(axis=(1, 3), dtype=np.int32)
    return covered


def _corners(kind: int, middle: int, reach: int, degrees: int) -> list[tuple[int, int]]:
    corners, first = {"square": (4, 45), "triangle": (3, -90), "star": (10, -90)}[SHAPES[kind]]
    points = []
    for corner in range(corners):
        is_inner = SHAPES[kind] == "star" and corner % 2
        length = reach * _STAR_PERCENT / 100 if is_inner else reach
        angle = math.radians(first + degrees + 360 * corner / corners)
        points.append((middle + round(length * math.cos(angle)), middle + round(length * math.sin(angle))))
    return points


def _colour(chance: _Chance, kind: int) -> Ints:
    """A colour for a shape of this kind, [3]."""
    return np.array([one + chance.between(-_COLOUR_RANGE, _COLOUR_RANGE) for one in _COLOURS[SHAPES[kind]]], np.int32)


def _noise(chance: _Chance, px: int) -> Ints:
    """Approximately normal noise, [px, px, 3], around 0 with a deviation of `_NOISE_DEVIATION`."""
    parts = chance.raw_bytes(px * px * 3 * _NOISE_BYTES).reshape(px, px, 3, _NOISE_BYTES)
    noise: Ints = parts.sum(axis=-1, dtype=np.int32) - _NOISE_MEAN
    return noise


def _box(inside: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    rows, columns = (np.flatnonzero(inside.any(axis=axis)) for axis in (1, 0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
