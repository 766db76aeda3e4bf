"""Bilinear resizing of 8-bit pixels, bit for bit as OpenCV's `cv2.resize(..., interpolation=cv2.INTER_LINEAR)`.

YOLO detectors are trained and published with OpenCV's letterbox. A level more or less in some pixels can move the boxes
of a network that is not sure, so that answers are comparable only with the same pixels.

Source of the method: OpenCV's `modules/imgproc/src/resize.cpp` (4.x and 5.0). Output pixel i samples the input at
(i + 0.5) * in / out - 0.5, as a 32-bit float. Its two weights are 11-bit integers. The pass along rows is exact; the
pass along columns drops 4 bits of the sums and 16 of their products with the weights, and rounds once at the end.
Halving both sides averages four pixels. Columns beyond the border get the whole weight of the border's pixel; rows
repeat it, which may round differently.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int32]
_ONE = 2048
# Rows of the result that are computed at once, so that what is between stays in the cache.
_BLOCK_ROWS = 32


class _Taps(NamedTuple):
    """For each output pixel along an axis: two input indices and their weights, which sum to 2048 or nearly so."""

    first: npt.NDArray[np.intp]
    second: npt.NDArray[np.intp]
    first_weight: Integers
    second_weight: Integers

    def part(self, start: int, end: int) -> _Taps:
        """Those of some output pixels."""
        part = slice(start, end)
        return _Taps(self.first[part], self.second[part], self.first_weight[part], self.second_weight[part])

    def for_bytes(self, channels: int) -> _Taps:
        """The same for the bytes of a row of pixels."""
        if channels == 1:
            return self
        first, second = ((one[:, None] * channels + np.arange(channels)).ravel() for one in self[:2])
        return _Taps(first, second, *(np.repeat(one, channels) for one in self[2:]))


def resize_linear(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """`pixels`, uint8 [height, width] or [height, width, channels], resized to `size` (width, height)."""
    (height, width), channels = pixels.shape[:2], pixels.shape[2:]
    if (width, height) == size:
        return pixels
    if (width, height) == (2 * size[0], 2 * size[1]):
        return _halved(pixels)
    columns, rows = _taps(width, size[0], repeats_border=False), _taps(height, size[1], repeats_border=True)
    # numpy picks single bytes from long rows several times as fast as pixels of three bytes.
    columns = columns.for_bytes(channels[0] if channels else 1)
    lines, result = pixels.reshape(height, -1), np.empty((size[1], len(columns.first)), np.uint8)
    room = np.empty((min(2 * _BLOCK_ROWS, 2 * size[1]), lines.shape[1]), np.uint8)
    for start in range(0, size[1], _BLOCK_ROWS):
        result[start : start + _BLOCK_ROWS] = _block(lines, columns, rows.part(start, start + _BLOCK_ROWS), room)
    return result.reshape(size[1], size[0], *channels)


def _block(lines: Pixels, columns: _Taps, rows: _Taps, room: Pixels) -> Integers:
    """Some rows of the result, from 0 to 255. `room` is for the lines that they need."""
    used, places = np.unique(np.concatenate([rows.first, rows.second]), return_inverse=True)
    picked = np.take(lines, used, axis=0, out=room[: len(used)], mode="clip")  # "raise" would copy once more
    along: Integers = np.multiply(picked.take(columns.first, axis=1), columns.first_weight)
    along += np.multiply(picked.take(columns.second, axis=1), columns.second_weight)
    along >>= 4
    result: Integers = along[places[: len(rows.first)]]
    result *= rows.first_weight[:, None]
    result >>= 16
    other = along[places[len(rows.first) :]]
    other *= rows.second_weight[:, None]
    other >>= 16
    result += other
    result += 2
    result >>= 2
    return result


def _halved(pixels: Pixels) -> Pixels:
    sums = np.full((pixels.shape[0] // 2, pixels.shape[1] // 2, *pixels.shape[2:]), 2, np.uint16)
    for row in (0, 1):
        for column in (0, 1):
            sums += pixels[row::2, column::2]
    return (sums >> 2).astype(np.uint8)


def _taps(in_px: int, out_px: int, *, repeats_border: bool) -> _Taps:
    centres = ((np.arange(out_px) + 0.5) * (in_px / out_px) - 0.5).astype(np.float32)
    first = np.floor(centres).astype(np.intp)
    share = centres - first.astype(np.float32)
    if not repeats_border:
        share[(first < 0) | (first >= in_px - 1)] = 0
        first = first.clip(0, in_px - 1)
    weights = (np.rint(one * np.float32(_ONE)).astype(np.int32) for one in (1 - share, share))
    return _Taps(first.clip(0, in_px - 1), (first + 1).clip(0, in_px - 1), *weights)
