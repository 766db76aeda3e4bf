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


class _Taps(NamedTuple):
    """For each output pixel along an axis: two input indices and their weights, which sum to 2048 or nearly so."""

    first: npt.NDArray[np.intp]
    second: npt.NDArray[np.intp]
    first_weight: Integers
    second_weight: Integers


def resize_linear(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """`pixels`, uint8 [height, width] or [height, width, channels], resized to `size` (width, height)."""
    (height, width), channels = pixels.shape[:2], pixels.shape[2:]
    if (width, height) == size:
        return pixels
    if (width, height) == (2 * size[0], 2 * size[1]):
        return _halved(pixels)
    columns, rows = _taps(width, size[0], repeats_border=False), _taps(height, size[1], repeats_border=True)
    used, places = np.unique(np.concatenate([rows.first, rows.second]), return_inverse=True)
    # numpy picks single bytes from long rows several times as fast as pixels of three bytes.
    along = _along_rows(pixels.reshape(height, -1)[used], columns, channels[0] if channels else 1)
    result = along[places[: size[1]]] * rows.first_weight[:, None]
    result >>= 16
    other = along[places[size[1] :]] * rows.second_weight[:, None]
    other >>= 16
    result += other
    result += 2
    result >>= 2
    return result.astype(np.uint8).reshape(size[1], size[0], *channels)


def _along_rows(lines: Pixels, columns: _Taps, channels: int) -> Integers:
    """The weighted sums [rows, width * channels] of pairs of pixels, without their last 4 bits."""

    def picked(indices: npt.NDArray[np.intp], weights: Integers) -> Integers:
        places = (indices[:, None] * channels + np.arange(channels)).ravel()
        sums: Integers = lines.take(places, axis=1) * np.repeat(weights, channels)
        return sums

    sums = picked(columns.first, columns.first_weight)
    sums += picked(columns.second, columns.second_weight)
    sums >>= 4
    return sums


def _halved(pixels: Pixels) -> Pixels:
    sums = sum(pixels[row::2, column::2].astype(np.uint16) for row in (0, 1) for column in (0, 1))
    return ((sums + 2) >> 2).astype(np.uint8)  # type: ignore[operator, union-attr]


def _taps(in_px: int, out_px: int, *, repeats_border: bool) -> _Taps:
    centres = ((np.arange(out_px) + 0.5) * (in_px / out_px) - 0.5).astype(np.float32)
    first = np.floor(centres).astype(np.intp)
    share = centres - first.astype(np.float32)
    if not repeats_border:
        share[(first < 0) | (first >= in_px - 1)] = 0
        first = first.clip(0, in_px - 1)
    weights = (np.rint(one * np.float32(_ONE)).astype(np.int32) for one in (1 - share, share))
    return _Taps(first.clip(0, in_px - 1), (first + 1).clip(0, in_px - 1), *weights)
