"""Channels brought to one range where a layer reads them in 8 bits, by a product in front of the layer.

For engines that round a tensor only where a layer reads it, and compute all that stands before it together with the
layer that wrote it: there a product per channel costs nothing, and no operator in between has to be crossed as in
`convoy.export.variants.equalize`. The layer's weights take the inverse, so that in float nothing changes; factors are
powers of two. Method: SmoothQuant (Xiao et al., 2023, section 4) with all of the difference on the weights' side, which
have a scale per channel. Knows graphs and ranges of channels. Knows nothing of how a file is rounded.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from convoy.export.variants.equalize import Levels, for_reader, multiply, scales_for
from convoy.export.variants.onnx_graph import front_nodes, initializers, tidy
from convoy.export.variants.streams import input_channels, is_scalable, own_weights


def read_channels(graph: Any) -> dict[str, int]:
    """How many channels there are in each tensor [N, channels, ...] that layers with weights of their own read."""
    found: dict[str, int] = {}
    constants = initializers(graph)
    for tensor, nodes in _readers(graph).items():
        counts = {input_channels(node, constants) for node in nodes}
        if len(counts) == 1:
            found[tensor] = counts.pop()
    return found


def level_inputs(graph: Path, levels: Levels, target: Path) -> tuple[Path, tuple[str, ...]]:
    """Write to `target` the graph with unbalanced inputs of layers balanced; returns `target` and the new tensors.

    Where all are balanced nothing is written, and `graph` is returned.
    """
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(str(graph))
    constants, added = initializers(model.graph), []
    for tensor, nodes in _readers(model.graph).items():
        scales = scales_for(np.array(levels[tensor])) if tensor in levels else None
        if scales is None:
            continue
        rank = len(constants[nodes[0].input[1]].dims)
        factors, levelled = f"{tensor}.scales", f"{tensor}.levelled"
        shaped = scales.reshape(1, -1, *[1] * (rank - 2))
        model.graph.initializer.append(numpy_helper.from_array(shaped, factors))
        model.graph.node.append(helper.make_node("Mul", [tensor, factors], [levelled], f"{tensor}.level"))
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
    """The layers that read each tensor, where their weights are their own; bytes of images are level."""
    weights, found = own_weights(graph), defaultdict(list)
    given = {tensor.name for tensor in graph.input}
    front = set(front_nodes(graph))
    given |= {name for node in graph.node if node.name in front for name in node.output}
    for node in graph.node:
        if node.input and node.input[0] not in given and is_scalable(node, weights):
            found[node.input[0]].append(node)
    return found
