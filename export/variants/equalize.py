"""Channels of one stream brought to one range before INT8 rounds them, which changes nothing in float.

A tensor has one INT8 range for all of its channels, so that a channel a thousand times smaller than the widest
rounds to zero. Yet between convolutions the scale of a channel is anybody's choice: whoever writes it may multiply it
and whoever reads it divide it again. Here each channel is raised to the range of its stream's widest. Factors are
powers of two, which change exponents only: fp32 answers stay what they were to the bit.

Method: cross-layer equalisation (Nagel et al., Data-Free Quantization, 2019, section 4.1) with two differences. Ranges
are those of the activations, measured on the calibration images, since weights have a scale per channel here and need
none. And what residual additions tie together is scaled as one. Knows graphs and ranges of channels. Knows nothing of
how a file is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convoy.export.rows import Chunk
from convoy.export.variants.calibrate import observed
from convoy.export.variants.onnx_graph import array, consumers, initializers

# Scaling their input's channels by a positive factor scales their output's likewise, whatever the values are.
_TIES = frozenset({"Add", "Relu", "LeakyRelu", "MaxPool", "AveragePool"})
# How many of its 8 bits a channel may lack on average before its stream is touched. Trained with batch normalisation
# ResNet-18 and MobileNetV2 lack 0.4 to 0.9, where balancing gains nothing; over three decades they lack 4 to 5.
_BITS_LACKING = 2.0
# A channel that was all but silent on the calibration images may wake up on others, and then must not be cut off.
_MOST_BITS = 12


@dataclass(frozen=True, slots=True)
class Stream:
    """Tensors [N, channels, ...] in which a channel can only have one scale, and the convolutions around them.

    `writers` and `readers` are names of nodes; one that reads the stream and adds to it is in both.
    """

    tensors: tuple[str, ...]
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    channels: int


Levels = Mapping[str, list[float]]


def streams(graph: Any) -> tuple[Stream, ...]:
    """All streams of the graph whose channels may be scaled, in the graph's order."""
    if any(attribute.HasField("g") or attribute.graphs for node in graph.node for attribute in node.attribute):
        # Inner graphs read tensors without naming them as inputs.
        return ()
    weights = _own_weights(graph)
    free = {node.name for node in graph.node if _is_scalable(node, weights)}
    foreign = _foreign(graph, free)
    groups = _tied(graph, free)
    found = (_stream(graph, group, free, weights) for group in groups if foreign.isdisjoint(group))
    return tuple(stream for stream in found if stream is not None)


def _own_weights(graph: Any) -> dict[str, Any]:
    """The fp32 constants that one node reads, once: changing one changes nothing else."""
    given = {tensor.name for tensor in (*graph.input, *graph.output)}
    readers = consumers(graph)
    return {
        name: tensor
        for name, tensor in initializers(graph).items()
        if tensor.data_type == tensor.FLOAT and name not in given and len(readers[name]) == 1
    }


def _is_scalable(node: Any, weights: Mapping[str, Any]) -> bool:
    return node.op_type == "Conv" and not node.domain and all(name in weights for name in node.input[1:] if name)


def _foreign(graph: Any, free: set[str]) -> set[str]:
    """The tensors that somebody else depends on, or that nobody computes."""
    found = {tensor.name for tensor in (*graph.input, *graph.output, *graph.initializer)}
    for node in graph.node:
        if node.name not in free and not _is_tie(node):
            found.update(node.input, node.output)
    return found


def _is_tie(node: Any) -> bool:
    # The second output of a MaxPool is positions.
    return node.op_type in _TIES and not node.domain and len(node.output) == 1


def _tied(graph: Any, free: set[str]) -> list[set[str]]:
    """Every tensor that a scalable convolution writes, with all that share the scales of its channels."""
    groups: dict[str, set[str]] = {}
    for node in graph.node:
        if node.name in free:
            groups.setdefault(node.output[0], {node.output[0]})
        elif _is_tie(node):
            names = (*node.input, *node.output)
            joined = set().union(*(groups.get(name, {name}) for name in names))
            groups.update(dict.fromkeys(joined, joined))
    return list({id(group): group for group in groups.values()}.values())


def _stream(graph: Any, group: set[str], free: set[str], weights: Mapping[str, Any]) -> Stream | None:
    """None where there is nobody on one side, or where an addition spreads one channel over several."""
    convolutions = [node for node in graph.node if node.name in free]
    writers = [node for node in convolutions if node.output[0] in group]
    readers = [node for node in convolutions if node.input[0] in group]
    shapes = {(weights[node.input[1]].dims[0], len(weights[node.input[1]].dims)) for node in writers}
    if not readers or len(shapes) != 1:
        return None
    ordered = tuple(name for node in graph.node for name in node.output if name in group)
    ((channels, _),) = shapes
    return Stream(ordered, tuple(n.name for n in writers), tuple(n.name for n in readers), int(channels))


def measure_levels(graph: Path, found: Iterable[Stream], chunks: Iterable[Chunk]) -> Levels:
    """The largest magnitude of each channel over all images, for each tensor of the streams, of which there is one."""
    widths = {name: stream.channels for stream in found for name in stream.tensors}
    levels = {name: np.zeros(width) for name, width in widths.items()}
    for values in observed(graph, chunks, set(widths)):
        for name, level in levels.items():
            largest = np.abs(values[name]).reshape(-1, widths[name], values[name][0, 0].size).max(axis=(0, 2))
            np.maximum(level, largest, out=level)
    return {name: level.tolist() for name, level in levels.items()}


def equalize(graph: Path, levels: Levels, target: Path) -> tuple[Path, tuple[str, ...]]:
    """Write to `target` the graph with its unbalanced streams balanced; returns `target` and the tensors scaled.

    Where all are balanced nothing is written, and `graph` is returned.
    """
    import onnx

    model = onnx.load(str(graph))
    scaled: list[str] = []
    for stream in streams(model.graph):
        scales = scales_for(np.max([levels[name] for name in stream.tensors], axis=0))
        if scales is not None:
            _scale(model.graph, stream, scales)
            scaled += stream.tensors
    if not scaled:
        return graph, ()
    onnx.save(model, str(target))
    return target, tuple(scaled)


def scales_for(levels: np.ndarray) -> np.ndarray | None:
    """Powers of two float32 [channels] that raise every channel to more than half of the widest one's level.

    A silent channel's is 1. None where the channels are balanced well enough as they are, or not finite.
    """
    alive = levels > 0
    if not alive.any() or not np.isfinite(levels).all():
        return None
    bits = np.zeros(len(levels))
    bits[alive] = np.log2(levels.max() / levels[alive])
    if bits[alive].mean() < _BITS_LACKING:
        return None
    # Rounded down, so that the tensor's range stays as it was, and what fitted into FP16 still does.
    return np.exp2(np.minimum(np.floor(bits), _MOST_BITS)).astype(np.float32)


def _scale(graph: Any, stream: Stream, scales: np.ndarray) -> None:
    constants = initializers(graph)
    nodes = {node.name: node for node in graph.node}
    for name in stream.writers:
        for constant in nodes[name].input[1:]:
            if constant:
                _multiply(constants[constant], scales.reshape(-1, *[1] * (len(constants[constant].dims) - 1)))
    for name in stream.readers:
        weight = constants[nodes[name].input[1]]
        outputs, inputs, *kernel = weight.dims
        # The outputs of group g read the channels of group g: [groups, 1, channels of a group, 1, ...].
        groups = stream.channels // inputs
        spread = np.repeat(scales.reshape(groups, inputs), outputs // groups, axis=0)
        _multiply(weight, 1 / spread.reshape(outputs, inputs, *[1] * len(kernel)))


def _multiply(tensor: Any, factors: np.ndarray) -> None:
    from onnx import numpy_helper

    tensor.CopyFrom(numpy_helper.from_array(array(tensor) * factors, tensor.name))
