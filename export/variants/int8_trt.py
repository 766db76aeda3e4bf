"""INT8 for TensorRT: symmetric S8S8, per channel, quantise-dequantise pairs where TensorRT fuses them, rest FP16.

The rules (TensorRT documentation, "Explicit quantization"; NVIDIA's Model Optimizer is their executable form):
pairs stand at the inputs of convolutions and matrix products and never at their outputs or biases, so that
convolution, activation and addition become one kernel; of a residual addition the skip input is quantised and
the convolution's own branch is not; layers too small to pay are left out. `violations` checks a file for them.
Knows nothing of accuracy; `verify` and `recover` judge the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from export.variants.calibrate import Calibration, Method
from export.variants.fp16 import CONSTANT_LIMIT, as_fp16, out_of_range
from export.variants.onnx_graph import attribute, consumers, front_nodes, initializers, producers, tidy
from export.variants.quantize import quantize_with_ranges

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
_PRODUCTS = frozenset({"Gemm", "MatMul"})
_POOLS = frozenset({"GlobalAveragePool", "AveragePool"})
# INT8 tensor cores work on 16 (in places 8) channels at once.
_FEWEST_CHANNELS, _CHANNEL_STEP = 16, 8
# The sum is taken in 32 bits, so only its result must fit into FP16, with room for images not seen.
_RESULT_LIMIT = CONSTANT_LIMIT / 2
# Scales are FP16, too; below this one its spacing of 2**-24 puts them off by more than 1 %.
_SMALLEST_SCALE = 2.0**-18


def quantize_for_tensorrt(
    calibration: Calibration,
    method: Method,
    keep: frozenset[str],
    target: Path,
    only: frozenset[str] | None = None,
) -> Mapping[str, str]:
    """Write `target`; the layers that could be INT8 and are not, each with its reason.

    Raises JobError when the graph cannot be quantised or converted, OSError when the disk is full.
    """
    import onnx

    graph = onnx.load(str(calibration.graph)).graph
    small = unprofitable(graph)
    wide = out_of_range(graph, calibration.ranges["minmax"], _RESULT_LIMIT) | _too_fine(graph, calibration, method)
    weighted = [node.name for node in graph.node if _is_weighted(node, graph)]
    chosen = [
        name
        for name in weighted
        if name not in small and name not in wide and name not in keep and (only is None or name in only)
    ]
    followers = _additions(graph, set(chosen), keep | wide.keys()) + _pools(graph, set(chosen), keep | wide.keys())
    wide_rest = out_of_range(graph, calibration.ranges["minmax"])
    if chosen:
        quantize_with_ranges(
            calibration.graph,
            target,
            calibration.ranges[method],
            activation_type="QInt8",
            nodes_to_quantize=[*chosen, *followers],
            nodes_to_exclude=front_nodes(graph),
            extra_options=_options(graph),
        )
    model = onnx.load(str(target if chosen else calibration.graph))
    _free_the_others(model.graph, {*chosen, *followers})
    _free_the_convolutions_branch(model.graph)
    in_fp32 = {name for name in wide_rest if name not in chosen}
    onnx.save(as_fp16(model, in_fp32), str(target))
    return {name: reason for name, reason in (small | wide).items() if name in weighted}


def unprofitable(graph: Any) -> dict[str, str]:
    """The layers too small or too oddly shaped for an INT8 kernel that pays, each with the reason."""
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
            found[node.name] = f"too small for INT8 to pay: {shape[0]} x {shape[1]} channels"
        elif node.op_type in _PRODUCTS and min(shape[-2:]) < _FEWEST_CHANNELS:
            found[node.name] = f"too small for INT8 to pay: a product of {shape[-2]} x {shape[-1]}"
    return found


def _too_fine(graph: Any, calibration: Calibration, method: Method) -> dict[str, str]:
    """The nodes with an input of so small values that FP16 cannot hold its scale."""
    ranges = calibration.ranges[method]
    return {
        node.name: f"values below {largest:.1g} have no scale in FP16"
        for node in graph.node
        for largest in [min((max(map(abs, ranges[name])) for name in node.input if name in ranges), default=1.0)]
        if largest / 127 < _SMALLEST_SCALE
    }


def _pays(node: Any, shape: list[int], *, is_first: bool) -> bool:
    """`shape` is [outputs, inputs of a group, *kernel]."""
    outputs, inputs, *kernel = shape
    if min(outputs, inputs) >= _FEWEST_CHANNELS:
        return True
    if attribute(node, "group", 1) > 1:
        return outputs % _CHANNEL_STEP == 0 and min(kernel) >= 3
    divides = outputs % _CHANNEL_STEP == 0 or inputs % _CHANNEL_STEP == 0
    return divides and (is_first or max(outputs, inputs) >= _FEWEST_CHANNELS) and len(set(kernel)) == 1


def _is_weighted(node: Any, graph: Any) -> bool:
    constant = {tensor.name for tensor in graph.initializer}
    return node.op_type in _CONVOLUTIONS | _PRODUCTS and len(node.input) > 1 and node.input[1] in constant


def _additions(graph: Any, chosen: set[str], keep: frozenset[str]) -> list[str]:
    """Residual additions that fuse with a quantised convolution."""
    makers = producers(graph)
    return [
        node.name
        for node in graph.node
        if node.op_type == "Add"
        and node.name not in keep
        and all(name in makers for name in node.input)
        and any(makers[name].name in chosen and makers[name].op_type in _CONVOLUTIONS for name in node.input)
    ]


def _pools(graph: Any, chosen: set[str], keep: frozenset[str]) -> list[str]:
    """Average pools behind a quantised convolution, with only its activation between."""
    makers = producers(graph)

    def follows(name: str) -> bool:
        node = makers.get(name)
        while node is not None and node.op_type in ("Relu", "Clip"):
            node = makers.get(node.input[0])
        return node is not None and node.name in chosen

    return [n.name for n in graph.node if n.op_type in _POOLS and n.name not in keep and follows(n.input[0])]


def _options(graph: Any) -> dict[str, Any]:
    return {
        "ActivationSymmetric": True,
        "WeightSymmetric": True,
        "QuantizeBias": False,
        "AddQDQPairToWeight": True,
        "DedicatedQDQPair": False,
        "QDQDisableWeightAdjustForInt32Bias": True,
        "QDQOpTypePerChannelSupportToAxis": {"Conv": 0, "ConvTranspose": 1},
        "OpTypesToExcludeOutputQuantization": sorted({node.op_type for node in graph.node}),
    }


def _free_the_others(graph: Any, quantised: set[str]) -> None:
    """Hand tensors over as they are to all but the quantised nodes; the quantiser lets every reader read its pair."""
    makers = producers(graph)
    for node in graph.node:
        if node.name in quantised or node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        for index, name in enumerate(node.input):
            node.input[index] = _before_pair(name, makers) or name


def _free_the_convolutions_branch(graph: Any) -> None:
    """At each addition, hand the convolution's own result over as it is; the skip input stays quantised."""
    makers = producers(graph)
    for node in graph.node:
        if node.op_type != "Add":
            continue
        for index, name in enumerate(node.input):
            original = _before_pair(name, makers)
            maker = makers.get(original) if original else None
            if original and maker is not None and maker.op_type in _CONVOLUTIONS:
                node.input[index] = original
                break
    tidy(graph)


def _before_pair(name: str, makers: Mapping[str, Any]) -> str | None:
    """The tensor that a quantise-dequantise pair gives as `name`; None where there is no pair."""
    dequantize = makers.get(name)
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    quantize = makers.get(dequantize.input[0])
    return quantize.input[0] if quantize is not None else None


def violations(graph: Any, kept: Collection[str] = ()) -> list[str]:
    """What in a file's placement of quantise-dequantise pairs is against the rules; empty for a sound file.

    The nodes of `kept` were left in higher precision on purpose.
    """
    makers, readers, constants = producers(graph), consumers(graph), initializers(graph)
    found = []
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            found += _wrong_pair(node, makers, constants)
        elif node.op_type in _CONVOLUTIONS | _PRODUCTS:
            quantised = [name in makers and makers[name].op_type == "DequantizeLinear" for name in node.input]
            if quantised[2:] == [True]:
                found.append(f"{node.name}: its bias is quantised")
            if quantised[0] != quantised[1]:
                found.append(f"{node.name}: only one of its input and weight is quantised")
        elif node.op_type in ("Relu", "Clip", "BatchNormalization") and _before_pair(node.input[0], makers):
            found.append(f"{node.name}: a pair stands between it and what it is fused with")
        elif node.op_type == "Add" and node.name not in kept:
            found += _wrong_addition(node, makers)
    return found + [f"{name}: quantised and never read" for name in _unread(graph, readers)]


def _wrong_pair(node: Any, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> list[str]:
    from onnx import TensorProto, numpy_helper

    zero = constants.get(node.input[2]) if len(node.input) > 2 else None
    if zero is None or zero.data_type != TensorProto.INT8 or numpy_helper.to_array(zero).any():
        return [f"{node.name}: not symmetric INT8"]
    per_channel = len(constants[node.input[1]].dims) > 0 and constants[node.input[1]].dims[0] > 1
    if per_channel and node.input[0] not in constants:
        return [f"{node.name}: activations are quantised per channel"]
    return []


def _wrong_addition(node: Any, makers: Mapping[str, Any]) -> list[str]:
    """A residual addition behind a quantised convolution has exactly one quantised input, not the convolution's."""
    originals = [_before_pair(name, makers) for name in node.input]
    branches = [makers.get(name) for name in node.input]
    fused = [
        branch is not None and branch.op_type in _CONVOLUTIONS and _before_pair(branch.input[0], makers) is not None
        for branch in branches
    ]
    if any(fused) and all(name in makers for name in node.input) and sum(map(bool, originals)) != 1:
        return [f"{node.name}: its skip input is not quantised"]
    if all(originals) and originals:
        return [f"{node.name}: both of its inputs are quantised"]
    return []


def _unread(graph: Any, readers: Mapping[str, list[Any]]) -> list[str]:
    return [node.name for node in graph.node if node.op_type == "DequantizeLinear" and node.output[0] not in readers]
