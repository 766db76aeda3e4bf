"""INT8 for OpenVINO: pairs only where layers read, so that all between two layers is computed in float, in the first.

The file for ONNX Runtime rounds what each operator gives, since its kernels of 8 bits take and give nothing else, and
an operator that has no such kernel stands alone in float between two conversions: a SiLU costs more there than 8 bits
save. OpenVINO's convolutions apply activations, products per channel and the rounding to their sums in 32 bits, before
these are written (oneDNN, "Primitive attributes: post-ops"). Knows what suits these kernels. Knows nothing of accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx import helper

from convoy.export.variants.calibrate import Conversion
from convoy.export.variants.onnx_graph import attribute, consumers, tidy
from convoy.export.variants.pairs import Scheme, quantize_in_pairs

# Between two layers these have no kernel of 8 bits in ONNX Runtime, or only one that is dearer than floats.
_IN_FLOAT = frozenset(
    {"Sigmoid", "HardSigmoid", "HardSwish", "Gelu", "Erf", "Tanh", "Softplus", "LayerNormalization"}
    | {"BatchNormalization"}
)


def quantize_for_openvino(conversion: Conversion, target: Path) -> Mapping[str, str]:
    """Write `target`; nothing is left in higher precision by rule.

    Raises JobError when the graph cannot be quantised, OSError when the disk is full.
    """
    return quantize_in_pairs(_SCHEME, conversion, target)


def gains_from_pairs(graph: Any) -> bool:
    """Whether the graph has what makes this file differ from the one for ONNX Runtime."""
    return any(node.op_type in _IN_FLOAT for node in graph.node)


def _with_whole_hardswish(model: Any) -> Any:
    """x * HardSigmoid(x) as the one operator that a convolution applies; preparing the graph has split it."""
    graph = model.graph
    readers = consumers(graph)
    for gate in [node for node in graph.node if node.op_type == "HardSigmoid"]:
        (source,), (output,) = gate.input, gate.output
        factor, bias = attribute(gate, "alpha", 0.2), attribute(gate, "beta", 0.5)
        products = readers[output]
        if len(products) != 1 or products[0].op_type != "Mul" or sorted(products[0].input) != sorted([source, output]):
            continue
        if math.isclose(factor, 1 / 6, rel_tol=1e-6) and math.isclose(bias, 0.5):
            (product,) = products
            whole = helper.make_node("HardSwish", [source], [product.output[0]], product.name)
            graph.node.remove(product)
            graph.node.append(whole)
    tidy(graph)
    return model


# What a residual addition reads beside the layer is not levelled, and in one range small channels would be gone.
_SCHEME = Scheme(255, lambda graph: {}, _with_whole_hardswish, signed=False, rounds_skips=False, is_half=False)
