"""The values of the network's tensors on real images: one pass, from which every converter takes its ranges.

Min-max, percentile and entropy ranges come from the same histograms, so all converted files rest on the same images.
Memory is bounded: values are counted batch by batch and discarded. The range by entropy is TensorRT's (Migacz, 8-bit
Inference with TensorRT, 2017), in the form of onnxruntime's HistogramCollector. `drift_of` tells whether the evaluation
images leave the calibrated ranges.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import onnx

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.onnx_session import unoptimised_session
from convoy.export.rows import Chunk, count_of, picked
from convoy.models.errors import JobError

BINS = 2048


# The distribution of one tensor's values, in bounded memory. The bins are symmetric around zero. A value beyond them
# doubles the range by merging bins in pairs, so a first batch of tiny values cannot make a later one cost gigabytes.


@dataclass(slots=True)
class ActivationHistogram:
    """`counts` int64 [BINS] over [-limit, limit]; `lowest` and `highest` are exact."""

    lowest: float = float("inf")
    highest: float = float("-inf")
    limit: float = 0.0
    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, values: np.ndarray) -> None:
        """Count finite float values of any shape. Raises ValueError for NaN or infinity."""
        flat = values.reshape(-1)
        if flat.size == 0:
            return
        low, high = float(flat.min()), float(flat.max())
        if not np.isfinite([low, high]).all():
            raise ValueError("not every value is finite")
        self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
        self._widen(max(abs(low), abs(high)))
        # An odd stride walks through all positions of a power-of-two map instead of a single column. This many values
        # of one tensor and batch are enough for the distribution; the extremes always come from all values.
        stride = (flat.size // (1 << 18)) | 1
        self.counts += np.histogram(flat[::stride], BINS, (-self.limit, self.limit))[0]

    def percentile(self, percent: float) -> tuple[float, float]:
        """The range that holds `percent` of the values, with equal shares cut off at both ends."""
        cumulated = np.cumsum(self.counts) / max(1, self.counts.sum())
        cut = (100 - percent) / 200
        left = int(np.searchsorted(cumulated, cut))
        right = int(np.searchsorted(cumulated, 1 - cut)) + 1
        edges = np.linspace(-self.limit, self.limit, BINS + 1)
        return max(self.lowest, float(edges[left])), min(self.highest, float(edges[min(right, BINS)]))

    def _widen(self, limit: float) -> None:
        if self.limit == 0:
            # All zeros so far: they lie in the middle of every range.
            self.limit = max(limit, float(np.finfo(np.float32).tiny))
        while self.limit < limit:
            pairs = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.concatenate([np.zeros(BINS // 4, np.int64), pairs, np.zeros(BINS // 4, np.int64)])
            self.limit *= 2


Counts = npt.NDArray[np.int64]

_QUANTISED_BINS = 128
# The count of an empty bin: with 0, the divergence would be infinite.
_LEAST = 1e-4


# The range of a tensor's values that loses the least in 8 bits: the one with the smallest divergence. Sources:
# TensorRT's calibration (Migacz, 8-bit Inference with TensorRT, 2017), in the form of onnxruntime's HistogramCollector,
# whose ranges these are in double precision; it adds bins in Python, which takes seven times as long.


def least_divergent(counts: Counts) -> tuple[int, int]:
    """The first bin to keep and one past the last; `counts` are [bins], symmetric around zero, more than 128.

    Tries all ranges around the middle. In the reference, values outside fall into the last bin; in the candidate, as
    many bins share one of 128 levels as they fill.
    """
    middle = len(counts) // 2
    ranges = [(middle - half, min(middle + half + 1, len(counts))) for half in range(_QUANTISED_BINS // 2, middle + 1)]
    return ranges[int(np.argmin([_divergence(counts, start, end) for start, end in ranges]))]


def _divergence(counts: Counts, start: int, end: int) -> float:
    """The Kullback-Leibler divergence of the reference from the candidate, for the bins from `start` to `end`."""
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


def _smooth(counts: Counts) -> npt.NDArray[np.float64]:
    """Normalise to one without zeros: empty bins get a little of the others' share."""
    empty = counts == 0
    empties = int(empty.sum())
    shares: npt.NDArray[np.float64] = np.where(empty, _LEAST, counts - _LEAST * empties / (len(counts) - empties))
    shares /= shares.sum()
    return shares


Method = Literal["minmax", "entropy", "percentile"]
METHODS: tuple[Method, ...] = get_args(Method)
Range = tuple[float, float]
Ranges = Mapping[str, Range]

# Enough for a threshold within half a percent of the range, and a search of milliseconds.
_ENTROPY_BINS = 512


@dataclass(frozen=True, slots=True)
class Calibration:
    """`graph` is the prepared fp32 file; `ranges` hold the lowest and highest value per float tensor, by method."""

    graph: Path
    ranges: Mapping[Method, Ranges]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The input of a variant's conversion: the prepared graph, with ranges of `method`.

    The nodes of `keep` stay as they are; with `only`, just those nodes are converted.
    """

    calibration: Calibration
    method: Method = "minmax"
    keep: frozenset[str] = frozenset()
    only: frozenset[str] | None = None

    @property
    def ranges(self) -> Ranges:
        return self.calibration.ranges[self.method]

    def takes(self, node: str) -> bool:
        """Whether to convert the node of this name, if possible."""
        return node not in self.keep and (self.only is None or node in self.only)


def collect(
    graph: Path,
    chunks: Iterable[Chunk],
    methods: Iterable[Method] = METHODS,
    tensors: Collection[str] | None = None,
) -> Mapping[Method, Ranges]:
    """The ranges of every float tensor of `graph`, or of `tensors`, over all images.

    Raises JobError if there are no images, or if the network computes NaN or infinity on one.
    """
    histograms: dict[str, ActivationHistogram] = defaultdict(ActivationHistogram)
    for values in observed(graph, chunks, tensors):
        for name, value in values.items():
            try:
                histograms[name].add(value)
            except ValueError:
                raise JobError(
                    f"the network computes NaN or infinity in {name} on a calibration image; check the weights and "
                    "--preprocess"
                ) from None
    seen = {name: histogram for name, histogram in histograms.items() if histogram.counts.any()}
    if not seen:
        raise JobError("there are no images to calibrate on; repair the --calibrate data set")
    return {method: {name: _RANGE[method](histogram) for name, histogram in seen.items()} for method in methods}


def observed(
    graph: Path, chunks: Iterable[Chunk], tensors: Collection[str] | None = None
) -> Iterator[Mapping[str, np.ndarray]]:
    """The values of float tensors, [n, ...] by name, a few images at a time; of all tensors, or of `tensors`."""
    model = onnx.load(str(graph))
    given_out = {output.name for output in model.graph.output}
    for node in model.graph.node:
        model.graph.output.extend(
            onnx.ValueInfoProto(name=name)
            for name in node.output
            if name and name not in given_out and (tensors is None or name in tensors)
        )
    # With fusion, a tensor between two nodes would not exist.
    session = unoptimised_session(model.SerializeToString(), cpu_budget())
    outputs = [node.name for node in session.get_outputs() if node.type == "tensor(float)"]
    names = [name for name in outputs if tensors is None or name in tensors]
    floats = [given.name for given in session.get_inputs() if given.type == "tensor(float)"]
    # A graph without batches has a fixed number of samples; a dynamic one has a name here.
    fixed = [given.shape[0] for given in session.get_inputs() if given.shape and isinstance(given.shape[0], int)]
    batch, most = 1, min(fixed, default=math.inf)
    for chunk in chunks:
        count = start = 0
        while (start := start + count) < count_of(chunk.inputs):
            inputs = picked(chunk.inputs, slice(start, start + batch))
            count = count_of(inputs)
            values = session.run(names, dict(inputs))
            own = {name: inputs[name] for name in floats} if tensors is None else {}
            yield {**dict(zip(names, values, strict=True)), **own}
            nbytes = sum(value.nbytes for value in values) // count
            # Intermediate values of one batch; a 224-pixel ResNet-50 makes about 100 MB per image.
            batch = max(1, int(min(most, count_of(chunk.inputs), (256 << 20) // max(1, nbytes))))


def _entropy(histogram: ActivationHistogram) -> Range:
    # With bins merged, which divide `BINS`.
    start, end = least_divergent(histogram.counts.reshape(_ENTROPY_BINS, -1).sum(axis=1))
    edges = np.linspace(-histogram.limit, histogram.limit, _ENTROPY_BINS + 1, dtype=np.float32)
    return max(histogram.lowest, float(edges[start])), min(histogram.highest, float(edges[end]))


_RANGE: dict[Method, Callable[[ActivationHistogram], Range]] = {
    "minmax": lambda histogram: (histogram.lowest, histogram.highest),
    "entropy": _entropy,
    "percentile": lambda histogram: histogram.percentile(99.99),
}


_SHARE = 0.25


# Do the calibration images cause the same ranges as the evaluation images? An INT8 file clips what is beyond the
# calibrated ranges and rounds away what is far below them. If many tensors are affected, the images are at fault and
# not the precision, and no budget helps.


def drift_of(calibrated: Ranges, seen: Ranges) -> str:
    """How the ranges that were `seen` differ from the `calibrated` ones, as text; empty if they fit."""
    shared = [name for name in seen if name in calibrated and _width(calibrated[name]) > 0]
    beyond = {name: _beyond(calibrated[name], seen[name]) for name in shared}
    unused = {name: _width(calibrated[name]) / max(_width(seen[name]), 1e-30) for name in shared}
    over = [name for name in shared if beyond[name] > 0.25]
    under = [name for name in shared if unused[name] > 4.0]
    if len(over) < _SHARE * len(shared) and len(under) < _SHARE * len(shared):
        return ""
    if len(over) >= len(under):
        worst = max(over, key=lambda name: beyond[name])
        how = (
            f"go beyond the range of calibration (worst {worst}: {_shown(seen[worst])}, "
            f"calibrated for {_shown(calibrated[worst])})"
        )
    else:
        worst = max(under, key=lambda name: unused[name])
        how = (
            f"use less than a quarter of the range of calibration (worst {worst}: {_shown(seen[worst])} "
            f"of {_shown(calibrated[worst])})"
        )
    return (
        f"the images of --calibrate move the network unlike those of --evaluate: {max(len(over), len(under))} of "
        f"{len(shared)} tensors {how}; calibrate on images like those that will be served"
    )


def _beyond(calibrated: Range, seen: Range) -> float:
    return max(seen[1] - calibrated[1], calibrated[0] - seen[0], 0.0) / _width(calibrated)


def _width(limits: Range) -> float:
    return limits[1] - limits[0]


def _shown(limits: Range) -> str:
    return f"{limits[0]:.3g} to {limits[1]:.3g}"
