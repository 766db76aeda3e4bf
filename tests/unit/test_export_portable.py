"""What is written into every graph so that each runtime takes it: products of tensors without capitals."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from convoy.export.sources.onnx_file import portable


def product(equation: str) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    node = helper.make_node("Einsum", ["x", "y"], ["z"], "product", equation=equation)
    return helper.make_model(helper.make_graph([node], "g", inputs, [output]))


def equation_of(model: onnx.ModelProto) -> str:
    text: str = helper.get_attribute_value(model.graph.node[0].attribute[0]).decode()
    return text


@pytest.mark.parametrize(
    ("equation", "rewritten"),
    [
        ("B I D, B J D -> J I", "a b c, a d c -> d b"),
        ("bBd,bJd->BJ", "abc,adc->bd"),  # a small and a capital letter are two
        ("...Ad,...Bd->...AB", "...ab,...cb->...ac"),
        ("bid,bjd->ij", "bid,bjd->ij"),
        ("bid,Bjd", "bid,Bjd"),  # the order of the result is that of its letters
    ],
)
def test_capitals_are_taken_out_and_the_product_stays(equation, rewritten):
    x, y = np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32)
    before = ReferenceEvaluator(product(equation)).run(None, {"x": x, "y": y})[0]
    model = portable(product(equation))
    assert equation_of(model) == rewritten
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": x, "y": y})[0], before)
