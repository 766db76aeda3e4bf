"""INT8 for TensorRT and for OpenVINO: quantise-dequantise pairs where engines fuse them, weights per channel.

The rules are TensorRT's ("Explicit quantization"; NVIDIA's Model Optimizer is their executable form). Pairs stand at
the inputs of convolutions and matrix products and never at their outputs or biases, so that convolution, activation and
addition become one kernel. Of a residual addition the skip input is quantised and the convolution's own branch is not.
The tests hold files against these rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from convoy.export.variants.calibrate import Conversion, Ranges
from convoy.export.variants.halves import CONSTANT_LIMIT, as_fp16, out_of_range
from convoy.export.variants.onnx_graph import attribute, consumers, front_nodes, initializers, producers, tidy
from convoy.export.variants.quantize import quantize_with_ranges

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
PRODUCTS = frozenset({"Gemm", "MatMul"})
_POOLS = frozenset({"GlobalAveragePool", "AveragePool"})
# Scales are FP16, too; below this one its spacing of 2**-24 puts them off by more than 1 %.
SMALLEST_SCALE = 2.0**-18


@dataclass(frozen=True, slots=True)
class Scheme:
    """One form of 8 bits. A scale is a range over `largest`, the largest number of the 8 bits.

    `unfit` names the layers that its kernels do not take or do not pay for, each with the reason. `rewrite` gets
    the graph in FP32 with INT8 pairs, and gives it with pairs of this form. `signed` are activations in symmetric
    S8, others in U8 with a zero point. Where it `rounds_skips` residual additions and pools behind layers have pairs,
    too. The rest of the graph is FP16 where `is_half`.
    """

    largest: float
    unfit: Callable[[Any], Mapping[str, str]]
    rewrite: Callable[[Any], Any]
    signed: bool = True
    rounds_skips: bool = True
    is_half: bool = True

    def quantize(self, conversion: Conversion, target: Path) -> Mapping[str, str]:
        """Write `target`; the layers that could have 8 bits and have not, each with its reason.

        Raises JobError when the graph cannot be quantised or converted, OSError when the disk is full.
        """
        calibration = conversion.calibration
        graph = onnx.load(str(calibration.graph)).graph
        unfit = self.unfit(graph)
        wide: dict[str, str] = {}
        if self.is_half:
            # Sums are taken in 32 bits, so only the result must fit into FP16, with room for images not seen.
            wide = out_of_range(graph, calibration.ranges["minmax"], CONSTANT_LIMIT / 2)
            wide |= _too_fine(graph, conversion.ranges, self)
        constant = {tensor.name for tensor in graph.initializer}
        by_weights = [node for node in graph.node if node.op_type in CONVOLUTIONS | PRODUCTS and len(node.input) > 1]
        weighted = [node.name for node in by_weights if node.input[1] in constant]
        chosen = [name for name in weighted if name not in unfit and name not in wide and conversion.takes(name)]
        left = conversion.keep | wide.keys()
        followers = _additions(graph, set(chosen), left) + _pools(graph, set(chosen), left) if self.rounds_skips else []
        if chosen:
            quantize_with_ranges(
                calibration.graph,
                target,
                conversion.ranges,
                activation_type="QInt8" if self.signed else "QUInt8",
                nodes_to_quantize=[*chosen, *followers],
                nodes_to_exclude=front_nodes(graph),
                extra_options=_options(graph, signed=self.signed),
            )
        model = onnx.load(str(target if chosen else calibration.graph))
        _free_the_others(model.graph, {*chosen, *followers})
        _free_the_convolutions_branch(model.graph)
        model = self.rewrite(model)
        if self.is_half:
            in_fp32 = out_of_range(graph, calibration.ranges["minmax"]).keys() - set(chosen)
            model = as_fp16(model, in_fp32)
        onnx.save(model, str(target))
        return {name: reason for name, reason in (dict(unfit) | wide).items() if name in weighted}


def _too_fine(graph: Any, ranges: Ranges, scheme: Scheme) -> dict[str, str]:
    """The nodes with an input of so small values that FP16 cannot hold its scale."""
    return {
        node.name: f"values below {largest:.1g} have no scale in FP16"
        for node in graph.node
        for largest in [min((max(map(abs, ranges[name])) for name in node.input if name in ranges), default=math.inf)]
        if largest / scheme.largest < SMALLEST_SCALE
    }


def _additions(graph: Any, chosen: set[str], keep: frozenset[str]) -> list[str]:
    """Residual additions that fuse with a quantised convolution."""
    makers = producers(graph)
    return [
        node.name
        for node in graph.node
        if node.op_type == "Add"
        and node.name not in keep
        and all(name in makers for name in node.input)
        and any(makers[name].name in chosen and makers[name].op_type in CONVOLUTIONS for name in node.input)
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


def _options(graph: Any, *, signed: bool) -> dict[str, Any]:
    return {
        "ActivationSymmetric": signed,
        "WeightSymmetric": True,
        "QuantizeBias": False,
        # Engines of CPUs take weights as they are stored, TensorRT rounds them itself.
        "AddQDQPairToWeight": signed,
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
            node.input[index] = before_pair(name, makers) or name


def _free_the_convolutions_branch(graph: Any) -> None:
    """At each addition, hand the convolution's own result over as it is; the skip input stays quantised."""
    makers = producers(graph)
    for node in graph.node:
        if node.op_type != "Add":
            continue
        for index, name in enumerate(node.input):
            original = before_pair(name, makers)
            maker = makers.get(original) if original else None
            if original and maker is not None and maker.op_type in CONVOLUTIONS:
                node.input[index] = original
                break
    tidy(graph)


def before_pair(name: str, makers: Mapping[str, Any]) -> str | None:
    """The tensor that a quantise-dequantise pair gives as `name`; None where there is no pair."""
    dequantize = makers.get(name)
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    quantize = makers.get(dequantize.input[0])
    return quantize.input[0] if quantize is not None else None


# INT8 tensor cores work on as many channels at once, in places on 8.
_FEWEST_CHANNELS = 16


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
        return outputs % 8 == 0 and min(kernel) >= 3
    divides = outputs % 8 == 0 or inputs % 8 == 0
    return divides and (is_first or max(outputs, inputs) >= _FEWEST_CHANNELS) and len(set(kernel)) == 1


FOR_TENSORRT = Scheme(127, unprofitable, lambda model: model)


# The file for ONNX Runtime rounds what each operator gives, since its kernels of 8 bits take and give nothing else, and
# an operator without such a kernel stands alone in float between two conversions: a SiLU costs more there than 8 bits
# save. OpenVINO's convolutions apply activations, products per channel and the rounding to their sums in 32 bits,
# before these are written (oneDNN, "Primitive attributes: post-ops"). So its pairs stand only where layers read.


# Between two layers these have no kernel of 8 bits in ONNX Runtime, or only one that is dearer than floats.
_IN_FLOAT = frozenset(
    {"Sigmoid", "HardSigmoid", "HardSwish", "Gelu", "Erf", "Tanh", "Softplus", "LayerNormalization"}
    | {"BatchNormalization"}
)


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
FOR_OPENVINO = Scheme(255, lambda graph: {}, _with_whole_hardswish, signed=False, rounds_skips=False, is_half=False)
