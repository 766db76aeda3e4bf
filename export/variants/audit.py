"""What of a quantised or converted file really runs in 8, 16 or 32 bits.

A pair of nodes that was not fused leaves the layer between in float, and the file no faster than before: so the
optimised graph is read, not the written one. That is possible where the runtime optimises for the variant's own
device; a variant for another device is counted as it is written. Knows graphs; judges nothing.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from convoy.app.engines.onnx_session import new_session, session_options
from convoy.app.engines.openvino import layers_in_8_bits
from convoy.export.variants.onnx_graph import producers
from convoy.models.bundle import NodeAudit, Target

# These change how a value is written down, not the value.
_CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear", "Cast", "ReorderInput", "ReorderOutput"})
_MOVES = frozenset(
    {"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Concat", "Split", "Gather"}
    | {"Identity", "Shape"}
)
_ONNX_NAMES = {
    1: "fp32",
    2: "int8",
    3: "int8",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "fp16",
    11: "fp64",
    16: "bf16",
    17: "fp8",
}
_COMPUTING = frozenset({"int8", "fp8", "fp16", "fp32", "fp64", "bf16"})


def audit(
    path: Path, target: Target, kept: Mapping[str, str], multiply_adds: Mapping[str, float] | None = None
) -> NodeAudit:
    """Counts of the nodes that compute, by precision; conversions between precisions count as "conversion".

    `multiply_adds` are those of the float graph's nodes; with them the share that is done in 8 bits is counted, too.
    """
    if target == "cpu":
        with tempfile.TemporaryDirectory(prefix="convoy-audit-") as folder:
            graph = _optimised(path, Path(folder) / "optimised.onnx")
    else:
        graph = onnx.load(str(path)).graph
    share = _share(path, target, multiply_adds) if multiply_adds else None
    return NodeAudit(dict(sorted(count_nodes(graph).items())), dict(kept), share)


def _share(path: Path, target: Target, multiply_adds: Mapping[str, float]) -> float:
    """Of the multiply-adds those of layers in 8 bits: as OpenVINO has compiled them, for others as the file says.

    The graph that ONNX Runtime has optimised has other names.
    """
    graph = onnx.load(str(path)).graph
    if target == "openvino":
        known = layers_in_8_bits(path)
        in_eight = {node.name for node in graph.node if known & {node.name, *node.output}}
    else:
        makers = producers(graph)
        in_eight = {node.name for node in graph.node if _eight_bits(node, makers, {})}
    return sum(count for name, count in multiply_adds.items() if name in in_eight) / sum(multiply_adds.values())


def _optimised(path: Path, aside: Path) -> Any:
    options = session_options()
    options.optimized_model_filepath = str(aside)
    new_session(path, options)
    return onnx.load(str(aside)).graph


def count_nodes(graph: Any) -> Counter[str]:
    """How many nodes compute in which precision, and how many only convert.

    A node computes in the type of its first input. Behind a dequantisation of both input and weight, a layer
    is what TensorRT makes a kernel of 8 bits of, and is counted so.
    """
    types = {tensor.name: _ONNX_NAMES.get(tensor.data_type, "other") for tensor in graph.initializer}
    for tensor in (*graph.input, *graph.value_info):
        types[tensor.name] = _ONNX_NAMES.get(tensor.type.tensor_type.elem_type, "other")
    makers = producers(graph)
    found: Counter[str] = Counter()
    for node in graph.node:
        first = types.get(node.input[0], "other") if node.input else "other"
        for output in node.output:
            types.setdefault(output, _result(node, first, types))
        if node.op_type in _CONVERSIONS:
            found["conversion"] += 1
            continue
        if node.op_type in _MOVES:
            continue
        precision = _eight_bits(node, makers, types) or _bf16(node, makers, types) or first
        if precision in _COMPUTING:
            found[precision] += 1
    return found


def _bf16(node: Any, makers: Mapping[str, Any], types: Mapping[str, str]) -> str:
    """BF16 where the weight is cast from that: so OpenVINO computes the layer."""
    casts = [makers[name] for name in node.input[1:2] if name in makers and makers[name].op_type == "Cast"]
    return "bf16" if casts and types.get(casts[0].input[0]) == "bf16" else ""


def _eight_bits(node: Any, makers: Mapping[str, Any], types: Mapping[str, str]) -> str:
    """The 8 bits that a layer computes in; empty where it does not."""
    if node.op_type.startswith("QLinear") or node.op_type in ("QGemm", "ConvInteger", "MatMulInteger"):
        return "int8"
    pairs = [makers[name] for name in node.input[:2] if name in makers and makers[name].op_type == "DequantizeLinear"]
    if len(pairs) < 2:
        return ""
    return "fp8" if types.get(pairs[0].input[0]) == "fp8" else "int8"


def _result(node: Any, first: str, types: Mapping[str, str]) -> str:
    if node.op_type == "Cast":
        return next(_ONNX_NAMES.get(a.i, "other") for a in node.attribute if a.name == "to")
    if node.op_type == "QuantizeLinear":
        return "fp8" if types.get(node.input[-1]) == "fp8" else "int8"
    if node.op_type == "DequantizeLinear":
        return types.get(node.input[1], "fp32")
    if node.op_type == "QGemm":
        # Without a scale for its result, which would be the eighth input, it gives floats.
        return "int8" if len(node.input) > 7 and node.input[7] else "fp32"
    return first
