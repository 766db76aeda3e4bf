"""Compute only the part of a resized image that a crop keeps, with Pillow's filters or without antialiasing.

With Pillow's filters the result is bit for bit that of resizing everything and then cropping. If that is not certain,
everything is resized.

Source of the method: Pillow's `Resample.c`. A pixel's weights depend on the position of its centre in the source,
`start + (i + 0.5) * scale` of a box whose edges are 32-bit floats. A part is equal to the whole if

    1. it begins and ends where such a float is exact, so that scale and weights are the same: anywhere on a side of
       256, whose positions are binary fractions, else at every n-th pixel, where a centre may be off by the last bit of
       a double (which changed none of the weights in 97 thousand windows, because these have 22 bits);
    2. the filter reads beyond the part, which it does: it ends at the image's edge and not at the box's;
    3. the passes over rows and columns, with a rounding to eight bits in between, come in the same order. Up to
       Pillow 12 the order is fixed; since 13 it depends on how many pixels each side loses, and a part loses more.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image

Box = tuple[int, int, int, int]
_Extent = tuple[int, int]


def resized_window(source: Image.Image, size: _Extent, window: Box, kernel: Image.Resampling) -> Image.Image:
    """The part `window` (left, top, right, bottom) of `source` resized to `size` (width, height)."""
    if size == source.size:
        return _cropped(source, window)
    (of_width, of_height), (width, height) = source.size, size
    (left, right), (top, bottom) = _extents(source, size, window, kernel)
    box = left * of_width / width, top * of_height / height, right * of_width / width, bottom * of_height / height
    resized = source.resize((right - left, bottom - top), kernel, box)
    return _cropped(resized, (window[0] - left, window[1] - top, window[2] - left, window[3] - top))


def _cropped(image: Image.Image, window: Box) -> Image.Image:
    return image if window == (0, 0, *image.size) else image.crop(window)


def _extents(source: Image.Image, size: _Extent, window: Box, kernel: Image.Resampling) -> tuple[_Extent, _Extent]:
    """The columns and rows to compute so that those of `window` are as if all had been computed."""
    left, top, right, bottom = window
    whole = (0, size[0]), (0, size[1])
    if kernel == Image.Resampling.NEAREST:  # uses other sums
        return whole
    columns = _exact_extent(source.width, size[0], left, right)
    rows = _exact_extent(source.height, size[1], top, bottom)
    order = _rows_come_first(source.size, size)
    parts = (columns, rows), (columns, whole[1]), (whole[0], rows), whole
    return next((x, y) for x, y in parts if _rows_come_first(source.size, (x[1] - x[0], y[1] - y[0])) == order)


def _exact_extent(of_px: int, to_px: int, first: int, last: int) -> _Extent:
    """The narrowest part around [first, last) of a side resized from `of_px` to `to_px` that satisfies rule 1."""
    step = to_px // math.gcd(of_px, to_px)
    step //= step & -step  # a float divides exactly by powers of two
    first, last = first - first % step, last + -last % step
    edges = first * of_px / to_px, last * of_px / to_px
    return (first, last) if struct.unpack("2f", struct.pack("2f", *edges)) == edges else (0, to_px)


def _rows_come_first(of: _Extent, to: _Extent) -> bool:
    """Whether the height is reduced before the width, as Pillow 13 decides."""
    return of[1] - to[1] > max(0, 2 * (of[0] - to[0]))


# Resizing by plain sampling, without antialiasing. Pillow cannot do this: its `resize` always antialiases, and its
# `transform` uses a sharper cubic than training does. Source of the method:
# `torch.nn.functional.interpolate(antialias=False, align_corners=False)`, which torchvision's tensor transforms use.
# Output pixel i samples the input at (i + 0.5) * in / out - 0.5 with the kernel at its own width, whatever the scale;
# samples beyond the border repeat it.


Floats = npt.NDArray[np.float64]


def _cubic(distance: Floats) -> Floats:
    """Keys' cubic convolution with a = -0.75, as in torch."""
    a, x = -0.75, np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _lanczos(distance: Floats) -> Floats:
    return np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)


# The weight as a function of the distance in pixels, and the distance from which on it is zero.
KERNELS: dict[str, tuple[Callable[[Floats], Floats], int]] = {
    "bilinear": (lambda distance: 1 - np.abs(distance), 1),
    "bicubic": (_cubic, 2),
    "lanczos": (_lanczos, 3),
}


def sample_without_antialias(
    pixels: npt.NDArray[np.uint8], size: tuple[int, int], window: tuple[int, int, int, int], kernel: str
) -> npt.NDArray[np.uint8]:
    """The part `window` (left, top, right, bottom) of `pixels` resized to `size` (width, height).

    `pixels` is uint8 [height, width] or [height, width, channels], and so is the result. `kernel` is a key of
    `KERNELS`. Only the pixels that the window needs are read.
    """
    left, top, right, bottom = window
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    columns, column_weights = _taps(pixels.shape[1], size[0], range(left, right), kernel)
    rows, row_weights = _taps(pixels.shape[0], size[1], range(top, bottom), kernel)
    # numpy picks single bytes from long rows several times as fast as pixels of three bytes.
    places = (columns[..., None] * channels + np.arange(channels)).reshape(len(columns), -1, channels)
    lines = pixels.reshape(pixels.shape[0], -1)
    result = np.zeros((len(rows), len(columns) * channels), np.float32)
    for i in range(rows.shape[1]):
        line = lines[rows[:, i]]
        resized = np.zeros_like(result)
        for j in range(columns.shape[1]):
            resized += line.take(places[:, j].ravel(), axis=1) * np.repeat(column_weights[:, j], channels)
        result += resized * row_weights[:, i, None]
    return np.clip(np.rint(result), 0, 255).astype(np.uint8).reshape(len(rows), len(columns), *pixels.shape[2:])


def _taps(in_px: int, out_px: int, wanted: range, kernel: str) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """Input indices [len(wanted), 2 * reach] along one axis and their weights, which sum to 1."""
    weight, reach = KERNELS[kernel]
    centres = (np.arange(wanted.start, wanted.stop) + 0.5) * (in_px / out_px) - 0.5
    taps = np.floor(centres)[:, None] + np.arange(1 - reach, 1 + reach)
    weights = weight(centres[:, None] - taps)
    weights /= weights.sum(axis=1, keepdims=True)
    return taps.clip(0, in_px - 1).astype(np.intp), weights.astype(np.float32)
