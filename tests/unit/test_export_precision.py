"""FP16 and both INT8 files hold to their rules, and are judged by what their devices would answer."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from export_fixtures import answers, write_red_or_blue
from onnx import TensorProto, helper, numpy_helper
from precision_fixtures import calibrated, far, inputs, residual, run

from convoy.export.variants.calibrate import BINS, ActivationHistogram, Calibration, Conversion
from convoy.export.variants.halves import convert_to_bf16, convert_to_fp16
from convoy.export.variants.making import audit
from convoy.export.variants.onnx_graph import front_nodes
from convoy.export.variants.pairs import FOR_TENSORRT, unprofitable
from convoy.export.variants.quantize import layers, quantize_for_cpu
from convoy.export.variants.variant import write_rounding_twin
from convoy.models.errors import JobError
from tests.support.pair_rules import violations

IMAGES = np.random.default_rng(1).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)


@pytest.fixture
def network(tmp_path) -> Calibration:
    return calibrated(residual(tmp_path / "fp32.onnx"), inputs())


def test_ranges_of_all_methods_come_from_one_pass(network):
    extremes = inputs().min(), inputs().max()
    assert network.ranges["minmax"]["x"] == pytest.approx(extremes)
    for method in ("entropy", "percentile"):
        low, high = network.ranges[method]["x"]
        assert extremes[0] <= low < 0 < high <= extremes[1]
    assert set(network.ranges["minmax"]) >= {"x", "y"}


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


def test_what_cannot_be_quantised_is_one_line(tmp_path, network):
    lacking = Calibration(network.graph, {"minmax": {}, "entropy": {}, "percentile": {}})
    with pytest.raises(JobError, match=r"int8 cannot be made of this network \("):
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
    assert 0 < far(run(twin, inputs()), run(tmp_path / "fp32.onnx", inputs())) < 0.05


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
    nodes = [
        helper.make_node("Relu", ["x"], ["before"], "relu"),
        helper.make_node("Conv", [source, "w"], ["y"], "conv", group=group),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [], [numpy_helper.from_array(np.zeros(weight, np.float32), "w")])
    assert ("conv" in unprofitable(graph)) == left_out


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
    exact = run(network.graph, inputs())
    only_weights, twin = run(path, inputs()), run(write_rounding_twin(path, tmp_path / "twin.onnx"), inputs())
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
    assert far(run(twin, inputs()), run(tmp_path / "fp32.onnx", inputs())) < 1e-2


def test_a_value_that_several_nodes_left_in_fp32_read_is_cast_once(tmp_path, network):
    # Both read what relu0 gives in FP16. The converter writes a cast for each, of one name, which nothing loads.
    convert_to_fp16(Conversion(network, keep=frozenset({"conv1", "add"})), tmp_path / "fp16.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "fp16.onnx"))
    assert far(run(tmp_path / "fp16.onnx", inputs()), run(tmp_path / "fp32.onnx", inputs())) < 1e-2


def test_the_twin_overflows_where_a_gpu_would_and_a_cpu_does_not(tmp_path):
    calibration = calibrated(residual(tmp_path / "fp32.onnx", gain=1e5), inputs())
    blind = Calibration(calibration.graph, {"minmax": {}, "entropy": {}, "percentile": {}})
    convert_to_fp16(Conversion(blind), tmp_path / "fp16.onnx")
    assert np.isfinite(run(tmp_path / "fp16.onnx", inputs())).all()
    twin = write_rounding_twin(tmp_path / "fp16.onnx", tmp_path / "twin.onnx")
    assert not np.isfinite(run(twin, inputs())).all()


def test_the_front_ends_where_the_network_begins(tmp_path):
    graph = onnx.load(write_red_or_blue(tmp_path / "fp32.onnx")).graph
    assert front_nodes(graph) == ["transpose", "cast", "mul", "add"]
    graph.node.append(helper.make_node("Shape", ["images"], ["shape"], "shape"))
    assert front_nodes(graph) == ["transpose", "cast", "mul", "add"]
    graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT
    assert front_nodes(graph) == []
