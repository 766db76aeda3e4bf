"""Files of old opsets, and transposed convolutions in groups, through the whole export: every precision is made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from export_fixtures import make_quick
from onnx import TensorProto, helper, numpy_helper

from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.models.bundle import Bundle, open_bundle

pytestmark = pytest.mark.slow


def constant(name: str, *shape: int) -> onnx.TensorProto:
    seed = sum(map(ord, name))
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.3
    return numpy_helper.from_array(np.abs(values) + 0.1 if name.startswith("variance") else values, name)


def write(path: Path, opset: int, middle: str) -> Path:
    node = helper.make_node
    nodes = [node("Conv", ["x", "w1"], ["c"], pads=[1] * 4), node("Add", ["c", "shift"], ["added"])]
    constants = [constant("w1", 8, 3, 3, 3), constant("shift", 1, 8, 1, 1), constant("w2", 5, 8, 3, 3)]
    if middle == "clip" and opset < 11:
        nodes.append(node("Clip", ["added"], ["m"], min=0.0, max=6.0))
    elif middle == "clip":
        nodes.append(node("Clip", ["added", "low", "high"], ["m"]))
        constants += [numpy_helper.from_array(np.float32(value), name) for name, value in (("low", 0), ("high", 6))]
    elif middle == "norm":
        norms = ["scale", "bias", "mean", "variance"]
        nodes.append(node("Relu", ["added"], ["r"]))
        nodes.append(node("BatchNormalization", ["r", *norms], ["m"]))
        constants += [constant(name, 8) for name in norms]
    elif middle == "larger":
        factors = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "factors")
        kind = "Upsample" if opset < 10 else "Resize"
        more = ["", "factors"] if opset > 10 else ["factors"]
        own = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"} if opset > 10 else {}
        nodes.append(node(kind, ["added", *more], ["m"], mode="nearest", **own))
        constants.append(factors)
        if opset in (11, 12):
            more[0] = "roi"
            nodes[-1].input[1] = "roi"
            constants.append(numpy_helper.from_array(np.zeros(0, np.float32), "roi"))
    else:
        nodes.append(node("Softmax", ["added"], ["m"], axis=1))
    nodes += [
        node("Conv", ["m", "w2"], ["d"], pads=[1] * 4),
        node("GlobalAveragePool", ["d"], ["g"]),
        node("Flatten", ["g"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def exported(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, **more: object) -> Bundle:
    make_quick(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = {"preprocess": "unit", "input": "3x16x16", "allow_random_calibration": True, "max_batch": 4}
    call = ExportOptions(source, name="net", store=tmp_path / "store", **(given | more))  # type: ignore[arg-type]
    return open_bundle(export_bundle(call))


def check(bundle: Bundle) -> None:
    """Every file is there, and answers nearly as fp32 does."""
    errors = {one.file: one.max_relative_error for one in bundle.manifest.variants}
    assert {"fp32.onnx", "fp16.onnx", "int8-cpu.onnx", "int8-trt.onnx"} <= set(errors)
    assert errors["fp16.onnx"] < 0.01
    assert max(errors["int8-cpu.onnx"], errors["int8-trt.onnx"]) < 0.2


@pytest.mark.parametrize("middle", ["clip", "norm", "larger", "softmax"])
@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13])
def test_every_precision_is_made_of_a_file_of_an_old_opset(tmp_path, monkeypatch, opset, middle):
    source = write(tmp_path / "net.onnx", opset, middle)
    check(exported(tmp_path, str(source), monkeypatch, precisions="fp16,int8"))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("biased", [True, False])
def test_int8_of_a_transposed_convolution_in_groups_is_right(tmp_path, monkeypatch, groups, biased):
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("ConvTranspose", ["r", "t", *(["b"] if biased else [])], ["u"], strides=[2, 2], group=groups),
        helper.make_node("GlobalAveragePool", ["u"], ["g"]),
        helper.make_node("Flatten", ["g"], ["y"]),
    ]
    constants = [
        constant("w1", 8, 3, 3, 3),
        constant("t", 8, 8 // groups, 4, 4),
        *([constant("b", 8)] if biased else []),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 8])],
        constants,
    )
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    check(exported(tmp_path, str(path), monkeypatch, precisions="fp16,int8"))
    rows = np.random.default_rng(0).standard_normal((24, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=rows)
    signals = {"preprocess": None, "input": None, "allow_random_calibration": False}
    check(
        exported(
            tmp_path, str(path), monkeypatch, precisions="fp16,int8", calibrate=str(tmp_path / "rows.npz"), **signals
        )
    )
