"""What the options of an export mean: the plan, single steps of the preprocessing, and the file of --preprocess."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest
from export_fixtures import IMAGE, options, save_graph
from onnx import TensorProto, helper, numpy_helper

from convoy.app.engines.machine import CPU_ONLY
from convoy.export.plan import make_plan
from convoy.export.sources.onnx_plain import is_plain
from convoy.export.sources.preprocess_file import PreprocessFile, read_preprocess_file, schema
from convoy.export.sources.torch_job import Description, Inquiry
from convoy.export.sources.torch_process import ask
from convoy.export.variants.precision import select
from convoy.models.checkpoint import CheckpointHeader, write_checkpoint
from convoy.models.errors import JobError, UsageError
from convoy.models.spec import ImageSpec

HEADER = CheckpointHeader(
    architecture="simple_cnn",
    labels=("cat", "dog"),
    image=replace(IMAGE, height=32, width=32, resize_px=32, mean=(0.1, 0.2, 0.3)),
    dataset="pets",
    split={},
    convoy_version="0",
    seed=0,
    test_accuracy=1.0,
)


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "trained.safetensors"
    write_checkpoint(path, {"weight": np.zeros(3, np.float32)}, HEADER)
    return path


@pytest.fixture(autouse=True)
def factory_is_right(monkeypatch):
    """A plan with mistakes also asks the user's function in a child process; test_export_asks_once.py does that."""
    monkeypatch.setattr("convoy.export.plan.ask", lambda inquiry: Description())


def zoo(tmp_path, checkpoint: Path, **changes):
    bare = {"source": "zoo:simple_cnn", "weights": checkpoint, "labels": None, "preprocess": None, "input": None}
    return options(tmp_path, **(bare | changes))


def test_a_checkpoint_of_ours_says_all_that_is_needed_after_the_command_line(tmp_path, checkpoint):
    plan = make_plan(zoo(tmp_path, checkpoint))
    assert plan.labels == ("cat", "dog")
    assert plan.image == HEADER.image
    assert plan.source.shown == "zoo:simple_cnn"
    plan = make_plan(zoo(tmp_path, checkpoint, preprocess="unit", front="none", labels=tmp_path / "labels.txt"))
    assert plan.labels == ("red", "blue")
    assert plan.image.mean == (0, 0, 0)
    assert plan.image.tensor_shape == (3, 32, 32)


def test_imagenet_keeps_its_proportions_at_other_sizes(tmp_path):
    assert make_plan(options(tmp_path, preprocess="imagenet", input=None)).image.resize_px == 256
    small = make_plan(options(tmp_path, preprocess="imagenet", input="3x56x56")).image
    assert (small.height, small.resize_px) == (56, 64)


def test_preprocessing_comes_from_a_file(tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({name: value for name, value in asdict(IMAGE).items() if name != "front"}))
    assert make_plan(options(tmp_path, preprocess=str(recipe), input=None)).image == IMAGE
    for content, words in (("{", "not valid JSON"), ("[]", "should be an object")):
        recipe.write_text(content)
        with pytest.raises(UsageError, match=words):
            make_plan(options(tmp_path, preprocess=str(recipe), input=None))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"source": "resnet50"}, "not understood; use zoo:NAME"),
        ({"source": "model.onnx"}, "there is no file model.onnx"),
        ({"source": "model.pt2"}, "carries pickle, .* pass --trust"),
        ({"source": "zoo:resnet50"}, "the zoo has no network"),
        ({"source": "nowhere/net.py:make"}, "there is no file nowhere/net.py"),
        ({"source": "net.py"}, "has no function name; write net.py:factory"),
        ({"source": "torchvision:resnet18"}, "pass --weights"),
        ({"source": "zoo:simple_cnn"}, "pass --weights"),
        ({"name": "../up"}, "cannot be a model's name"),
        ({"preprocess": None}, "pass --preprocess imagenet, .*FILE.json"),
        ({"preprocess": "nowhere.json"}, "No such file"),
        ({"preprocess": "unit", "input": None}, "pass --input"),
        ({"preprocess": "imagenet", "input": "1x8x8"}, "for 3 channels"),
        ({"input": "8xy"}, "write an image as 3x224x224"),
        ({"input": "2x8x8"}, "with 1 or 3 channels"),
        ({"front": "float"}, "use uint8 or none"),
        ({"labels": Path("nowhere.txt")}, "one class per line"),
        ({"labels": None, "evaluate": "somewhere"}, "no data set or folder 'somewhere'; use one of digits"),
        (
            {"source": "zoo:simple_cnn", "labels": None, "random_weights": True},
            "(?s)pass --labels FILE.*--labels labels.txt",
        ),
        ({"class_map": Path("map.json")}, "--class-map needs a data set; pass --evaluate"),
        ({"max_batch": 0}, "--max-batch must be from 1"),
        ({"min_accuracy_percent": 90}, "--min-accuracy needs labelled images; pass --evaluate DATA"),
        ({"evaluate": "digits", "expect_accuracy_percent": 0.9}, "in percent, .*, for example --expect-accuracy 90"),
        ({"evaluate": "digits", "min_accuracy_percent": 101}, "above 1 and at most 100; got 101"),
        ({"weights_key": "model"}, "--weights-key selects an entry of a .pth file; pass such a file"),
        ({"calibration_method": "max"}, "--calibration-method 'max' is unknown; use auto, minmax, entropy"),
        ({"priority_levels": 2, "default_priority_level": 3}, "--default-priority-level"),
        ({"accuracy_budget_points": float("nan")}, "--accuracy-budget must be"),
    ],
)
def test_a_wrong_call_is_named(tmp_path, monkeypatch, wrong, words):
    # The name is right, which torchvision itself would say, in a while.
    monkeypatch.setattr("convoy.export.sources.origin.ask", lambda inquiry: Description())
    with pytest.raises(UsageError, match=words):
        make_plan(options(tmp_path, **wrong))


@pytest.mark.parametrize(
    ("text", "words"),
    [("red\nred\n", "'red' appears twice"), ("red\n\n", "1 classes; at least 2"), ("", "0 classes")],
)
def test_labels_that_cannot_be_right_are_refused(tmp_path, text, words):
    call = options(tmp_path)
    (tmp_path / "labels.txt").write_text(text)
    with pytest.raises(UsageError, match=words):
        make_plan(call)


def test_a_class_map_gives_labels_or_outputs(tmp_path):
    mapping = tmp_path / "map.json"
    mapping.write_text('{"n01": "blue", "n02": 0}')
    plan = make_plan(options(tmp_path, class_map=mapping, evaluate="somewhere"))
    assert plan.classes_known_as == {"n01": "blue", "n02": "red"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"n01": "green", "n02": 2, "n03": -1, "n04": 1}',
            "n01 is 'green', n02 is 2, n03 is -1, which are not among",
        ),
        ('{"n01": true}', "not a JSON object of labels or outputs; write it as in"),
        ('["red"]', "not a JSON object of labels or outputs"),
        ("{", "not a JSON object of labels or outputs"),
        (None, "No such file"),
    ],
)
def test_a_class_map_that_cannot_be_right_is_refused(tmp_path, text, words):
    mapping = tmp_path / "map.json"
    if text is not None:
        mapping.write_text(text)
    with pytest.raises(UsageError, match=words):
        make_plan(options(tmp_path, class_map=mapping, evaluate="somewhere"))


def test_a_missing_or_broken_checkpoint_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="there is no checkpoint at nowhere"):
        make_plan(options(tmp_path, weights=Path("nowhere.safetensors")))
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not tensors at all")
    with pytest.raises(JobError, match=r"cannot read .* as safetensors"):
        make_plan(options(tmp_path, weights=broken))


def test_precisions_are_what_can_be_made(monkeypatch):
    monkeypatch.setattr("convoy.export.variants.precision.has_bf16", lambda: False)

    def files(precisions: str | None, *, can_calibrate: bool) -> list[str]:
        return [recipe.file for recipe in select(precisions, can_calibrate=can_calibrate)]

    with monkeypatch.context() as without:
        without.setattr("convoy.export.variants.precision.find_cpu", lambda: CPU_ONLY)
        usual = ["fp32.onnx", "fp16.onnx", "int8-cpu.onnx", "int8-trt.onnx", "fp8.onnx"]
        assert files(None, can_calibrate=True) == usual
        assert files("int8", can_calibrate=True) == ["fp32.onnx", "int8-cpu.onnx", "int8-trt.onnx"]
    assert files(None, can_calibrate=True) == [*usual[:3], "int8-openvino.onnx", *usual[3:]]
    int8 = ["fp32.onnx", "int8-cpu.onnx", "int8-openvino.onnx", "int8-trt.onnx"]
    assert files("int8", can_calibrate=True) == int8
    assert files("fp32,fp8", can_calibrate=True) == ["fp32.onnx", "fp8.onnx"]
    assert files(None, can_calibrate=False) == files("fp32", can_calibrate=False) == ["fp32.onnx"]
    for precisions, can_calibrate, words in (
        ("fp8", False, "fp8 needs real images"),
        ("fp16,int8", False, "fp16 and int8 need real images"),
        ("fp4", True, "'fp4' is unknown; choose from bf16,fp16,fp32,fp8,int8"),
    ):
        with pytest.raises(UsageError, match=words):
            select(precisions, can_calibrate=can_calibrate)


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
    own = {"mean": (0.1, 0.2, 0.3), "std": (0.5,) * 3, "interpolation": "bicubic", "resize_mode": "shorter_side"}
    assert image == replace(IMAGE, height=32, width=24, resize_px=40, **own)
    straight = make_plan(options(tmp_path, **(ALL | {"resize": "32x24", "crop": None}))).image
    assert (straight.resize_mode, straight.height, straight.width) == ("exact", 32, 24)


def test_an_onnx_file_of_whose_images_something_was_said_is_not_plain(tmp_path):
    assert is_plain(options(tmp_path, source="net.onnx", preprocess=None))
    assert not is_plain(options(tmp_path, source="net.onnx", preprocess=None, mean="0.5"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mean": None, "interpolation": None}, "incomplete; also pass --mean, --interpolation, or use --preprocess"),
        ({"crop": None}, "incomplete; also pass --crop, or use --preprocess"),
        ({"mean": "0.1,0.2"}, "is not one number per channel"),
        ({"mean": "red"}, "is not one number per channel"),
        ({"mean": "nan"}, "is not one number per channel"),
        ({"mean": "123.7,116.3,103.5"}, "divide it by 255"),
        ({"std": "0"}, "must be above 0"),
        ({"resize": "0"}, "is not a size in pixels"),
        ({"crop": "3x32x32"}, "is not a size in pixels"),
        ({"resize": "16"}, "resize_px 16 is below the crop 32x24"),
        ({"resize": "40x40"}, "sets the exact size; to crop"),
        ({"interpolation": "cubic"}, "use nearest, bilinear, bicubic, lanczos"),
        ({"input": "3x64x64"}, "--input says 3x64x64, the preprocessing 3x32x24"),
        ({"preprocess": "unit", "input": "3x8x8", "resize": None}, "--crop has no effect"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, wrong, words):
    with pytest.raises(UsageError, match=words):
        make_plan(options(tmp_path, **(ALL | wrong)))


ONE_VALUE = ALL | {"mean": "0.5"}


@pytest.mark.parametrize(("taken", "shape"), [((3,), (32, 24, 3)), ((1,), (32, 24, 1))])
def test_one_value_for_all_is_of_as_many_channels_as_the_network_takes(tmp_path, monkeypatch, taken, shape):
    ask = Mock(return_value=Description(channels=taken))
    monkeypatch.setattr("convoy.export.sources.origin.ask", ask)
    (tmp_path / "net.py").write_text("")
    image = make_plan(options(tmp_path, **(ONE_VALUE | {"source": f"{tmp_path}/net.py:make"}))).image
    assert (image.tensor_shape, image.mean, image.std) == (shape, (0.5,) * shape[2], (0.5,) * shape[2])
    ((inquiry,), _) = ask.call_args
    assert (ask.call_count, inquiry.kind, inquiry.name, inquiry.size) == (1, "file", "make", (32, 24))


def test_where_channels_are_said_or_seen_the_network_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("convoy.export.sources.origin.ask", None)
    (tmp_path / "net.py").write_text("")
    factory = {"source": f"{tmp_path}/net.py:make"}
    for said in ({"input": "1x32x24"}, {"input": "3x32x24"}, {"mean": "0.1,0.2,0.3"}):
        channels = 1 if "1x32x24" in said.values() else 3
        assert make_plan(options(tmp_path, **(ONE_VALUE | factory | said))).image.channels == channels


@pytest.mark.parametrize(
    ("taken", "words"), [((), "runs on neither 1 nor 3 channels"), ((3, 1), "runs on 1 and on 3 channels")]
)
def test_a_network_that_does_not_tell_leaves_it_to_the_user(tmp_path, monkeypatch, taken, words):
    monkeypatch.setattr("convoy.export.sources.origin.ask", lambda _: Description(channels=taken))
    (tmp_path / "net.py").write_text("")
    with pytest.raises(UsageError, match=rf"but net.py:make {words}.*; pass --input 3x32x24 or 1x32x24"):
        make_plan(options(tmp_path, **(ONE_VALUE | {"source": f"{tmp_path}/net.py:make"})))


@pytest.mark.parametrize("channels", [1, 3])
def test_an_onnx_file_of_free_size_says_its_channels_itself(tmp_path, channels):
    weights = numpy_helper.from_array(np.ones((2, channels, 1, 1), np.float32), "w")
    save_graph(
        tmp_path / "n.onnx",
        [helper.make_node("Conv", ["x", "w"], ["y"]), helper.make_node("GlobalAveragePool", ["y"], ["z"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", channels, "h", "w"])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [weights],
        opset=17,
    )
    image = make_plan(options(tmp_path, **(ONE_VALUE | {"source": f"{tmp_path}/n.onnx"}))).image
    assert (image.channels, len(image.mean)) == (channels, channels)


@pytest.mark.slow
@pytest.mark.usefixtures("forks_torch")
@pytest.mark.parametrize(
    ("network", "taken"), [("Conv2d(3, 4, 3)", (3,)), ("Conv2d(1, 4, 3)", (1,)), ("ReLU()", (3, 1))]
)
def test_the_network_of_a_file_is_tried_on_both(tmp_path, network, taken):
    (tmp_path / "net.py").write_text(f"from torch import nn\n\n\ndef make():\n    return nn.{network}.half()\n")
    assert ask(Inquiry("file", "make", str(tmp_path / "net.py"), (32, 24))).channels == taken


DOCS = Path(__file__).parents[2] / "docs"
GOOD: dict[str, Any] = json.loads(schema())["examples"][0]


def read(tmp_path: Path, content: dict[str, Any]) -> ImageSpec:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(content))
    return read_preprocess_file(path, "uint8_nhwc")


def test_it_has_the_fields_of_the_specification_but_the_front() -> None:
    assert PreprocessFile.model_fields.keys() - {"schema_path"} == {one.name for one in fields(ImageSpec)} - {"front"}


def test_the_schema_in_docs_is_the_readers_own() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "convoy.export.sources.preprocess_file"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == schema() == (DOCS / "preprocess.schema.json").read_text()


def test_the_example_is_read_and_fits_the_schema(tmp_path: Path) -> None:
    rules = json.loads(schema())
    jsonschema.Draft202012Validator.check_schema(rules)
    for example in (GOOD, {"$schema": "preprocess.schema.json", **GOOD}):
        jsonschema.validate(example, rules)
        image = read(tmp_path, example)
        assert (image.height, image.resize_px, image.mean) == (224, 256, (0.485, 0.456, 0.406))
    told = (DOCS / "export.md").read_text().partition("preprocess.schema.json")[2].partition("```json")[2]
    assert json.loads(told.partition("```")[0]) == {"$schema": "preprocess.schema.json", **GOOD}


@pytest.mark.parametrize(
    "wrong",
    [
        {"height": 0},
        {"width": "224"},
        {"channels": 2},
        {"resize_mode": "shorter"},
        {"resize_px": 1.5},
        {"interpolation": "cubic"},
        {"antialias": "yes"},
        {"mean": [0.1, "x", 0.1]},
        {"std": [1, 1, 0]},
        {"std": []},
        {"widht": 224},
    ],
)
def test_what_the_schema_refuses_is_refused_by_the_fields_name(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(GOOD | wrong, json.loads(schema()))
    with pytest.raises(UsageError, match=rf"recipe\.json: {next(iter(wrong))}[.:]"):
        read(tmp_path, GOOD | wrong)


def test_everything_that_is_missing_or_wrong_is_named_at_once(tmp_path: Path) -> None:
    known = {name: value for name, value in GOOD.items() if name not in ("width", "antialias")}
    with pytest.raises(UsageError) as caught:
        read(tmp_path, known | {"std": [1, 1], "interpolation": "cubic", "resize_px": 100, "colour": "RGB"})
    for words in (
        "width: missing",
        "antialias: missing",
        "std: 3 values are needed, one per channel",
        "interpolation: Input should be 'nearest', 'bilinear', 'bicubic' or 'lanczos'",
        "resize_px: 100 is below the crop, whose longer side is 224",
        "colour: unknown field",
    ):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_straight_resize_needs_no_room_for_a_crop(tmp_path: Path) -> None:
    straight = GOOD | {"resize_mode": "exact"}
    assert read(tmp_path, straight | {"resize_px": 1}).resize_px == 1
    del straight["resize_px"]
    jsonschema.validate(straight, json.loads(schema()))
    assert read(tmp_path, straight).resize_px == 224
    with pytest.raises(UsageError, match=r"recipe\.json: resize_px: missing"):
        read(tmp_path, straight | {"resize_mode": "shorter_side"})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(straight | {"resize_mode": "shorter_side"}, json.loads(schema()))
