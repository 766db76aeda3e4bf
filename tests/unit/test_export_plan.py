from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export_fixtures import IMAGE, options

from convoy.app.engines.machine import CPU_ONLY
from convoy.export.plan import make_plan
from convoy.export.sources.torch_job import Description
from convoy.export.variants.precision import select
from convoy.models.checkpoint import CheckpointHeader, write_checkpoint
from convoy.models.errors import JobError, UsageError

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


def zoo(tmp_path, checkpoint: Path, **changes):
    bare = {"source": "zoo:simple_cnn", "weights": checkpoint, "labels": None, "preprocess": None, "input": None}
    return options(tmp_path, **(bare | changes))


def test_a_checkpoint_of_ours_says_all_that_is_needed(tmp_path, checkpoint):
    plan = make_plan(zoo(tmp_path, checkpoint))
    assert plan.labels == ("cat", "dog")
    assert plan.image == HEADER.image
    assert plan.source.shown == "zoo:simple_cnn"


def test_the_command_line_goes_before_the_checkpoint(tmp_path, checkpoint):
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
    fields = {name: getattr(IMAGE, name) for name in IMAGE.__slots__ if name != "front"}
    recipe.write_text(json.dumps(fields))
    assert make_plan(options(tmp_path, preprocess=str(recipe), input=None)).image == IMAGE
    recipe.write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        make_plan(options(tmp_path, preprocess=str(recipe), input=None))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"source": "resnet50"}, "not understood; use zoo:NAME"),
        ({"source": "model.onnx"}, "there is no file model.onnx"),
        ({"source": "model.pt2"}, "carries pickle, .* pass --trust"),
        ({"source": "zoo:resnet50"}, "the zoo has no network"),
        ({"source": "nowhere/net.py:make"}, "there is no file nowhere/net.py"),
        ({"source": "net.py"}, "lacks its function; write net.py:factory"),
        ({"source": "torchvision:resnet18"}, "pass --weights"),
        ({"source": "zoo:simple_cnn"}, "pass --weights"),
        ({"name": "../up"}, "cannot be a model's name"),
        ({"preprocess": None}, "pass --preprocess imagenet, unit or FILE.json"),
        ({"preprocess": "nowhere.json"}, "No such file"),
        ({"preprocess": "unit", "input": None}, "pass --input"),
        ({"preprocess": "imagenet", "input": "1x8x8"}, "for 3 channels"),
        ({"input": "8xy"}, "write an image as 3x224x224"),
        ({"input": "2x8x8"}, "with 1 or 3 channels"),
        ({"front": "float"}, "use uint8 or none"),
        ({"labels": Path("nowhere.txt")}, "one class a line"),
        ({"labels": None, "evaluate": "somewhere"}, "pass --labels FILE"),
        ({"class_map": Path("map.json")}, "--class-map is about the classes of a data set; pass --evaluate"),
        ({"max_batch": 0}, "--max-batch must be from 1"),
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
    [("red\nred\n", "'red' stands there twice"), ("red\n\n", "1 classes, at least 2"), ("", "0 classes")],
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
            "n01 is 'green', n02 is 2, n03 is -1, but the model has no",
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
    with pytest.raises(JobError, match="there is no checkpoint at nowhere"):
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
    assert files(None, can_calibrate=False) == ["fp32.onnx"]
    int8 = ["fp32.onnx", "int8-cpu.onnx", "int8-openvino.onnx", "int8-trt.onnx"]
    assert files("int8", can_calibrate=True) == int8
    assert files("fp32,fp8", can_calibrate=True) == ["fp32.onnx", "fp8.onnx"]
    with pytest.raises(UsageError, match="fp8 needs real images"):
        select("fp8", can_calibrate=False)
    assert files("fp32", can_calibrate=False) == ["fp32.onnx"]
    with pytest.raises(UsageError, match="fp16 and int8 need real images"):
        select("fp16,int8", can_calibrate=False)
    with pytest.raises(UsageError, match="'fp4' is not known; choose from bf16,fp16,fp32,fp8,int8"):
        select("fp4", can_calibrate=True)


def test_a_calibration_method_has_a_name(tmp_path):
    assert make_plan(options(tmp_path, calibration_method="entropy")).calibration_method == "entropy"
    with pytest.raises(UsageError, match="--calibration-method 'max' is not known; use auto, minmax, entropy"):
        make_plan(options(tmp_path, calibration_method="max"))
