"""Scale the channels of a stream to one range before INT8 rounds them, which changes nothing in float.

A tensor has one INT8 range for all of its channels, so a channel a thousand times smaller than the widest rounds to
zero. But between convolutions the scale of a channel is arbitrary: the writer may multiply it and the reader divide it
again. Here each channel is raised to the range of its stream's widest. Factors are powers of two, which only change
exponents, so fp32 answers stay bit-identical as long as the runtime uses the same operators. (ONNX Runtime fuses a
sigmoid and its product into one operator, which then sees other values.)

Method: cross-layer equalisation (Nagel et al., Data-Free Quantization, 2019, section 4.1) with two differences. Ranges
are those of the activations, measured on the calibration images, because weights have a scale per channel and need
none. And everything that residual additions connect is scaled together. `level_inputs` scales with a product in front
of each layer instead, for engines that round a tensor only where a layer reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convoy.export.rows import Chunk
from convoy.export.variants.calibrate import observed
from convoy.export.variants.onnx_graph import array, attribute, front_nodes, initializers, tidy
from convoy.export.variants.streams import GATES, Stream, input_channels, is_scalable, own_weights, streams

Levels = Mapping[str, list[float]]


def channels_of(found: Iterable[Stream]) -> dict[str, int]:
    """The number of channels of each tensor of the streams."""
    return {name: len(places) for stream in found for name, places in stream.places.items()}


def measure_levels(graph: Path, channels: Mapping[str, int], chunks: Iterable[Chunk]) -> Levels:
    """The largest magnitude of each channel over all images, for each tensor of `channels`, of which there is one."""
    levels = {name: np.zeros(count) for name, count in channels.items()}
    for values in observed(graph, chunks, set(channels)):
        for name, level in levels.items():
            largest = np.abs(values[name]).reshape(len(values[name]), channels[name], -1).max(axis=(0, 2))
            np.maximum(level, largest, out=level)
    return {name: level.tolist() for name, level in levels.items()}


def equalize(graph: Path, levels: Levels, target: Path) -> tuple[Path, tuple[str, ...]]:
    """Write the graph with balanced streams to `target`; returns `target` and the scaled tensors.

    If all are balanced, nothing is written, and `graph` is returned.
    """
    model = onnx.load(str(graph))
    scaled: list[str] = []
    for stream in streams(model.graph):
        scales = scales_for(_of_stream(stream, levels))
        if scales is not None:
            scales[~stream.free] = 1
            scaled += [*stream.tensors, *_scale(model.graph, stream, scales)]
    if not scaled:
        return graph, ()
    tidy(model.graph)
    onnx.save(model, str(target))
    return target, tuple(scaled)


def _of_stream(stream: Stream, levels: Levels) -> np.ndarray:
    found = np.zeros(stream.count)
    for name, places in stream.places.items():
        np.maximum.at(found, places, levels[name])
    return found


def scales_for(levels: np.ndarray) -> np.ndarray | None:
    """Powers of two float32 [channels] that raise every channel to more than half of the widest one's level.

    1 for a silent channel. None if the channels are balanced well enough, or not finite.
    """
    alive = levels > 0
    if not alive.any() or not np.isfinite(levels).all():
        return None
    bits = np.zeros(len(levels))
    bits[alive] = np.log2(levels.max() / levels[alive])
    # How many of its 8 bits a channel may lack on average before its stream is scaled. Trained with batch
    # normalisation, ResNet-18 and MobileNetV2 lack 0.4 to 0.9, where balancing gains nothing; channels over three
    # decades lack 4 to 5.
    if bits[alive].mean() < 2.0:
        return None
    # Rounded down, so the tensor's range stays the same, and what fitted into FP16 still does. A channel that was
    # nearly silent on the calibration images may be active on others and must not be clipped then.
    return np.exp2(np.minimum(np.floor(bits), 12)).astype(np.float32)


def _scale(graph: Any, stream: Stream, scales: np.ndarray) -> list[str]:
    """Multiply the scales into the weights. Returns the tensors that had to be added."""
    constants = initializers(graph)
    nodes = {node.name: node for node in graph.node}
    for name in stream.writers:
        node = nodes[name]
        for constant in filter(None, node.input[1:]):
            own = scales[stream.places[node.output[0]]]
            multiply(constants[constant], own.reshape(-1, *[1] * (len(constants[constant].dims) - 1)))
    for name in stream.readers:
        node = nodes[name]
        multiply(constants[node.input[1]], for_reader(node, constants, 1 / scales[stream.places[node.input[0]]]))
    added: list[str] = []
    for name in stream.crossings:
        own = scales[stream.places[nodes[name].input[0]]]
        if (own != 1).any():
            # The first axis of a convolution's weights is that of its outputs, the second that of its channels.
            rank = len(constants[nodes[stream.writers[0]].input[1]].dims)
            added += _cross(graph, nodes[name], own.reshape(1, -1, *[1] * (rank - 2)))
    return added


def for_reader(node: Any, constants: Mapping[str, Any], factors: np.ndarray) -> np.ndarray:
    """Factors [channels] in the shape of the weights that multiply these channels."""
    dims = constants[node.input[1]].dims
    if node.op_type == "Gemm":
        is_transposed = attribute(node, "transB", 0)
        # A flattened map has each channel several times in a row.
        spread = np.repeat(factors, dims[1 if is_transposed else 0] // len(factors))
        return spread if is_transposed else spread[:, None]
    outputs, inputs, *kernel = dims
    # The outputs of group g read the channels of group g: [groups, 1, channels of a group, 1, ...].
    groups = len(factors) // inputs
    spread = np.repeat(factors.reshape(groups, inputs), outputs // groups, axis=0)
    return spread.reshape(outputs, inputs, *[1] * len(kernel))


def _cross(graph: Any, node: Any, scales: np.ndarray) -> list[str]:
    """Restore the scale for a node that is not homogeneous, or scale its limits. Returns the tensors added."""

    def constant(name: str, values: np.ndarray) -> str:
        graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
        return name

    (source, *limits), (output,) = node.input, node.output
    if node.op_type == "Clip":
        top = array(initializers(graph)[limits[1]]) * scales
        own = constant(f"{node.name}.limits", top)
        positive = f"{output}.positive"
        graph.node.append(onnx.helper.make_node("Relu", [source], [positive], f"{node.name}.positive"))
        graph.node.append(onnx.helper.make_node("Min", [positive, own], [output], f"{node.name}.limited"))
        graph.node.remove(node)
        return [positive]
    before = f"{source}.for.{node.name}"
    factors = constant(f"{node.name}.scales", 1 / scales)
    graph.node.append(onnx.helper.make_node("Mul", [source, factors], [before], f"{node.name}.unscale"))
    if node.op_type in GATES:
        node.input[0] = before
        return [before]
    gate = f"{output}.gate"
    made = onnx.helper.make_node("HardSigmoid", [before], [gate], f"{node.name}.gate", alpha=1 / 6, beta=0.5)
    graph.node.extend([made, onnx.helper.make_node("Mul", [source, gate], [output], f"{node.name}.gated")])
    graph.node.remove(node)
    return [before, gate]


def multiply(tensor: Any, factors: np.ndarray) -> None:
    """Multiply a constant of the graph, in place."""
    tensor.CopyFrom(onnx.numpy_helper.from_array(array(tensor) * factors, tensor.name))


# Scale channels to one range where a layer reads them in 8 bits, with a product in front of the layer. For engines that
# round a tensor only where a layer reads it, and fuse everything before it with the layer that wrote it: there a
# product per channel is free, and no operator in between must be crossed as above. The layer's weights get the inverse,
# so nothing changes in float; factors are powers of two. Method: SmoothQuant (Xiao et al., 2023, section 4) with the
# whole difference on the weights, which have a scale per channel.


def read_channels(graph: Any) -> dict[str, int]:
    """The number of channels of each tensor [N, channels, ...] that layers with their own weights read."""
    found: dict[str, int] = {}
    constants = initializers(graph)
    for tensor, nodes in _readers(graph).items():
        counts = {input_channels(node, constants) for node in nodes}
        if len(counts) == 1:
            found[tensor] = counts.pop()
    return found


def level_inputs(graph: Path, levels: Levels, target: Path) -> tuple[Path, tuple[str, ...]]:
    """Write the graph with balanced layer inputs to `target`; returns `target` and the new tensors.

    If all are balanced, nothing is written, and `graph` is returned.
    """
    model = onnx.load(str(graph))
    constants, added = initializers(model.graph), []
    for tensor, nodes in _readers(model.graph).items():
        scales = scales_for(np.array(levels[tensor])) if tensor in levels else None
        if scales is None:
            continue
        rank = len(constants[nodes[0].input[1]].dims)
        factors, levelled = f"{tensor}.scales", f"{tensor}.levelled"
        shaped = scales.reshape(1, -1, *[1] * (rank - 2))
        model.graph.initializer.append(onnx.numpy_helper.from_array(shaped, factors))
        model.graph.node.append(onnx.helper.make_node("Mul", [tensor, factors], [levelled], f"{tensor}.level"))
        for node in nodes:
            multiply(constants[node.input[1]], for_reader(node, constants, 1 / scales))
            node.input[0] = levelled
        added.append(levelled)
    if not added:
        return graph, ()
    tidy(model.graph)
    onnx.save(model, str(target))
    return target, tuple(added)


def _readers(graph: Any) -> dict[str, list[Any]]:
    """The layers that read each tensor with their own weights; bytes of images are balanced already."""
    weights, found = own_weights(graph), defaultdict(list)
    given = {tensor.name for tensor in graph.input}
    front = set(front_nodes(graph))
    given |= {name for node in graph.node if node.name in front for name in node.output}
    for node in graph.node:
        if node.input and node.input[0] not in given and is_scalable(node, weights):
            found[node.input[0]].append(node)
    return found
