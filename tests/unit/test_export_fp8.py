"""FP8 files: E4M3 where TensorRT has kernels for it, rounded here as a GPU would, and taken by the real builder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from precision_fixtures import calibrated, far, inputs, residual, run

from convoy.export.command import _without_fp8
from convoy.export.sources.torch_job import TorchResult
from convoy.export.tensorrt.audit import read_listing
from convoy.export.tensorrt.engine import Tuned, tune
from convoy.export.tensorrt.watch import BuildWatch
from convoy.export.variants.calibrate import Calibration, Conversion
from convoy.export.variants.making import audit
from convoy.export.variants.onnx_graph import array, attribute, initializers, producers
from convoy.export.variants.pairs import FP8, from_fp8, to_fp8, unfit
from convoy.export.variants.precision import select
from convoy.export.variants.variant import write_rounding_twin
from convoy.models.plans import BuildOptions
from tests.support.pair_rules import violations

# For `make test`: some seconds together.
pytestmark = pytest.mark.slow

# All finite E4M3 by their bytes: a sign, four bits of exponent with a bias of 7, three of mantissa; no infinity.
E4M3 = np.array([(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:127])


def nearest(values: np.ndarray) -> np.ndarray:
    """Each value's E4M3 by search: of two as near the even one, beyond the largest the largest."""
    distance = np.abs(np.abs(values)[:, None] - E4M3)
    found = distance.argmin(axis=1)
    ties = (found < 126) & (distance[np.arange(len(values)), np.minimum(found + 1, 126)] == distance.min(axis=1))
    return np.sign(values) * E4M3[np.where(ties & (found % 2 == 1), found + 1, found)]


@pytest.fixture
def network(tmp_path) -> Calibration:
    return calibrated(residual(tmp_path / "fp32.onnx"), inputs())


@pytest.fixture
def file(tmp_path, network) -> Path:
    assert FP8.quantize(Conversion(network), tmp_path / "fp8.onnx") == {
        "conv0": "FP8 kernels take multiples of 16 channels, not 16 x 3",
        "head": "too small for FP8 to pay: a product of 4 x 16",
    }
    return tmp_path / "fp8.onnx"


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


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30), st.floats(2.0**-18, 32, width=32))
def test_rounding_is_e4m3s_and_off_by_a_sixteenth_at_most(numbers, scale):
    values = np.array(numbers, np.float32)
    got = from_fp8(to_fp8(values, np.float32([scale]), 0), np.float32([scale]), 0)
    assert np.array_equal(got, nearest(values / np.float32(scale)).astype(np.float32) * np.float32(scale))
    inside = np.abs(values) <= 448 * scale
    assert (np.abs(got - values)[inside] <= np.maximum(np.abs(values) / 16, scale * 2.0**-10)[inside] * 1.0001).all()
    assert np.abs(got).max() <= np.float32(448) * np.float32(scale)


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
    assert far(run(twin, inputs()), run(tmp_path / "fp32.onnx", inputs())) < 0.1


def behind(*nodes: Any) -> onnx.ModelProto:
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
    graph = helper.make_graph(
        [*nodes, *pair],
        "pair",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize(("operator", "kept"), [("Identity", lambda x: x), ("Relu", lambda x: np.maximum(x, 0))])
def test_the_twin_rounds_as_e4m3_does_and_saturates(tmp_path, operator, kept):
    onnx.save(behind(helper.make_node(operator, ["x"], ["r"])), tmp_path / "fp8.onnx")
    twin = write_rounding_twin(tmp_path / "fp8.onnx", tmp_path / "twin.onnx")
    halves = (E4M3[1:] + E4M3[:-1]) / 2
    values = np.concatenate([E4M3, halves, -halves, [460.0, 1e9, -1e9], np.linspace(-500, 500, 1001)]) / 2
    values = values.astype(np.float32)
    got = run(twin, values[None, None, None]).reshape(-1)
    assert np.array_equal(got, kept(nearest(values * 2) / 2).astype(np.float32))


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
    nodes = [
        helper.make_node("Relu", ["x"], ["before"], "relu"),
        helper.make_node(operator, ["before", "w"], ["y"], "layer", **how),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [], [numpy_helper.from_array(np.zeros(weight, np.float32), "w")])
    assert unfit(graph).get("layer") == why


def test_what_cannot_be_brought_there_costs_fp8_alone_where_nobody_asked_for_it(tmp_path, network, monkeypatch):
    recipes = select(None, can_calibrate=True)
    result = TorchResult(tmp_path / "fp32.onnx", {"logits": np.zeros((1, 2))}, "2.9", 8, remark="its batch is proved")
    model = onnx.load(str(network.graph))
    model.opset_import[0].version = 17
    onnx.save(model, str(result.onnx))
    assert _without_fp8(recipes, result, result.onnx) == (recipes, result)

    def refuse(model, version):
        raise RuntimeError("no adapter for GridSample")

    monkeypatch.setattr(onnx.version_converter, "convert_version", refuse)
    left, told = _without_fp8(recipes, result, result.onnx)
    assert list(left) == [recipe for recipe in recipes if recipe.file != "fp8.onnx"]
    assert told.remark.startswith("its batch is proved; fp8 cannot be made of this network of opset 17 (no adapter for")


def built(path: Path, capability: str) -> Tuned:
    """What TensorRT for RTX makes of the file."""
    trt: Any = pytest.importorskip("tensorrt_rtx")
    options = BuildOptions("fp8", (4,), profiles="range")
    return tune(trt, path, options, (capability,), None, BuildWatch(lambda event: None))


def test_the_real_builder_runs_it_in_fp8_from_8_9_on_and_says_why_not_before(file):
    audit = read_listing(built(file, "8.9").layers)
    assert audit.by_precision == {"fp16": 2, "fp8": 1}
    refused = built(file, "8.0")
    assert refused.data is None
    assert "fp8_e4m3" in refused.problem
