"""Single steps of the preprocessing, as the user says them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from export_fixtures import options
from onnx import TensorProto, helper, numpy_helper

from convoy.export.plan import make_plan
from convoy.export.sources.onnx_plain import is_plain
from convoy.export.sources.torch_job import Description, Inquiry
from convoy.export.sources.torch_process import ask
from convoy.models.errors import UsageError

ALL = {"preprocess": None, "input": None, "mean": "0.1,0.2,0.3", "std": "0.5", "resize": "40", "crop": "32x24"}
ALL |= {"interpolation": "bicubic"}


def test_they_change_what_the_recipe_says_and_leave_the_rest(tmp_path):
    plan = make_plan(options(tmp_path, preprocess="imagenet", input=None, mean="0.5", resize="300", crop="288"))
    image = plan.image
    assert (image.height, image.width, image.resize_px, image.mean) == (288, 288, 300, (0.5, 0.5, 0.5))
    assert (image.std, image.interpolation) == ((0.229, 0.224, 0.225), "bilinear")
    assert plan.preprocessing == "--preprocess imagenet --mean 0.5 --resize 300 --crop 288 (the user's)"


def test_they_are_a_recipe_of_their_own(tmp_path):
    image = make_plan(options(tmp_path, **ALL)).image
    assert (image.height, image.width, image.channels, image.resize_mode, image.resize_px) == (
        32,
        24,
        3,
        "shorter_side",
        40,
    )
    assert (image.mean, image.std, image.interpolation, image.antialias) == (
        (0.1, 0.2, 0.3),
        (0.5,) * 3,
        "bicubic",
        True,
    )
    straight = make_plan(options(tmp_path, **(ALL | {"resize": "32x24", "crop": None}))).image
    assert (straight.resize_mode, straight.height, straight.width) == ("exact", 32, 24)


def test_an_onnx_file_of_whose_images_something_was_said_is_not_plain(tmp_path):
    assert is_plain(options(tmp_path, source="net.onnx", preprocess=None))
    assert not is_plain(options(tmp_path, source="net.onnx", preprocess=None, mean="0.5"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mean": None, "interpolation": None}, "in part only; pass --mean, --interpolation, too"),
        ({"crop": None}, "in part only; pass --crop, too"),
        ({"mean": "0.1,0.2"}, "is not one number per channel"),
        ({"mean": "red"}, "is not one number per channel"),
        ({"mean": "nan"}, "is not one number per channel"),
        ({"mean": "123.7,116.3,103.5"}, "divide it by 255"),
        ({"std": "0"}, "must be above 0"),
        ({"resize": "0"}, "is not a size in pixels"),
        ({"crop": "3x32x32"}, "is not a size in pixels"),
        ({"resize": "16"}, "resize_px 16 is below the crop 32x24"),
        ({"resize": "40x40"}, "leaves nothing to --crop"),
        ({"interpolation": "cubic"}, "use nearest, bilinear, bicubic, lanczos"),
        ({"input": "3x64x64"}, "--input says 3x64x64, the preprocessing 3x32x24"),
        ({"preprocess": "unit", "input": "3x8x8", "resize": None}, "--crop cuts nothing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, wrong, words):
    with pytest.raises(UsageError, match=words):
        make_plan(options(tmp_path, **(ALL | wrong)))


ONE_VALUE = ALL | {"mean": "0.5"}


@pytest.mark.parametrize(("taken", "shape"), [((3,), (32, 24, 3)), ((1,), (32, 24, 1))])
def test_one_value_for_all_is_of_as_many_channels_as_the_network_takes(tmp_path, monkeypatch, taken, shape):
    asked = []

    def ask(inquiry):
        asked.append(inquiry)
        return Description(channels=taken)

    monkeypatch.setattr("convoy.export.sources.origin.ask", ask)
    (tmp_path / "net.py").write_text("")
    image = make_plan(options(tmp_path, **(ONE_VALUE | {"source": f"{tmp_path}/net.py:make"}))).image
    assert (image.tensor_shape, image.mean, image.std) == (shape, (0.5,) * shape[2], (0.5,) * shape[2])
    assert [(one.kind, one.name, one.size) for one in asked] == [("file", "make", (32, 24))]


def test_where_channels_are_said_or_seen_the_network_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("convoy.export.sources.origin.ask", None)
    (tmp_path / "net.py").write_text("")
    factory = {"source": f"{tmp_path}/net.py:make"}
    for said in ({"input": "1x32x24"}, {"input": "3x32x24"}, {"mean": "0.1,0.2,0.3"}):
        channels = 1 if "1x32x24" in said.values() else 3
        assert make_plan(options(tmp_path, **(ONE_VALUE | factory | said))).image.channels == channels


@pytest.mark.parametrize(("taken", "words"), [((), "does not say, or runs on neither"), ((3, 1), "runs on both")])
def test_a_network_that_does_not_tell_leaves_it_to_the_user(tmp_path, monkeypatch, taken, words):
    monkeypatch.setattr("convoy.export.sources.origin.ask", lambda _: Description(channels=taken))
    (tmp_path / "net.py").write_text("")
    with pytest.raises(UsageError, match=rf"for net.py:make {words}.*; pass --input 3x32x24 or 1x32x24"):
        make_plan(options(tmp_path, **(ONE_VALUE | {"source": f"{tmp_path}/net.py:make"})))


@pytest.mark.parametrize("channels", [1, 3])
def test_an_onnx_file_of_free_size_says_its_channels_itself(tmp_path, channels):
    weights = numpy_helper.from_array(np.ones((2, channels, 1, 1), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"]), helper.make_node("GlobalAveragePool", ["y"], ["z"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", channels, "h", "w"])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [weights],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "n.onnx")
    image = make_plan(options(tmp_path, **(ONE_VALUE | {"source": f"{tmp_path}/n.onnx"}))).image
    assert (image.channels, len(image.mean)) == (channels, channels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "taken"), [("Conv2d(3, 4, 3)", (3,)), ("Conv2d(1, 4, 3)", (1,)), ("ReLU()", (3, 1))]
)
def test_the_network_of_a_file_is_tried_on_both(tmp_path, network, taken):
    (tmp_path / "net.py").write_text(f"from torch import nn\n\n\ndef make():\n    return nn.{network}.half()\n")
    assert ask(Inquiry("file", "make", str(tmp_path / "net.py"), (32, 24))).channels == taken
