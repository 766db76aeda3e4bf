"""The part of a resized image that a crop keeps, without most of the rest.

Knows Pillow's resampling; knows nothing of files or models. The result is bit for bit that of resizing everything and
cropping then; where that is not sure, everything is resized.

Source of the method: Pillow's `Resample.c`. A pixel's weights follow from where its centre falls in the source, which
is `start + (i + 0.5) * scale` of a box whose edges are 32-bit floats. A part is equal to the whole when

 1. it begins and ends where such a float is exact, so that scale and weights are the same: anywhere on a side of 256,
    whose positions are binary fractions, else at every n-th pixel, where a centre may be off by the last bit of a
    double (which in 97 thousand windows changed none of the weights, as these have 22 bits);
 2. the filter reads on beyond the part, which it does: it ends at the image's edge and not at the box's;
 3. the passes over rows and columns, between which there is a rounding to eight bits, come in the same order. Up to
    Pillow 12 that is fixed; since 13 it depends on how many pixels either side loses, and a part loses more.
"""

from __future__ import annotations

import math
import struct

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
    """The columns and the rows of the result to compute, so that those of `window` are as if all were."""
    left, top, right, bottom = window
    whole = (0, size[0]), (0, size[1])
    if kernel == Image.Resampling.NEAREST:  # takes pixels by other sums
        return whole
    columns = _exact_extent(source.width, size[0], left, right)
    rows = _exact_extent(source.height, size[1], top, bottom)
    order = _rows_come_first(source.size, size)
    parts = (columns, rows), (columns, whole[1]), (whole[0], rows), whole
    return next((x, y) for x, y in parts if _rows_come_first(source.size, (x[1] - x[0], y[1] - y[0])) == order)


def _exact_extent(of_px: int, to_px: int, first: int, last: int) -> _Extent:
    """The narrowest part around [first, last) of a side resized from `of_px` to `to_px` that fulfils 1."""
    step = to_px // math.gcd(of_px, to_px)
    step //= step & -step  # a float divides by powers of two
    first, last = first - first % step, last + -last % step
    edges = first * of_px / to_px, last * of_px / to_px
    return (first, last) if struct.unpack("2f", struct.pack("2f", *edges)) == edges else (0, to_px)


def _rows_come_first(of: _Extent, to: _Extent) -> bool:
    """Whether the image is made less high before it is made less wide, as Pillow 13 decides."""
    return of[1] - to[1] > max(0, 2 * (of[0] - to[0]))
