"""Tasks: what a spec may declare of its outputs, and what it is told where that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.models.bundle import MANIFEST, read_manifest, seal
from convoy.models.errors import BundleError
from convoy.models.records import from_jsonable, to_jsonable
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.tasks import AnchorLevel, DetectionOutputs, SegmentationOutput, Task

DEMO = Path(__file__).parents[2] / "models" / "demo" / "digits" / "1"
IMAGES = TensorSpec("images", "UINT8", (32, 48, 3))
MAP = TensorSpec("map", "FP32", (3, 32, 48))
IDS = TensorSpec("ids", "INT64", (32, 48))
BOXES = TensorSpec("boxes", "FP32", (20, 4))
SCORES = TensorSpec("scores", "FP32", (20, 3))
KEPT = TensorSpec("kept", "FP32", (20,))
LABELS = TensorSpec("labels", "INT64", (20,))
COUNT = TensorSpec("count", "INT32", (1,))
OUTPUTS = (MAP, IDS, BOXES, SCORES, KEPT, LABELS, COUNT)
LEVEL = AnchorLevel(2, 5, 16.0, 9.6, ((8.0, 8.0), (16.0, 8.0)))


def declared(task: Task, **said: Any) -> ModelSpec:
    return ModelSpec(
        *("m", (IMAGES,), said.pop("outputs", OUTPUTS), 4, None, said.pop("activation", "none")),
        labels=said.pop("labels", ()),
        task=task,
        **said,
    )


SEGMENT = SegmentationOutput("map")
PER_CLASS = DetectionOutputs("boxes", "scores", iou_threshold=0.5, background=0)
IN_GRAPH = DetectionOutputs("boxes", "kept", labels="labels", count="count")


@pytest.mark.parametrize(
    "spec",
    [
        declared("segment", segmentation=SEGMENT, labels=("a", "b", "c")),
        declared("segment", segmentation=SegmentationOutput("ids"), labels=("a", "b")),
        declared("detect", detection=PER_CLASS, activation="softmax"),
        declared("detect", detection=IN_GRAPH),
        declared("detect", detection=DetectionOutputs("boxes", "scores", anchors=(LEVEL,), iou_threshold=0.5)),
        declared("multilabel", activation="sigmoid"),
        declared("none"),
    ],
)
def test_a_declaration_survives_the_manifest(spec: ModelSpec) -> None:
    assert from_jsonable(ModelSpec, json.loads(json.dumps(to_jsonable(spec))), "spec") == spec
    assert spec.gives_classes == (spec.task == "multilabel")


def test_a_manifest_without_a_task_is_one_that_classifies(tmp_path: Path) -> None:
    """As bundles were before there were tasks."""
    assert b'"task"' not in (DEMO / MANIFEST).read_bytes()
    manifest = read_manifest(DEMO)
    assert manifest.spec.task == "classify"
    (tmp_path / MANIFEST).write_bytes(seal(replace(manifest, spec=replace(manifest.spec, task="none"))))
    assert read_manifest(tmp_path).spec.task == "none"


def test_one_score_may_tell_two_classes_apart() -> None:
    single = TensorSpec("map", "FP32", (1, 32, 48))
    spec = declared("segment", segmentation=SEGMENT, outputs=(single,), labels=("off", "on"), activation="sigmoid")
    assert spec.labels == ("off", "on")
    with pytest.raises(BundleError, match="the softmax of a single score is always 1"):
        replace(spec, activation="softmax")


@pytest.mark.parametrize(
    ("task", "said", "words"),
    [
        ("segment", {}, "does not say which outputs are for it, though its task is segment"),
        ("detect", {}, "does not say which outputs are for it, though its task is detect"),
        ("none", {"segmentation": SEGMENT}, "says which outputs are for segment, though its task is none"),
        ("segment", {"segmentation": SEGMENT, "detection": IN_GRAPH}, "says which outputs are for detect"),
        ("multilabel", {"activation": "softmax"}, "declare sigmoid or none, or the task classify"),
        (
            "segment",
            {"segmentation": SegmentationOutput("mapp")},
            "there is no output 'mapp' for the class map; the model gives 'map', 'ids'",
        ),
        (
            "segment",
            {"segmentation": SegmentationOutput("boxes")},
            r"output 'boxes' is FP32 \[20, 4\] for one sample; it must be float \[classes, height, width\] or integer",
        ),
        ("segment", {"segmentation": SEGMENT, "labels": ("a", "b")}, "there are 2 labels, but its outputs tell 3"),
        (
            "segment",
            {"segmentation": SEGMENT, "outputs": (TensorSpec("map", "FP32", (256, 8, 8)),)},
            r"output 'map' is FP32 \[256, 8, 8\] for one sample; it must be a map of at most 255 classes",
        ),
        (
            "detect",
            {"detection": DetectionOutputs("map", "scores")},
            r"output 'map' is FP32 \[3, 32, 48\] for one sample; it must be float \[boxes, 4\]",
        ),
        ("detect", {"detection": DetectionOutputs("boxes", "map")}, r"it must be float \[boxes\] or \[boxes, classes"),
        (
            "detect",
            {"detection": DetectionOutputs("boxes", "scores", labels="labels")},
            r"output 'scores' \[20, 3\] has a score for each class, so that there is no use for labels in 'labels'",
        ),
        (
            "detect",
            {"detection": DetectionOutputs("boxes", "kept", labels="ids")},
            r"output 'ids' is INT64 \[32, 48\] for one sample; it must be integer \[boxes\]",
        ),
        (
            "detect",
            {"detection": DetectionOutputs("boxes", "kept", count="labels")},
            r"output 'labels' is INT64 \[20\] for one sample; it must be integer \[\] or \[1\]",
        ),
        (
            "detect",
            {"detection": PER_CLASS, "outputs": (replace(BOXES, shape=(19, 4)), SCORES)},
            r"not of one number of boxes: 'boxes' \[19, 4\], 'scores' \[20, 3\]",
        ),
        (
            "detect",
            {"detection": DetectionOutputs("boxes", "scores", anchors=(LEVEL, LEVEL))},
            "and there are 40 anchors",
        ),
        ("detect", {"detection": DetectionOutputs("boxes", "scores", background=3)}, "background 3 is none of the"),
        ("detect", {"detection": PER_CLASS, "labels": ("a",)}, "there are 1 labels, but its outputs tell 3 classes"),
        ("detect", {"detection": IN_GRAPH, "activation": "softmax"}, "the softmax of a single score is always 1"),
    ],
)
def test_what_cannot_be_is_said_with_the_output_and_its_shape(task: Task, said: dict[str, Any], words: str) -> None:
    with pytest.raises(BundleError, match=words):
        declared(task, **said)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"threshold": 1.5}, "threshold must be from 0 to 1"),
        ({"iou_threshold": 0.0}, "iou_threshold above 0"),
        ({"max_boxes": 0}, "max_boxes must be at least 1"),
        ({"max_candidates": 50}, "max_candidates no less"),
        ({"anchor_weights": (1.0, 1.0)}, "four numbers above 0"),
        ({"anchors": (LEVEL,), "box_form": "xywh"}, "no box_form and box_unit of their own"),
    ],
)
def test_a_detector_declares_sound_numbers(said: dict[str, Any], words: str) -> None:
    with pytest.raises(BundleError, match=words):
        DetectionOutputs("boxes", "scores", **said)


@pytest.mark.parametrize("sizes", [(), ((8.0,),), ((8.0, 0.0),), ((8.0, float("inf")),)])
def test_anchors_have_sizes(sizes: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(BundleError, match="an anchor level needs"):
        AnchorLevel(2, 2, 8.0, 8.0, sizes)
