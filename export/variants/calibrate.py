"""What values the network's tensors take on real images: one pass, from which every converter takes its ranges.

Min-max, percentile and entropy ranges come from the same histograms, so that both INT8 files and the FP16
file rest on the same images. Memory is bounded: values are counted batch by batch and thrown away.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.onnx_session import unoptimised_session
from convoy.export.rows import Chunk, count_of, picked
from convoy.export.variants.entropy import least_divergent
from convoy.export.variants.histogram import ActivationHistogram
from convoy.models.errors import JobError

Method = Literal["minmax", "entropy", "percentile"]
METHODS: tuple[Method, ...] = get_args(Method)
Range = tuple[float, float]
Ranges = Mapping[str, Range]

_PERCENT = 99.99
# Enough for a threshold within half a percent of the range, and for the search to take milliseconds.
_ENTROPY_BINS = 512
# Intermediate values of one batch; a 224-pixel ResNet-50 makes some 100 MB per image.
_BATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Calibration:
    """`graph` is the prepared fp32 file; `ranges` hold lowest and highest per float tensor, by method."""

    graph: Path
    ranges: Mapping[Method, Ranges]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What one variant's file is made of: the prepared graph, with ranges of `method`.

    The nodes of `keep` stay as they are; with `only`, those nodes alone are converted.
    """

    calibration: Calibration
    method: Method = "minmax"
    keep: frozenset[str] = frozenset()
    only: frozenset[str] | None = None

    @property
    def ranges(self) -> Ranges:
        return self.calibration.ranges[self.method]

    def takes(self, node: str) -> bool:
        """Whether a node of this name is to be converted, as far as it can be."""
        return node not in self.keep and (self.only is None or node in self.only)


def collect(
    graph: Path,
    chunks: Iterable[Chunk],
    methods: Iterable[Method] = METHODS,
    tensors: Collection[str] | None = None,
) -> Mapping[Method, Ranges]:
    """The ranges of every float tensor of `graph`, or of `tensors`, over all images.

    Raises JobError when there is no image, or when the network computes NaN or infinity on one.
    """
    histograms: dict[str, ActivationHistogram] = defaultdict(ActivationHistogram)
    for values in observed(graph, chunks, tensors):
        for name, value in values.items():
            _count(histograms[name], value, name)
    seen = {name: histogram for name, histogram in histograms.items() if histogram.counts.any()}
    if not seen:
        raise JobError("there is no image to calibrate on; repair the data set of --calibrate")
    return {method: {name: _RANGE[method](histogram) for name, histogram in seen.items()} for method in methods}


def observed(
    graph: Path, chunks: Iterable[Chunk], tensors: Collection[str] | None = None
) -> Iterator[Mapping[str, np.ndarray]]:
    """The values that float tensors take, [n, ...] by name, for a few images at a time; of all, or of `tensors`."""
    session, names = _observing(graph, tensors)
    floats = [given.name for given in session.get_inputs() if given.type == "tensor(float)"]
    # What cannot be batched has a fixed number of samples; a free one has a name here.
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
            batch = max(1, int(min(most, count_of(chunk.inputs), _BATCH_BYTES // max(1, nbytes))))


def _observing(graph: Path, tensors: Collection[str] | None) -> tuple[Any, list[str]]:
    """A session of the graph that gives out every float tensor, or those of `tensors`, and their names."""
    import onnx

    model = onnx.load(str(graph))
    given = {output.name for output in model.graph.output}
    for node in model.graph.node:
        model.graph.output.extend(
            onnx.ValueInfoProto(name=name)
            for name in node.output
            if name and name not in given and (tensors is None or name in tensors)
        )
    # Fused, a tensor between two nodes is not there to be looked at.
    session = unoptimised_session(model.SerializeToString(), cpu_budget())
    floats = [node.name for node in session.get_outputs() if node.type == "tensor(float)"]
    return session, [name for name in floats if tensors is None or name in tensors]


def _count(histogram: ActivationHistogram, values: np.ndarray, name: str) -> None:
    try:
        histogram.add(values)
    except ValueError:
        raise JobError(
            f"the network computes NaN or infinity in {name} on a calibration image; check the weights and --preprocess"
        ) from None


def _entropy(histogram: ActivationHistogram) -> Range:
    counts, edges = histogram.coarse(_ENTROPY_BINS)
    start, end = least_divergent(counts)
    return max(histogram.lowest, float(edges[start])), min(histogram.highest, float(edges[end]))


_RANGE: dict[Method, Callable[[ActivationHistogram], Range]] = {
    "minmax": lambda histogram: (histogram.lowest, histogram.highest),
    "entropy": _entropy,
    "percentile": lambda histogram: histogram.percentile(_PERCENT),
}
