"""Masks as COCO's compressed run lengths (https://cocodataset.org/#format-data), as pycocotools reads and writes them.

Pixels run down the columns. Counts alternate between pixels outside and inside the mask, beginning with those outside.
Each count is written as its difference from the last but one, in digits of five bits. Needs only numpy, so that the
client can be installed alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
# The bits of a digit, whether more digits follow, the sign in the last digit, and the character of a digit 0.
_BITS, _MORE, _SIGN, _ZERO = 5, 0x20, 0x10, 48
_MOST_DIGITS = 12


def counts_text(counts: Integers) -> str:
    """The text of counts int64 [n], which are at least 0."""
    left = counts.astype(np.int64)
    left[3:] -= counts[1:-2]
    digits, is_used = [], []
    is_open = np.ones(len(left), bool)
    while is_open.any():
        digit = left & (_MORE - 1)
        left >>= _BITS
        is_used.append(is_open)
        is_open = is_open & np.where(digit & _SIGN, left != -1, left != 0)
        digits.append((digit | np.where(is_open, _MORE, 0)) + _ZERO)
    if not digits:
        return ""
    used: npt.NDArray[np.int64] = np.stack(digits, axis=1)[np.stack(is_used, axis=1)]
    return used.astype(np.uint8).tobytes().decode("ascii")


def counts_of(text: str) -> Integers:
    """The counts int64 [n] of a text. Raises ValueError if it is none."""
    digits = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64) - _ZERO
    is_last = (digits & _MORE) == 0
    if len(digits) and (digits.min() < 0 or digits.max() >= 2 * _MORE or not is_last[-1]):
        raise ValueError("the run lengths are damaged")
    ends = np.flatnonzero(is_last)
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    place = np.arange(len(digits)) - np.repeat(starts, ends - starts + 1)
    if place.max(initial=0) >= _MOST_DIGITS:
        raise ValueError("a run length is too large")
    shifted = (digits & (_MORE - 1)) << (_BITS * place)
    counts: Integers = np.add.reduceat(shifted, starts) if len(ends) else shifted
    counts -= np.where(digits[ends] & _SIGN, 1 << (_BITS * (place[ends] + 1)), 0)
    counts[1::2] = counts[1::2].cumsum()
    counts[2::2] = counts[2::2].cumsum()
    if counts.min(initial=0) < 0:
        raise ValueError("a run length is below 0")
    return counts


def counts_between(edges: Integers, pixels: int) -> Integers:
    """The counts of a mask that begins or ends at each of these positions, in any order, of `pixels` in all.

    Equal positions cancel each other in pairs.
    """
    positions, times = np.unique(edges, return_counts=True)
    counts: Integers = np.diff(positions[times % 2 == 1], prepend=0, append=pixels)
    return counts if counts[-1] or len(counts) == 1 else counts[:-1]


def mask_of(counts: Integers, height: int, width: int) -> npt.NDArray[np.bool_]:
    """The mask bool [height, width]. Raises ValueError if the counts are of another size."""
    if counts.sum() != height * width:
        raise ValueError(f"the run lengths are of {counts.sum()} pixels, not {height} x {width}")
    is_inside = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return np.ascontiguousarray(is_inside.reshape(width, height).T)


def cropped_mask(counts: Integers, height: int) -> tuple[npt.NDArray[np.bool_], int, int]:
    """The part of the mask that has all of its pixels, bool [h, w], and its left and top edge in a picture of this
    height; [0, 0] for an empty mask.
    """
    edges = counts.cumsum()
    starts, ends = edges[:-1:2], edges[1::2]
    if not len(starts):
        return np.zeros((0, 0), bool), 0, 0
    left, right = int(starts[0]) // height, int(ends[-1] - 1) // height + 1
    top, bottom = 0, height
    if not (starts // height != (ends - 1) // height).any():
        top, bottom = int((starts % height).min()), int(((ends - 1) % height).max()) + 1
    rows = bottom - top
    # Between the rows, nothing begins or ends.
    places = [(one // height - left) * rows + one % height - top for one in (starts, ends - 1)]
    places[1] += 1
    inside = counts_between(np.concatenate(places), rows * (right - left))
    return mask_of(inside, rows, right - left), left, top
