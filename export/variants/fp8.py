"""FP8 (E4M3, the 8-bit float of NVIDIA's GPUs from compute capability 8.9 on), where INT8 has its pairs, the rest FP16.

The pairs are those of `convoy.export.variants.pairs` with another 8 bits in them: a scale is the range over 448, E4M3's
largest number. onnxruntime's quantiser would take scales from standard deviations and one for all channels, so it only
places INT8 pairs here, and they are rewritten. Weights lie in the file as FP8, in a quarter of FP32's bytes.

A float needs less of its calibration than an integer does: it is as exact at a thousandth of its range as at the end.
So no method of ranges is compared, and min-max, which cuts nothing off, is taken. Knows nothing of accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from convoy.export.sources.torch_job import one_line
from convoy.export.variants.onnx_graph import array, attribute, initializers, tidy
from convoy.export.variants.pairs import CONVOLUTIONS, SMALLEST_SCALE, Scheme, unprofitable
from convoy.models.errors import JobError

LARGEST = 448.0
# NVIDIA's Model Optimizer leaves out convolutions of other channels or of more values in their kernels. TensorRT for
# RTX 1.7 runs the large kernels in FP16 behind the pairs, and pads the channels: of a depthwise convolution, which
# is bound by memory, it makes four times the bytes.
_CHANNEL_STEP, _MOST_TAPS = 16, 32
# The first opset whose pairs take E4M3.
_OPSET = 19


def unfit(graph: Any) -> dict[str, str]:
    """The layers that FP8 kernels do not take, or do not pay for, each with the reason."""
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
    # They say that the pairs are INT8.
    del graph.value_info[:]
    tidy(graph)
    return model


def _is_of_int8_pair(node: Any, constants: Mapping[str, Any]) -> bool:
    """Whether it is half of a pair as they are placed here; what a network had of its own before stays as it is."""
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or len(node.input) < 3:
        return False
    zero = constants.get(node.input[2])
    if zero is None or zero.data_type != TensorProto.INT8 or array(zero).any():
        return False
    return node.op_type == "QuantizeLinear" or node.input[0] not in constants


def _rescale(scale: Any) -> None:
    """INT8's scale made FP8's, and one that FP16 holds: weights are rounded with what they are multiplied by later."""
    wanted = np.maximum(array(scale) * np.float32(127.0 / LARGEST), SMALLEST_SCALE)
    scale.CopyFrom(numpy_helper.from_array(wanted.astype(np.float16).astype(np.float32), scale.name))


def _stored(name: str, values: np.ndarray) -> Any:
    """Bytes as a constant of FP8; in that, too, zero has no bit set."""
    return helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, values.shape, values.tobytes(), raw=True)


def to_fp8(values: np.ndarray, scale: np.ndarray, axis: int) -> np.ndarray:
    """E4M3 [...] of float32 values over their scale, one number or one for each index of `axis`; saturating."""
    shares = np.clip(values / _along(scale, values.ndim, axis), -LARGEST, LARGEST)
    rounded: np.ndarray = shares.astype(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN))
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
    """Why no FP8 can be made of a network, whatever its ranges are; empty where it can."""
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
            f"fp8 cannot be made of this network of opset {opset.version} ({one_line(str(error))}); export it with "
            f"opset {_OPSET} or newer"
        ) from error


FP8 = Scheme(LARGEST, unfit, _rewritten)
