"""The builder's cell of the table: what it says of a sound graph, and of one that it does not take."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from convoy.export.zoo_table.builder import build

pytestmark = pytest.mark.slow


def graph_of(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """`nodes` between float16 [N, 16, 8, 8] `x` and `y`, with weights `w` [16, 16, 3, 3]."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n", 16, 8, 8]) for name in "xy"]
    weights = helper.make_tensor("w", TensorProto.FLOAT16, [16, 16, 3, 3], [0.01] * (16 * 16 * 9))
    graph = helper.make_graph(nodes, "g", tensors[:1], tensors[1:], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture
def network(tmp_path):
    path = tmp_path / "fp16.onnx"
    onnx.save(graph_of(helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=[1] * 4)), path)
    return path


def test_a_sound_graph_becomes_a_plan_of_some_size(network):
    cell = build(network, "fp16")
    assert (cell.precision, cell.accepted, cell.why) == ("fp16", True, "")
    assert cell.megabytes is not None
    assert cell.seconds is not None
    assert cell.warnings == ()


def test_what_the_builder_refuses_is_named_without_the_path(network):
    onnx.save(
        graph_of(helper.make_node("Gelu", ["x"], ["h"], "g"), helper.make_node("Det", ["h"], ["y"], "d")), network
    )
    cell = build(network, "fp16")
    assert (cell.accepted, cell.megabytes) == (False, None)
    assert "node d (Det): TensorRT has no such operator" in cell.why
    assert str(network.parent) not in cell.why
