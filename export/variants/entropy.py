"""Which range of a tensor's values loses the least when it becomes 8 bits: the one with the smallest divergence.

Sources: TensorRT's calibration (Migacz, 8-bit Inference with TensorRT, 2017), in the form of onnxruntime's
HistogramCollector, whose ranges these are in double precision; it adds bins in Python, which takes seven times as long.
Knows histograms. Knows nothing of graphs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

_QUANTISED_BINS = 128
# What an empty bin gets, in counts: of a bin with nothing in it the divergence would be infinite.
_LEAST = 1e-4


def least_divergent(counts: Counts) -> tuple[int, int]:
    """The first and one past the last of the bins to keep; `counts` are [bins], symmetric around zero, more than 128.

    Tried are all ranges around the middle. What lies outside is what its last bin becomes (the reference); inside, as
    many bins share one of the 128 as they fill (the candidate).
    """
    middle = len(counts) // 2
    ranges = [(middle - half, min(middle + half + 1, len(counts))) for half in range(_QUANTISED_BINS // 2, middle + 1)]
    return ranges[int(np.argmin([_divergence(counts, start, end) for start, end in ranges]))]


def _divergence(counts: Counts, start: int, end: int) -> float:
    """Kullback and Leibler's, of the reference from the candidate, for the bins from `start` to `end`."""
    inside = counts[start:end]
    reference = inside.copy()
    reference[0] += counts[:start].sum()
    reference[-1] += counts[end:].sum()
    width = len(inside) // _QUANTISED_BINS
    most = width * _QUANTISED_BINS
    totals = inside[:most].reshape(_QUANTISED_BINS, width).sum(axis=1)
    totals[-1] += inside[most:].sum()
    filled = np.count_nonzero(reference[:most].reshape(_QUANTISED_BINS, width), axis=1)
    candidate = np.zeros_like(reference)
    candidate[:most] = np.repeat(np.where(filled, totals // np.maximum(filled, 1), 0), width)
    if not reference.any() or not candidate.any():
        return float("inf")
    of, by = _smooth(reference), _smooth(candidate)
    return float(np.sum(of * np.log(of / by)))


def _smooth(counts: Counts) -> Shares:
    """As shares of one, none of them zero: a little of what is filled goes to what is not."""
    empty = counts == 0
    empties = int(empty.sum())
    shares: Shares = np.where(empty, _LEAST, counts - _LEAST * empties / (len(counts) - empties))
    shares /= shares.sum()
    return shares
