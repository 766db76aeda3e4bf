"""Records in files: manifests, checkpoints, tasks, and how they come back."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from convoy.models.bundle import MANIFEST, open_bundle, read_manifest, seal
from convoy.models.checkpoint import (
    CheckpointHeader,
    PartRecord,
    read_checkpoint_header,
    refuse_unwritable,
    write_checkpoint,
)
from convoy.models.errors import BundleError, JobError
from convoy.models.records import RecordError, from_jsonable, to_jsonable
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import AnchorLevel, DetectionOutputs, SegmentationOutput, Task

DEMO = Path(__file__).parents[2] / "models" / "demo" / "digits" / "1"
MADE = read_manifest(DEMO)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "1"))


def test_the_demo_is_sound_and_what_changes_its_manifest_changes_the_seal() -> None:
    opened = open_bundle(DEMO)
    assert opened.manifest.spec.name == "digits"
    assert 8 <= opened.canary().samples <= 32
    spec = opened.manifest.spec
    changed = replace(opened.manifest, spec=replace(spec, labels=("Ü", *spec.labels[1:])))
    assert seal(changed) != seal(opened.manifest)


@pytest.mark.parametrize("name", sorted(path.name for path in DEMO.iterdir()))
def test_one_flipped_bit_in_any_file_is_refused_and_a_missing_one_is_named(bundle: Path, name: str) -> None:
    content = (bundle / name).read_bytes()
    for position in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
        damaged = bytearray(content)
        damaged[position] ^= 1
        (bundle / name).write_bytes(damaged)
        with pytest.raises(BundleError):
            open_bundle(bundle)
    (bundle / name).write_bytes(content)
    open_bundle(bundle)
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=name):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("edited", "words"),
    [
        # Even when it says the same.
        (json.dumps(json.loads((DEMO / MANIFEST).read_text()), indent=4).encode(), "modified after it was written"),
        (seal(replace(MADE, files={**MADE.files, "../labels.txt": MADE.files["labels.txt"]})), "outside the bundle"),
        (seal(replace(MADE, schema_version=99)), "schema_version is 99"),
    ],
)
def test_a_manifest_that_is_not_as_it_was_made_is_refused(bundle: Path, edited: bytes, words: str) -> None:
    (bundle / MANIFEST).write_bytes(edited)
    with pytest.raises(BundleError, match=words):
        open_bundle(bundle)


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b", 1]
    share: float
    inner: Inner | None
    by_name: dict[str, Inner]
    added_later: bool = False


inners = st.builds(Inner, st.text(), st.lists(st.integers()).map(tuple))
outers = st.builds(
    Outer,
    st.sampled_from(["a", "b", 1]),
    st.floats(allow_nan=False),
    st.none() | inners,
    st.dictionaries(st.text(), inners),
    st.booleans(),
)


@given(outers)
def test_a_record_comes_back_as_it_was(record: Outer) -> None:
    assert from_jsonable(Outer, to_jsonable(record), "r") == record


GOOD: dict[str, Any] = {"kind": "a", "share": 1, "inner": None, "by_name": {}}


def test_a_field_that_was_added_later_may_be_missing() -> None:
    assert from_jsonable(Outer, GOOD, "r") == Outer("a", 1.0, None, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "c"}, r"r\.kind: expected one of"),
        ({"kind": True}, r"r\.kind: expected one of"),
        ({"share": "1"}, r"r\.share: expected float"),
        ({"share": True}, r"r\.share: expected float"),
        ({"inner": {"name": "x"}}, r"r\.inner\.sizes: missing"),
        ({"inner": {"name": "x", "sizes": [1, "2"]}}, r"r\.inner\.sizes\[1\]: expected int"),
        ({"inner": {"name": "x", "sizes": 3}}, r"r\.inner\.sizes: expected a list"),
        ({"by_name": []}, r"r\.by_name: expected an object"),
        ({"by_name": {"k": 1}}, r"r\.by_name\.k: expected an object"),
        ({"typo": 1}, r"r\.typo: unknown field"),
    ],
)
def test_anything_else_names_the_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        from_jsonable(Outer, {**GOOD, **change}, "r")


IMAGE = ImageSpec(32, 32, 3, "exact", 32, "bilinear", True, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "uint8_nhwc")
HEADER = CheckpointHeader(
    architecture="simple_cnn",
    labels=("cat", "dög"),
    image=IMAGE,
    dataset="digits",
    split={
        "train": PartRecord(70, "a" * 64),
        "calibration": PartRecord(10, "b" * 64),
        "test": PartRecord(20, "c" * 64),
    },
    convoy_version="0.1.0",
    seed=3,
    test_accuracy=0.99,
)
WEIGHTS = {"conv.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "steps": np.array(7)}


def test_what_is_written_is_read_and_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    path = tmp_path / "cnn.safetensors"
    write_checkpoint(path, WEIGHTS, HEADER)
    assert read_checkpoint_header(path) == HEADER
    weights = load_file(path)
    assert all(np.array_equal(weights[name], array) for name, array in WEIGHTS.items())
    assert [entry.name for entry in tmp_path.iterdir()] == ["cnn.safetensors"]
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_weights_from_elsewhere_have_no_header(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "theirs.safetensors", metadata)
    assert read_checkpoint_header(tmp_path / "theirs.safetensors") is None


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"PK\x03\x04" + b"x" * 100, b"\xff" * 64, "cut off", "a folder", None]
)
def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, content: bytes | str | None) -> None:
    path = tmp_path / "cnn.safetensors"
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        write_checkpoint(path, WEIGHTS, HEADER)
        path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:-5])
    words = r"no checkpoint at .*; check the path, or run `convoy train`" if content is None else r"cannot read"
    with pytest.raises(JobError, match=words) as caught:
        read_checkpoint_header(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"schema": 99}', '{"schema": 1, "image": {"height": 0}, "split": {}}']
)
def test_a_broken_header_of_ours_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cnn.safetensors"
    save_file({"w": np.zeros(2, np.float32)}, path, {"convoy": text})
    with pytest.raises(JobError, match=r"header of .* is broken .*; train again"):
        read_checkpoint_header(path)


def test_a_header_with_an_impossible_image_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "cnn.safetensors"
    write_checkpoint(path, WEIGHTS, HEADER)
    tampered = json.loads(metadata(path))
    tampered["image"]["std"] = [0, 0, 0]
    save_file(WEIGHTS, path, {"convoy": json.dumps(tampered)})
    with pytest.raises(JobError, match="std must be above 0"):
        read_checkpoint_header(path)


def metadata(path: Path) -> str:
    size = int.from_bytes(path.read_bytes()[:8], "little")
    text: str = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["convoy"]
    return text


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_leaves_the_file_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "cnn.safetensors"
    write_checkpoint(path, WEIGHTS, HEADER)

    monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
    with pytest.raises((JobError, KeyboardInterrupt)) as caught:
        write_checkpoint(path, WEIGHTS, replace(HEADER, seed=4))
    if isinstance(error, OSError):
        assert (
            str(caught.value)
            == f"cannot write {path}: No space left on device; free space there or choose another place"
        )
    assert read_checkpoint_header(path) == HEADER
    assert [entry.name for entry in tmp_path.iterdir()] == ["cnn.safetensors"]


def test_a_place_that_takes_no_file_is_refused_before_the_work(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "cnn.safetensors")
    with pytest.raises(JobError, match=r"no folder .*gone for cnn.safetensors; create it first"):
        refuse_unwritable(tmp_path / "gone" / "cnn.safetensors")
    with pytest.raises(JobError, match="is a folder; pass a file"):
        refuse_unwritable(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=r"file is a file, but must be a folder for cnn\.safetensors"):
        refuse_unwritable(tmp_path / "file" / "cnn.safetensors")


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
    assert MADE.spec.task == "classify"
    (tmp_path / MANIFEST).write_bytes(seal(replace(MADE, spec=replace(MADE.spec, task="none"))))
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
        ("segment", {}, "does not declare the outputs of its task segment"),
        ("detect", {}, "does not declare the outputs of its task detect"),
        ("none", {"segmentation": SEGMENT}, "declares outputs for segment, but its task is none"),
        ("segment", {"segmentation": SEGMENT, "detection": IN_GRAPH}, "declares outputs for detect"),
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
        ("segment", {"segmentation": SEGMENT, "labels": ("a", "b")}, "there are 2 labels, but its outputs have 3"),
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
        ("detect", {"detection": PER_CLASS, "labels": ("a",)}, "there are 1 labels, but its outputs have 3 classes"),
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
