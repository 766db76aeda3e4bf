"""INT8 for TensorRT: symmetric S8S8 in `convoy.export.variants.pairs`, but for layers too small to pay.

Knows which layers these are. Knows nothing of accuracy; `verify` and `recover` judge the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convoy.export.variants.calibrate import Conversion
from convoy.export.variants.onnx_graph import attribute, front_nodes, initializers
from convoy.export.variants.pairs import PRODUCTS, Scheme, quantize_in_pairs

# INT8 tensor cores work on 16 (in places 8) channels at once.
_FEWEST_CHANNELS, _CHANNEL_STEP = 16, 8


def quantize_for_tensorrt(conversion: Conversion, target: Path) -> Mapping[str, str]:
    """Write `target`; the layers that could be INT8 and are not, each with its reason.

    Raises JobError when the graph cannot be quantised or converted, OSError when the disk is full.
    """
    return quantize_in_pairs(_INT8, conversion, target)


def unprofitable(graph: Any, name: str = "INT8") -> dict[str, str]:
    """The layers too small or too oddly shaped for a kernel of 8 bits that pays, each with the reason."""
    constants = initializers(graph)
    front = set(front_nodes(graph))
    start = {tensor.name for tensor in graph.input}
    start |= {output for node in graph.node if node.name in front for output in node.output}
    found = {}
    for node in graph.node:
        weight = constants.get(node.input[1]) if len(node.input) > 1 else None
        if weight is None:
            continue
        shape = list(weight.dims)
        if node.op_type == "Conv" and not _pays(node, shape, is_first=node.input[0] in start):
            found[node.name] = f"too small for {name} to pay: {shape[0]} x {shape[1]} channels"
        elif node.op_type in PRODUCTS and min(shape[-2:]) < _FEWEST_CHANNELS:
            found[node.name] = f"too small for {name} to pay: a product of {shape[-2]} x {shape[-1]}"
    return found


def _pays(node: Any, shape: list[int], *, is_first: bool) -> bool:
    """`shape` is [outputs, inputs of a group, *kernel]."""
    outputs, inputs, *kernel = shape
    if min(outputs, inputs) >= _FEWEST_CHANNELS:
        return True
    if attribute(node, "group", 1) > 1:
        return outputs % _CHANNEL_STEP == 0 and min(kernel) >= 3
    divides = outputs % _CHANNEL_STEP == 0 or inputs % _CHANNEL_STEP == 0
    return divides and (is_first or max(outputs, inputs) >= _FEWEST_CHANNELS) and len(set(kernel)) == 1


_INT8 = Scheme(127, unprofitable, lambda model: model)
