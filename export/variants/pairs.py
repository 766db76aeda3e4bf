"""INT8 for TensorRT and for OpenVINO, and FP8: quantise-dequantise pairs where engines fuse them, weights per channel.

The rules are TensorRT's ("Explicit quantization"; NVIDIA's Model Optimizer is their executable form). Pairs are at the
inputs of convolutions and matrix products and never at their outputs or biases, so that convolution, activation and
addition become one kernel. At a residual addition the skip input is quantised and the convolution's own branch is not.
The tests check files against these rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convoy.export.sources.torch_job import one_line
from convoy.export.variants.calibrate import Conversion, Ranges
from convoy.export.variants.halves import CONSTANT_LIMIT, as_fp16, out_of_range
from convoy.export.variants.onnx_graph import array, attribute, consumers, front_nodes, initializers, producers, tidy
from convoy.export.variants.quantize import quantize_with_ranges
from convoy.models.errors import JobError

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
PRODUCTS = frozenset({"Gemm", "MatMul"})
_POOLS = frozenset({"GlobalAveragePool", "AveragePool"})
# Scales are FP16, too; below this value its spacing of 2**-24 changes them by more than 1 %.
SMALLEST_SCALE = 2.0**-18


@dataclass(frozen=True, slots=True)
class Scheme:
    """One form of 8 bits. A scale is a range divided by `largest`, the largest 8-bit number.

    `unfit` names the layers that its kernels do not support or do not speed up, each with the reason. `rewrite`
    converts an FP32 graph with INT8 pairs to pairs of this form. `signed` activations are symmetric S8, others U8 with
    a zero point. If it `rounds_skips`, residual additions and pools behind layers have pairs, too. If it `is_half`, the
    rest of the graph is FP16.
    """

    largest: float
    unfit: Callable[[Any], Mapping[str, str]]
    rewrite: Callable[[Any], Any]
    signed: bool = True
    rounds_skips: bool = True
    is_half: bool = True

    def quantize(self, conversion: Conversion, target: Path) -> Mapping[str, str]:
        """Write `target`. Returns the layers that could have 8 bits and do not, each with its reason.

        Raises JobError if the graph cannot be quantised or converted, and OSError if the disk is full.
        """
        calibration = conversion.calibration
        graph = onnx.load(str(calibration.graph)).graph
        unfit = self.unfit(graph)
        wide: dict[str, str] = {}
        if self.is_half:
            # Sums are in 32 bits, so only the result must fit into FP16, with a margin for unseen images.
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
    """The nodes with an input of such small values that FP16 cannot hold its scale."""
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
        # CPU engines use weights as stored; TensorRT rounds them itself.
        "AddQDQPairToWeight": signed,
        "DedicatedQDQPair": False,
        "QDQDisableWeightAdjustForInt32Bias": True,
        "QDQOpTypePerChannelSupportToAxis": {"Conv": 0, "ConvTranspose": 1},
        "OpTypesToExcludeOutputQuantization": sorted({node.op_type for node in graph.node}),
    }


def _free_the_others(graph: Any, quantised: set[str]) -> None:
    """Connect all but the quantised nodes to the original tensors; the quantiser connects every reader to the pair."""
    makers = producers(graph)
    for node in graph.node:
        if node.name in quantised or node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        for index, name in enumerate(node.input):
            node.input[index] = before_pair(name, makers) or name


def _free_the_convolutions_branch(graph: Any) -> None:
    """At each addition, use the convolution's result unquantised; the skip input stays quantised."""
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
    """The tensor before the quantise-dequantise pair that gives `name`; None if there is no pair."""
    dequantize = makers.get(name)
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    quantize = makers.get(dequantize.input[0])
    return quantize.input[0] if quantize is not None else None


# INT8 tensor cores work on this many channels at once, in places on 8.
_FEWEST_CHANNELS = 16


def unprofitable(graph: Any, name: str = "INT8") -> dict[str, str]:
    """The layers too small or too unusual for a profitable 8-bit kernel, each with the reason."""
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


# The file for ONNX Runtime rounds the output of each operator, because its 8-bit kernels read and write nothing else,
# and an operator without such a kernel runs in float between two conversions: a SiLU then costs more than 8 bits save.
# OpenVINO's convolutions apply activations, products per channel and the rounding to their 32-bit sums before these are
# written (oneDNN, "Primitive attributes: post-ops"). So its pairs are only where layers read.


# Between two layers, these have no 8-bit kernel in ONNX Runtime, or only one that is slower than float.
_IN_FLOAT = frozenset(
    {"Sigmoid", "HardSigmoid", "HardSwish", "Gelu", "Erf", "Tanh", "Softplus", "LayerNormalization"}
    | {"BatchNormalization"}
)


def gains_from_pairs(graph: Any) -> bool:
    """Whether the graph has anything that makes this file differ from the one for ONNX Runtime."""
    return any(node.op_type in _IN_FLOAT for node in graph.node)


def _with_whole_hardswish(model: Any) -> Any:
    """Restore x * HardSigmoid(x) as the one operator that a convolution fuses; preparing the graph has split it."""
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
            whole = onnx.helper.make_node("HardSwish", [source], [product.output[0]], product.name)
            graph.node.remove(product)
            graph.node.append(whole)
    tidy(graph)
    return model


# The skip input of a residual addition is not balanced, and small channels would vanish in one range.
FOR_OPENVINO = Scheme(255, lambda graph: {}, _with_whole_hardswish, signed=False, rounds_skips=False, is_half=False)


# FP8 (E4M3, the 8-bit float of NVIDIA's GPUs from compute capability 8.9 on) has its pairs where INT8 for TensorRT has
# them: a scale is the range over 448, E4M3's largest number. onnxruntime's quantiser would take scales from standard
# deviations and one for all channels, so it only places INT8 pairs here, and they are rewritten. Weights are stored as
# FP8, in a quarter of FP32's bytes. A float depends less on calibration than an integer: it is as exact at a thousandth
# of its range as at the end. So no range methods are compared, and min-max, which clips nothing, is used.


LARGEST = 448.0
# NVIDIA's Model Optimizer leaves out convolutions of other channels or with more values in their kernels. TensorRT for
# RTX 1.7 runs large kernels in FP16 behind the pairs, and pads the channels: for a memory-bound depthwise convolution,
# that quadruples the bytes.
_CHANNEL_STEP, _MOST_TAPS = 16, 32
# The first opset whose pairs support E4M3.
_OPSET = 19


def unfit(graph: Any) -> dict[str, str]:
    """The layers that FP8 kernels do not support or do not speed up, each with the reason."""
    constants, found = initializers(graph), unprofitable(graph, "FP8")
    for node in graph.node:
        weight = constants.get(node.input[1]) if len(node.input) > 1 else None
        if node.op_type not in CONVOLUTIONS or weight is None or node.name in found:
            continue
        first, second, *kernel = weight.dims
        if node.op_type == "ConvTranspose":
            found[node.name] = "FP8 has no kernels for transposed convolutions"
        elif math.prod(kernel) > _MOST_TAPS:
            found[node.name] = f"FP8 kernels take {_MOST_TAPS} values at most, not {' x '.join(map(str, kernel))}"
        elif first % _CHANNEL_STEP or second % _CHANNEL_STEP:
            found[node.name] = f"FP8 kernels take multiples of {_CHANNEL_STEP} channels, not {first} x {second}"
    return found


def _rewritten(model: Any) -> Any:
    """The model with an FP8 pair for every INT8 pair, and its weights in FP8."""
    model = _at_opset(model)
    graph = model.graph
    constants = initializers(graph)
    pairs = [node for node in graph.node if _is_of_int8_pair(node, constants)]
    for name in {node.input[1] for node in pairs}:
        _rescale(constants[name])
    for name in {node.input[2] for node in pairs}:
        constants[name].CopyFrom(_stored(name, np.zeros(tuple(constants[name].dims), np.uint8)))
    for node in pairs:
        if node.op_type == "QuantizeLinear" and node.input[0] in constants:
            weight, scale = (array(constants[name]) for name in node.input[:2])
            graph.initializer.append(_stored(node.output[0], to_fp8(weight, scale, attribute(node, "axis", 1))))
            graph.node.remove(node)
    # They mark the pairs as INT8.
    del graph.value_info[:]
    tidy(graph)
    return model


def _is_of_int8_pair(node: Any, constants: Mapping[str, Any]) -> bool:
    """Whether it is half of a pair that was placed here; pairs of the original network stay as they are."""
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or len(node.input) < 3:
        return False
    zero = constants.get(node.input[2])
    if zero is None or zero.data_type != onnx.TensorProto.INT8 or array(zero).any():
        return False
    return node.op_type == "QuantizeLinear" or node.input[0] not in constants


def _rescale(scale: Any) -> None:
    """Convert INT8's scale to FP8's, rounded to FP16: weights are rounded with the scale that multiplies them later."""
    wanted = np.maximum(array(scale) * np.float32(127.0 / LARGEST), SMALLEST_SCALE)
    scale.CopyFrom(onnx.numpy_helper.from_array(wanted.astype(np.float16).astype(np.float32), scale.name))


def _stored(name: str, values: np.ndarray) -> Any:
    """Bytes as a constant of FP8, in which zero has no bit set either."""
    return onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT8E4M3FN, values.shape, values.tobytes(), raw=True)


def to_fp8(values: np.ndarray, scale: np.ndarray, axis: int) -> np.ndarray:
    """E4M3 [...] of float32 values over their scale, one number or one per index of `axis`; saturating."""
    shares = np.clip(values / _along(scale, values.ndim, axis), -LARGEST, LARGEST)
    rounded: np.ndarray = shares.astype(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.FLOAT8E4M3FN))
    return rounded


def from_fp8(stored: np.ndarray, scale: np.ndarray, axis: int) -> np.ndarray:
    """The float32 values that are `stored` as E4M3 with such a scale."""
    values: np.ndarray = stored.astype(np.float32) * _along(scale, stored.ndim, axis)
    return values


def _along(scale: np.ndarray, dimensions: int, axis: int) -> np.ndarray:
    shape = [1] * dimensions
    if scale.size > 1:
        shape[axis] = -1
    return scale.reshape(shape)


def why_no_fp8(graph: Path) -> str:
    """Why a network cannot have FP8, whatever its ranges; empty if it can."""
    try:
        _at_opset(onnx.load(str(graph), load_external_data=False))
    except JobError as error:
        return str(error)
    return ""


def _at_opset(model: Any) -> Any:
    (opset,) = (entry for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset.version >= _OPSET:
        return model
    try:
        return onnx.version_converter.convert_version(model, _OPSET)
    except Exception as error:  # the converter's errors share no base class
        raise JobError(
            f"fp8 cannot be made from this network of opset {opset.version} ({one_line(str(error))}); export it with "
            f"opset {_OPSET} or newer"
        ) from error


FP8 = Scheme(LARGEST, unfit, _rewritten)
