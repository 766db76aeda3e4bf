"""FP16, BF16, FP8 and both INT8 files hold to their rules, and are judged by what their devices would answer."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import scipy.stats
from export_fixtures import answers, save_graph, write_red_or_blue
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import calibrate
from precision_fixtures import calibrated, far, inputs, residual

from convoy.export.command import _without_fp8
from convoy.export.sources.torch_job import TorchResult
from convoy.export.tensorrt.audit import read_listing
from convoy.export.tensorrt.engine import tune
from convoy.export.tensorrt.watch import BuildWatch
from convoy.export.variants.calibrate import BINS, ActivationHistogram, Calibration, Conversion, least_divergent
from convoy.export.variants.halves import convert_to_bf16, convert_to_fp16
from convoy.export.variants.making import audit
from convoy.export.variants.onnx_graph import array, attribute, consumers, initializers, producers
from convoy.export.variants.pairs import (
    CONVOLUTIONS,
    FOR_TENSORRT,
    FP8,
    PRODUCTS,
    before_pair,
    from_fp8,
    to_fp8,
    unfit,
    unprofitable,
)
from convoy.export.variants.precision import select
from convoy.export.variants.quantize import layers, quantize_for_cpu
from convoy.export.variants.variant import write_rounding_twin
from convoy.models.errors import JobError
from convoy.models.plans import BuildOptions


def violations(graph: Any, kept: Collection[str] = ()) -> list[str]:
    """What in a file's placement of quantise-dequantise pairs is against the rules; empty for a sound file.

    The nodes of `kept` were left in higher precision on purpose.
    """
    makers, readers, constants = producers(graph), consumers(graph), initializers(graph)
    found = []
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            found += _wrong_pair(node, makers, constants)
        elif node.op_type in CONVOLUTIONS | PRODUCTS:
            quantised = [name in makers and makers[name].op_type == "DequantizeLinear" for name in node.input]
            if quantised[2:] == [True]:
                found.append(f"{node.name}: its bias is quantised")
            if quantised[0] != quantised[1]:
                found.append(f"{node.name}: only one of its input and weight is quantised")
        elif node.op_type in ("Relu", "Clip", "BatchNormalization") and before_pair(node.input[0], makers):
            found.append(f"{node.name}: a pair stands between it and what it is fused with")
        elif node.op_type == "Add" and node.name not in kept:
            found += _wrong_addition(node, makers)
    return found + [f"{name}: quantised and never read" for name in _unread(graph, readers)]


def _wrong_pair(node: Any, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> list[str]:
    from onnx import TensorProto

    zero = constants.get(node.input[2]) if len(node.input) > 2 else None
    if zero is None or zero.data_type not in (TensorProto.INT8, TensorProto.FLOAT8E4M3FN) or array(zero).any():
        return [f"{node.name}: not symmetric INT8 or FP8"]
    per_channel = len(constants[node.input[1]].dims) > 0 and constants[node.input[1]].dims[0] > 1
    if per_channel and node.input[0] not in constants:
        return [f"{node.name}: activations are quantised per channel"]
    return []


def _wrong_addition(node: Any, makers: Mapping[str, Any]) -> list[str]:
    """A residual addition behind a quantised convolution has exactly one quantised input, not the convolution's."""
    originals = [before_pair(name, makers) for name in node.input]
    branches = [makers.get(name) for name in node.input]
    fused = [
        branch is not None and branch.op_type in CONVOLUTIONS and before_pair(branch.input[0], makers) is not None
        for branch in branches
    ]
    if any(fused) and all(name in makers for name in node.input) and sum(map(bool, originals)) != 1:
        return [f"{node.name}: its skip input is not quantised"]
    if all(originals) and originals:
        return [f"{node.name}: both of its inputs are quantised"]
    return []


def _unread(graph: Any, readers: Mapping[str, list[Any]]) -> list[str]:
    return [node.name for node in graph.node if node.op_type == "DequantizeLinear" and node.output[0] not in readers]


IMAGES = np.random.default_rng(1).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)


@pytest.fixture
def network(tmp_path) -> Calibration:
    return calibrated(residual(tmp_path / "fp32.onnx"), inputs())


def test_a_histogram_stays_as_large_as_it_was_whatever_comes():
    histogram = ActivationHistogram()
    for scale in (0.0, 1e-20, 1.0, 1e6):
        histogram.add(np.linspace(-1, 1, 1001, dtype=np.float32) * np.float32(scale))
    assert histogram.counts.shape == (BINS,)
    assert histogram.counts.sum() == 4004
    assert (histogram.lowest, histogram.highest) == (-1e6, 1e6)
    low, high = histogram.percentile(50)
    assert low < 0 < high
    assert high < 6e5
    with pytest.raises(ValueError, match="finite"):
        histogram.add(np.array([np.nan], np.float32))


def test_values_that_are_not_finite_name_their_tensor(tmp_path):
    images = inputs()
    images[3] = np.inf
    with pytest.raises(JobError, match=r"NaN or infinity in .* on a calibration image"):
        calibrated(residual(tmp_path / "fp32.onnx"), images)


def test_int8_is_close_to_fp32_and_its_front_and_logits_stay_exact(tmp_path):
    calibration = calibrated(write_red_or_blue(tmp_path / "fp32.onnx"), IMAGES, "images")
    quantize_for_cpu(Conversion(calibration), tmp_path / "int8-cpu.onnx")
    graph = onnx.load(tmp_path / "int8-cpu.onnx").graph
    assert next(node for node in graph.node if "logits" in node.output).op_type == "Gemm"
    quantised = {name for node in graph.node if node.op_type == "QuantizeLinear" for name in node.input[:1]}
    assert quantised.isdisjoint({"images", "nchw", "float", "scaled"})
    assert "normalised" in quantised
    assert 0 < far(answers(tmp_path / "int8-cpu.onnx", IMAGES), answers(tmp_path / "fp32.onnx", IMAGES)) < 0.05


def test_kept_layers_stay_in_float(tmp_path, network):
    assert layers(network) == ("conv0", "conv1", "add", "pool", "head")
    quantize_for_cpu(Conversion(network, keep=frozenset(layers(network))), tmp_path / "kept.onnx")
    assert not any(node.op_type == "QuantizeLinear" for node in onnx.load(tmp_path / "kept.onnx").graph.node)
    quantize_for_cpu(Conversion(network, only=frozenset({"conv1"})), tmp_path / "one.onnx")
    readers = [node for node in onnx.load(tmp_path / "one.onnx").graph.node if node.op_type == "QuantizeLinear"]
    assert 0 < len(readers) < 4
    found = audit(tmp_path / "kept.onnx", "cpu", {"conv0": "because"})
    assert "int8" not in found.by_precision
    assert found.kept == {"conv0": "because"}


def test_boxes_in_pixels_do_not_take_the_scale_of_the_scores(tmp_path):
    """A YOLO joins them behind its last layer, where one scale for both leaves no score."""
    draw = np.random.default_rng(3)
    constants = {
        "w": (draw.normal(size=(5, 3, 1, 1)) * 0.5).astype(np.float32),
        "scale": np.full((1, 1, 1, 1), 200, np.float32),
        "sizes": np.array([4, 1], np.int64),
    }
    fp32 = save_graph(
        tmp_path / "fp32.onnx",
        [
            helper.make_node("Conv", ["x", "w"], ["c"], "head"),
            helper.make_node("Split", ["c", "sizes"], ["boxes", "logits"], "split", axis=1),
            helper.make_node("Mul", ["boxes", "scale"], ["pixels"], "in_pixels"),
            helper.make_node("Sigmoid", ["logits"], ["scores"], "sigmoid"),
            helper.make_node("Concat", ["pixels", "scores"], ["y"], "join", axis=1),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 5, 8, 8])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    images = inputs()
    network = calibrated(fp32, images)
    assert layers(network) == ("head",)
    quantize_for_cpu(Conversion(network), tmp_path / "int8.onnx")
    expected, got = answers(fp32, images), answers(tmp_path / "int8.onnx", images)
    assert np.abs(got[:, 4] - expected[:, 4]).max() < 0.02
    assert far(got[:, :4], expected[:, :4]) < 0.05


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
@pytest.mark.parametrize("prefix", ["", "/model.0/conv/"])
def test_layers_in_8_bits_are_found_whatever_their_names(tmp_path, prefix):
    """PyTorch's older exporter puts slashes into names, as OpenVINO does for the parts of an operator."""
    fp32 = residual(tmp_path / "fp32.onnx")
    model = onnx.load(fp32)
    for node in model.graph.node:
        node.name = f"{prefix}{node.name}"
        node.input[:] = [name if name in ("x", "w0", "w1", "b1", "w2") else f"{prefix}{name}" for name in node.input]
        node.output[:] = [name if name == "y" else f"{prefix}{name}" for name in node.output]
    onnx.save(model, fp32)
    quantize_for_cpu(Conversion(calibrated(fp32, inputs())), tmp_path / "int8.onnx")
    convolutions = {f"{prefix}conv0": 1.0, f"{prefix}conv1": 3.0}
    assert audit(tmp_path / "int8.onnx", "openvino", {}, convolutions).eight_bit_share == 1.0


def test_what_cannot_be_quantised_is_one_line(tmp_path, network):
    lacking = Calibration(network.graph, {"minmax": {}, "entropy": {}, "percentile": {}})
    with pytest.raises(JobError, match=r"int8 cannot be made from this network \("):
        quantize_for_cpu(Conversion(lacking), tmp_path / "int8.onnx")


@pytest.mark.parametrize("depthwise", [False, True])
def test_tensorrts_file_keeps_tensorrts_rules(tmp_path, depthwise):
    calibration = calibrated(residual(tmp_path / "fp32.onnx", depthwise=depthwise), inputs())
    kept = FOR_TENSORRT.quantize(Conversion(calibration), tmp_path / "int8-trt.onnx")
    model = onnx.load(tmp_path / "int8-trt.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert violations(model.graph) == []
    assert kept == {"head": "too small for INT8 to pay: a product of 4 x 16"}
    half = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT16}
    scales = {node.input[1] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    assert scales <= half
    counted = audit(tmp_path / "int8-trt.onnx", "tensorrt", kept).by_precision
    assert counted["int8"] == 2
    assert "fp32" not in counted
    twin = write_rounding_twin(tmp_path / "int8-trt.onnx", tmp_path / "twin.onnx")
    assert 0 < far(answers(twin, inputs()), answers(tmp_path / "fp32.onnx", inputs())) < 0.05


def one_layer(operator: str, weight: tuple[int, ...], source: str = "before", **how: int) -> onnx.GraphProto:
    """x -> relu -> `before`, and a layer that reads that or x itself."""
    nodes = [
        helper.make_node("Relu", ["x"], ["before"], "relu"),
        helper.make_node(operator, [source, "w"], ["y"], "layer", **how),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    return helper.make_graph(nodes, "g", [x], [], [numpy_helper.from_array(np.zeros(weight, np.float32), "w")])


@pytest.mark.parametrize(
    ("weight", "group", "is_first", "left_out"),
    [
        ((16, 3, 3, 3), 1, True, False),
        ((64, 3, 7, 7), 1, False, False),
        ((8, 3, 3, 3), 1, True, False),
        ((8, 8, 3, 3), 1, False, True),
        ((17, 3, 3, 3), 1, True, True),
        ((16, 8, 1, 3), 1, False, True),
        ((32, 1, 3, 3), 32, False, False),
        ((32, 1, 1, 1), 32, False, True),
        ((36, 1, 3, 3), 36, False, True),
        ((16, 16, 1, 1), 1, False, False),
    ],
)
def test_convolutions_too_small_to_pay_are_left_out(weight, group, is_first, left_out):
    source = "x" if is_first else "before"
    assert ("layer" in unprofitable(one_layer("Conv", weight, source, group=group))) == left_out


def test_fp16_keeps_the_front_and_wide_values_in_fp32(tmp_path):
    calibration = calibrated(write_red_or_blue(tmp_path / "fp32.onnx"), IMAGES, "images")
    assert convert_to_fp16(Conversion(calibration), tmp_path / "fp16.onnx") == {}
    graph = onnx.load(tmp_path / "fp16.onnx").graph
    assert graph.input[0].type.tensor_type.elem_type == TensorProto.UINT8
    assert graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert {t.name for t in graph.initializer if t.data_type == TensorProto.FLOAT} == {"scale", "shift"}
    assert audit(tmp_path / "fp16.onnx", "cuda", {}).by_precision["fp16"] == 4


def test_bf16_halves_the_weights_and_its_twin_rounds_as_a_processor_with_bf16_does(network, tmp_path):
    path = tmp_path / "bf16.onnx"
    assert convert_to_bf16(Conversion(network), path) == {}
    graph = onnx.load(str(path)).graph
    large = [tensor for tensor in graph.initializer if len(tensor.dims) > 1]
    assert large
    assert {tensor.data_type for tensor in large} == {TensorProto.BFLOAT16}
    assert audit(path, "openvino", {}).by_precision["bf16"] == sum(
        node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") for node in graph.node
    )
    exact = answers(network.graph, inputs())
    only_weights, twin = answers(path, inputs()), answers(write_rounding_twin(path, tmp_path / "twin.onnx"), inputs())
    # Eight bits of mantissa, of the weights alone and then of what every node gives.
    assert 0 < far(only_weights, exact) < 0.02
    assert 0 < far(twin, exact) < 0.05
    assert not np.array_equal(twin, only_weights)
    assert not np.any(twin.astype(np.float32).view(np.uint32) & 0xFFFF), "every answer is a BF16 number"


def test_values_beyond_fp16_pass_through_islands_of_fp32_unharmed(tmp_path):
    calibration = calibrated(residual(tmp_path / "fp32.onnx", gain=1e5), inputs())
    kept = convert_to_fp16(Conversion(calibration), tmp_path / "fp16.onnx")
    assert {"conv0", "relu0", "conv1", "add"} <= kept.keys()
    assert kept["conv0"].startswith("values up to ")
    twin = write_rounding_twin(tmp_path / "fp16.onnx", tmp_path / "twin.onnx")
    assert far(answers(twin, inputs()), answers(tmp_path / "fp32.onnx", inputs())) < 1e-2


def test_a_value_that_several_nodes_left_in_fp32_read_is_cast_once(tmp_path, network):
    # Both read what relu0 gives in FP16. The converter writes a cast for each, of one name, which nothing loads.
    convert_to_fp16(Conversion(network, keep=frozenset({"conv1", "add"})), tmp_path / "fp16.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "fp16.onnx"))
    assert far(answers(tmp_path / "fp16.onnx", inputs()), answers(tmp_path / "fp32.onnx", inputs())) < 1e-2


def test_the_twin_overflows_where_a_gpu_would_and_a_cpu_does_not(tmp_path):
    calibration = calibrated(residual(tmp_path / "fp32.onnx", gain=1e5), inputs())
    blind = Calibration(calibration.graph, {"minmax": {}, "entropy": {}, "percentile": {}})
    convert_to_fp16(Conversion(blind), tmp_path / "fp16.onnx")
    assert np.isfinite(answers(tmp_path / "fp16.onnx", inputs())).all()
    twin = write_rounding_twin(tmp_path / "fp16.onnx", tmp_path / "twin.onnx")
    assert not np.isfinite(answers(twin, inputs())).all()


# For `make test`: some seconds together.

# All finite E4M3 by their bytes: a sign, four bits of exponent with a bias of 7, three of mantissa; no infinity.
E4M3 = np.array([(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:127])


def nearest(values: np.ndarray) -> np.ndarray:
    """Each value's E4M3 by search: of two as near the even one, beyond the largest the largest."""
    distance = np.abs(np.abs(values)[:, None] - E4M3)
    found = distance.argmin(axis=1)
    ties = (found < 126) & (distance[np.arange(len(values)), np.minimum(found + 1, 126)] == distance.min(axis=1))
    return np.sign(values) * E4M3[np.where(ties & (found % 2 == 1), found + 1, found)]


@pytest.fixture
def file(tmp_path, network) -> Path:
    assert FP8.quantize(Conversion(network), tmp_path / "fp8.onnx") == {
        "conv0": "FP8 kernels take multiples of 16 channels, not 16 x 3",
        "head": "too small for FP8 to pay: a product of 4 x 16",
    }
    return tmp_path / "fp8.onnx"


@pytest.mark.slow
def test_the_file_keeps_the_rules_and_is_counted_as_fp8(tmp_path, network, file):
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert violations(model.graph, ["conv0"]) == []
    counted = audit(file, "tensorrt", {}).by_precision
    assert counted["fp8"] == 1
    assert not {"int8", "fp32"} & counted.keys()
    makers = {name: node.op_type for node in model.graph.node for name in node.input}
    assert makers["b1"] == "Conv"
    FP8.quantize(Conversion(network, keep=frozenset({"conv1"})), tmp_path / "kept.onnx")
    assert "fp8" not in audit(tmp_path / "kept.onnx", "tensorrt", {}).by_precision


@pytest.mark.slow
def test_scales_are_the_ranges_over_448_and_weights_have_one_a_channel(network, file):
    constants, makers = initializers(onnx.load(file).graph), producers(onnx.load(file).graph)
    conv = next(node for node in onnx.load(file).graph.node if node.name == "conv1")
    activation, weight = (makers[name] for name in conv.input[:2])
    low, high = network.ranges["minmax"]["r0"]
    assert array(constants[activation.input[1]]) == pytest.approx(max(-low, high) / 448, rel=1e-3)
    original = array(initializers(onnx.load(network.graph).graph)["w1"])
    scale = array(constants[weight.input[1]])
    assert scale.dtype == np.float16
    assert scale == pytest.approx(np.abs(original).max(axis=(1, 2, 3)) / 448, rel=2e-3, abs=2.0**-24)
    stored = constants[weight.input[0]]
    assert (stored.data_type, len(stored.raw_data)) == (TensorProto.FLOAT8E4M3FN, original.size)
    values = from_fp8(array(stored), scale.astype(np.float32), attribute(weight, "axis", 1))
    assert np.abs(values - original).max() <= np.abs(original).max() / 448 * 16 * 1.01


@pytest.mark.slow
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30), st.floats(2.0**-18, 32, width=32))
def test_rounding_is_e4m3s_and_off_by_a_sixteenth_at_most(numbers, scale):
    values = np.array(numbers, np.float32)
    got = from_fp8(to_fp8(values, np.float32([scale]), 0), np.float32([scale]), 0)
    assert np.array_equal(got, nearest(values / np.float32(scale)).astype(np.float32) * np.float32(scale))
    inside = np.abs(values) <= 448 * scale
    assert (np.abs(got - values)[inside] <= np.maximum(np.abs(values) / 16, scale * 2.0**-10)[inside] * 1.0001).all()
    assert np.abs(got).max() <= np.float32(448) * np.float32(scale)


@pytest.mark.slow
def test_channels_that_do_nothing_have_a_scale_that_fp16_holds(tmp_path):
    model = onnx.load(residual(tmp_path / "fp32.onnx"))
    weights = initializers(model.graph)["w1"]
    faint = array(weights).copy()
    faint[3], faint[7] = faint[3] * 1e-9, 0
    weights.CopyFrom(numpy_helper.from_array(faint, "w1"))
    onnx.save(model, tmp_path / "fp32.onnx")
    FP8.quantize(Conversion(calibrated(tmp_path / "fp32.onnx", inputs())), tmp_path / "fp8.onnx")
    scales = [t for t in onnx.load(tmp_path / "fp8.onnx").graph.initializer if t.name.endswith("_scale")]
    assert scales
    assert all((array(tensor) >= 2.0**-18).all() for tensor in scales)
    twin = write_rounding_twin(tmp_path / "fp8.onnx", tmp_path / "twin.onnx")
    assert far(answers(twin, inputs()), answers(tmp_path / "fp32.onnx", inputs())) < 0.1


def behind(path: Path, *nodes: Any) -> Path:
    """float32 [1, 1, 1, n] -> the nodes, from "x" to "r" -> a pair of FP8, scale 0.5 -> a pool that does nothing."""
    pair = [
        helper.make_node("QuantizeLinear", ["r", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("MaxPool", ["d"], ["y"], kernel_shape=[1, 1]),
    ]
    shape = [1, 1, 1, "n"]
    constants = [
        numpy_helper.from_array(np.float32(0.5), "s"),
        helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, (), b"\0", raw=True),
    ]
    ends = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name in "xy")
    return save_graph(path, [*nodes, *pair], *ends, constants)


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "kept"), [("Identity", lambda x: x), ("Relu", lambda x: np.maximum(x, 0))])
def test_the_twin_rounds_as_e4m3_does_and_saturates(tmp_path, operator, kept):
    fp8 = behind(tmp_path / "fp8.onnx", helper.make_node(operator, ["x"], ["r"]))
    twin = write_rounding_twin(fp8, tmp_path / "twin.onnx")
    halves = (E4M3[1:] + E4M3[:-1]) / 2
    values = np.concatenate([E4M3, halves, -halves, [460.0, 1e9, -1e9], np.linspace(-500, 500, 1001)]) / 2
    values = values.astype(np.float32)
    got = answers(twin, values[None, None, None]).reshape(-1)
    assert np.array_equal(got, kept(nearest(values * 2) / 2).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight", "operator", "group", "why"),
    [
        ((64, 64, 3, 3), "Conv", 1, None),
        ((64, 64, 5, 5), "Conv", 1, None),
        ((64, 16, 3, 3), "Conv", 4, None),
        ((64, 64, 7, 7), "Conv", 1, "FP8 kernels take 32 values at most, not 7 x 7"),
        ((24, 144, 1, 1), "Conv", 1, "FP8 kernels take multiples of 16 channels, not 24 x 144"),
        ((32, 1, 3, 3), "Conv", 32, "FP8 kernels take multiples of 16 channels, not 32 x 1"),
        ((8, 8, 3, 3), "Conv", 1, "too small for FP8 to pay: 8 x 8 channels"),
        ((64, 64, 2, 2), "ConvTranspose", 1, "FP8 has no kernels for transposed convolutions"),
        ((64, 1000), "MatMul", 1, None),
    ],
)
def test_layers_that_fp8_has_no_kernels_for_are_left_out(weight, operator, group, why):
    how = {} if operator == "MatMul" else {"group": group}
    assert unfit(one_layer(operator, weight, **how)).get("layer") == why


@pytest.mark.slow
def test_what_cannot_be_brought_there_costs_fp8_alone_where_nobody_asked_for_it(tmp_path, network, monkeypatch):
    recipes = select(None, can_calibrate=True)
    result = TorchResult(tmp_path / "fp32.onnx", {"logits": np.zeros((1, 2))}, "2.9", 8, remark="its batch is proved")
    model = onnx.load(str(network.graph))
    model.opset_import[0].version = 17
    onnx.save(model, str(result.onnx))
    assert _without_fp8(recipes, result, result.onnx) == (recipes, result)

    refuse = Mock(side_effect=RuntimeError("no adapter for GridSample"))
    monkeypatch.setattr(onnx.version_converter, "convert_version", refuse)
    left, told = _without_fp8(recipes, result, result.onnx)
    assert list(left) == [recipe for recipe in recipes if recipe.file != "fp8.onnx"]
    assert told.remark.startswith(
        "its batch is proved; fp8 cannot be made from this network of opset 17 (no adapter for"
    )


@pytest.mark.slow
def test_the_real_builder_runs_it_in_fp8_from_8_9_on_and_says_why_not_before(file):
    trt: Any = pytest.importorskip("tensorrt_rtx")
    options = BuildOptions("fp8", (4,), profiles="range")
    built, refused = (tune(trt, file, options, (one,), None, BuildWatch(lambda event: None)) for one in ("8.9", "8.0"))
    assert read_listing(built.layers).by_precision == {"fp16": 2, "fp8": 1}
    assert refused.data is None
    assert "fp8_e4m3" in refused.problem


ENTROPY_BINS = 512


def smooth(counts: np.ndarray) -> np.ndarray | None:
    """The library's, without its rounding to single precision, which decides between ranges that are nearly as good."""
    empty = counts == 0
    if empty.all():
        return None
    return counts + 1e-4 * empty - 1e-4 * empty.sum() / (~empty).sum() * ~empty


def of_the_library(counts: np.ndarray) -> tuple[int, int]:
    places = np.arange(ENTROPY_BINS + 1, dtype=np.float64)
    find: Any = calibrate.HistogramCollector.get_entropy_threshold
    start, end = find(None, (counts, places, np.float64(0), np.float64(ENTROPY_BINS)), 128)
    return int(start), int(end)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["normal", "relu", "long-tailed", "few-values"])
def test_the_range_is_the_librarys(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "smooth_distribution", smooth)
    monkeypatch.setattr(calibrate, "entropy", scipy.stats.entropy)  # in double precision
    generator = np.random.default_rng(seed)
    size = int(10 ** generator.uniform(1, 5))
    values = {
        "normal": lambda: generator.normal(size=size),
        "relu": lambda: np.maximum(generator.normal(size=size), 0),
        "long-tailed": lambda: generator.standard_t(2, size=size),
        "few-values": lambda: generator.choice(generator.normal(size=7), size=size),
    }[kind]()
    limit = np.abs(values).max() * generator.uniform(1, 2)
    counts, _ = np.histogram(values, ENTROPY_BINS, (-limit, limit))
    assert least_divergent(counts) == of_the_library(counts)


@pytest.mark.parametrize(
    "counts", [np.zeros(ENTROPY_BINS, np.int64), np.eye(1, ENTROPY_BINS, ENTROPY_BINS // 2, dtype=np.int64)[0]]
)
def test_where_nothing_or_one_value_was_seen_there_is_a_range_around_it(counts: np.ndarray) -> None:
    start, end = least_divergent(counts)
    assert 0 <= start <= ENTROPY_BINS // 2 < end <= ENTROPY_BINS
