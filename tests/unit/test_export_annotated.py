"""Detectors and segmenters scored on annotated images: targets on the network's input, the gate, and what is shown."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_fixtures import export, make_quick
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from convoy.app.commands.inspect import run as inspect
from convoy.export.command import export_bundle
from convoy.export.data import ImageSet
from convoy.export.options import ExportOptions
from convoy.export.progress import SILENT, Progress
from convoy.export.proof.proving import AccuracyGate
from convoy.export.proof.sanity import Expectations, judge_score
from convoy.export.proof.verify import measure_accuracy
from convoy.export.report.comparisons import MOST_COMPARED
from convoy.export.targets import (
    CROWD,
    OBJECT,
    PICTURE,
    UNLABELLED,
    Targets,
    boxes_on_input,
    mask_on_input,
    objects_on_input,
)
from convoy.export.terminal import summary
from convoy.export.variants.precision import REFERENCE, Recipe
from convoy.export.variants.variant import opened
from convoy.models.annotations.reading import load_annotated
from convoy.models.bundle import DrawnAnswer, open_bundle
from convoy.models.errors import JobError
from convoy.models.geometry import ImagePlacement
from convoy.models.samples import Objects
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import DetectionOutputs
from tests.support.annotated_images import (
    CELLS,
    CLASSES,
    SIDE_PX,
    pictures,
    write_box_finder,
    write_coco,
    write_masks,
    write_segmenter,
    write_yolo,
)
from tests.support.detector_files import METADATA
from tests.support.detector_files import write_detector as write_yolo_file

IMAGE = ImageSpec.plain(SIDE_PX, SIDE_PX, 3, "float32_nchw")
SPEC = ModelSpec(
    "squares",
    (TensorSpec("images", "FP32", (3, SIDE_PX, SIDE_PX)),),
    (TensorSpec("boxes", "FP32", (CELLS**2, 4)), TensorSpec("scores", "FP32", (CELLS**2, 2))),
    4,
    IMAGE,
    "none",
    CLASSES,
    task="detect",
    detection=DetectionOutputs("boxes", "scores", iou_threshold=0.5),
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    make_quick(monkeypatch)


@pytest.fixture
def coco(tmp_path) -> Path:
    shown = pictures(70)
    write_coco(tmp_path / "squares", shown[:30], "train")
    write_coco(tmp_path / "squares", shown[30:], "val")
    return tmp_path / "squares"


def exported(tmp_path: Path, source: Path, data: Path, **changes: object) -> Any:
    return export(tmp_path, source, data=str(data), preprocess="unit", input="3x32x32", **changes)


def test_a_detector_is_scored_and_the_measures_are_shown_everywhere(tmp_path, coco):
    bundle = exported(tmp_path, write_box_finder(tmp_path / "net.onnx"), coco, precisions="fp16,int8")
    manifest = bundle.manifest
    assert (manifest.spec.task, manifest.spec.labels) == ("detect", CLASSES)
    for variant in manifest.variants:
        assert variant.accuracy is not None
        assert variant.accuracy.set_metrics == {"mAP@50": 1.0, "mAP@50:95": 1.0}
        assert (variant.accuracy.metric, variant.accuracy.images) == ("AP per image", 40)
    assert manifest.provenance.calibration.images == 30
    assert "mAP@50 1.0000, mAP@50:95 1.0000 on 40 samples" in manifest.findings[0]
    console = Console(file=io.StringIO(), width=80)
    console.print(summary(manifest, is_verbose=True))
    inspect(str(bundle.folder.parent.parent), None, console)
    told = console.file.getvalue()
    assert told.count("mAP@50: fp32.onnx 1.0000, ") == 2
    assert max(map(len, told.splitlines())) <= 80
    assert "with mAP@50:95 1.0000 on 40 images" in " ".join(told.split())
    page = (bundle.folder / "report.html").read_text()
    headings = re.findall(r"<th[^>]*>([^<]*)</th>", page)
    place = headings.index("mAP@50")
    assert headings[place : place + 3] == ["mAP@50", "mAP@50:95", "AP per image"]
    written = json.loads((bundle.folder / "manifest.json").read_text())
    assert written["variants"][0]["accuracy"]["set_metrics"] == {"mAP@50": 1.0, "mAP@50:95": 1.0}
    assert open_bundle(bundle.folder).manifest == manifest


def measured(tmp_path: Path, data: Path, **lossy: Any) -> list[Any]:
    """The scores of a right detector and of another one, as fp32 and as a variant."""
    folder = tmp_path / "files"
    folder.mkdir()
    write_box_finder(folder / REFERENCE.file)
    write_box_finder(folder / "lossy.onnx", **lossy)
    dataset = load_annotated(str(data), most_calibrated=100, is_split=True)
    images = ImageSet("squares", tuple(dataset.part("test")), IMAGE, CLASSES)
    with opened(SPEC, [REFERENCE, Recipe("lossy.onnx", "int8", "cpu", None)], folder) as candidates:
        return list(measure_accuracy(candidates, images, SILENT))


def test_a_variant_that_loses_the_boxes_of_a_class_fails_the_gate(tmp_path, coco):
    reference, lossy = (score.accuracy for score in measured(tmp_path, coco, gains=(1.0, 0.04)))
    assert (reference.top1, reference.set_metrics["mAP@50"]) == (1.0, 1.0)
    gate = AccuracyGate(1.0)
    assert gate.passes(reference)
    assert not gate.passes(lossy)
    # The lower scores are still found by a mean average precision, which goes further down than the server.
    assert lossy.set_metrics["mAP@50"] == 1.0
    assert lossy.loss_points > 30


def test_a_variant_that_finds_nothing_of_a_class_halves_the_map(tmp_path, coco):
    _, lossy = (score.accuracy for score in measured(tmp_path, coco, gains=(1.0, 0.0)))
    assert lossy.set_metrics == {"mAP@50": 0.5, "mAP@50:95": 0.5}
    assert not AccuracyGate(1.0).passes(lossy)


def write_wide_pictures(root: Path, part: str, count: int, seed: int, shape: str = "box") -> None:
    """A YOLO folder of 400x200 pictures with red and blue squares of 50, which a letterbox turns into cells of 8.

    As boxes, polygons, or boxes with two keypoints, the centre and the upper left corner.
    """
    generator = np.random.default_rng(seed)
    for number in range(count):
        image = Image.new("RGB", (400, 200), (90, 90, 90 + number % 2))
        lines = []
        for cell in generator.choice(32, 3, replace=False).tolist():
            column, row, label = cell % 8, cell // 8, int(generator.integers(0, 2))
            image.paste(("blue", "red")[label], (50 * column, 50 * row, 50 * column + 50, 50 * row + 50))
            left, right, top, bottom = column / 8, (column + 1) / 8, row / 4, (row + 1) / 4
            box = f"{(column + 0.5) / 8} {(row + 0.5) / 4} {1 / 8} {1 / 4}"
            forms = {
                "box": box,
                "polygon": f"{left} {top} {right} {top} {right} {bottom} {left} {bottom}",
                "keypoints": f"{box} {(column + 0.5) / 8} {(row + 0.5) / 4} 2 {left} {top} 1",
            }
            lines.append(f"{label} {forms[shape]}")
        for folder in ("images", "labels"):
            (root / folder / part).mkdir(parents=True, exist_ok=True)
        image.save(root / "images" / part / f"{number}.png")
        (root / "labels" / part / f"{number}.txt").write_text("\n".join(lines))


def test_a_yolo_with_its_own_labels_and_a_letterbox_is_right_on_a_yolo_folder(tmp_path):
    """One command: the file says its preprocessing, its layout and its classes, and the data names them otherwise."""
    for part, count, seed in (("train", 12, 1), ("val", 30, 2)):
        write_wide_pictures(tmp_path / "data", part, count, seed)
    (tmp_path / "data" / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [blue, red]\n")
    network = write_yolo_file(tmp_path / "yolo.onnx", batch="batch")
    bundle = export(tmp_path, network, data=str(tmp_path / "data"), precisions="int8")
    assert (bundle.manifest.spec.labels, bundle.manifest.spec.image.resize_mode) == (("red", "blue"), "letterbox")
    for variant in bundle.manifest.variants:
        assert variant.accuracy.set_metrics == pytest.approx({"mAP@50": 1.0, "mAP@50:95": 1.0}, abs=0.02)


@pytest.mark.parametrize(
    ("layout", "shape", "names"),
    [
        ("yolo_v8_seg", "polygon", ("mask mAP@50", "mask mAP@50:95")),
        ("yolo_v8_pose", "keypoints", ("OKS mAP@50", "OKS mAP@50:95")),
        ("yolo_v8_seg", "box", ("mAP@50", "mAP@50:95")),
    ],
)
def test_masks_and_keypoints_are_measured_if_the_data_has_them(tmp_path, layout, shape, names):
    """Beside another colour, the network cuts the edges of a mask."""
    for part, count, seed in (("train", 4, 1), ("val", 30, 2)):
        write_wide_pictures(tmp_path / "data", part, count, seed, shape)
    said = "train: images/train\nval: images/val\nnames: [blue, red]\n"
    (tmp_path / "data" / "data.yaml").write_text(said + ("kpt_shape: [2, 3]\n" if shape == "keypoints" else ""))
    metadata = METADATA | {"task": {"yolo_v8_seg": "segment", "yolo_v8_pose": "pose"}[layout], "kpt_shape": "[2, 3]"}
    network = write_yolo_file(tmp_path / "yolo.onnx", layout, metadata, batch="batch")
    bundle = export(tmp_path, network, data=str(tmp_path / "data"), precisions="fp32")
    accuracy = bundle.manifest.variants[0].accuracy
    assert tuple(accuracy.set_metrics) == names
    assert accuracy.set_metrics[names[0]] == pytest.approx(1.0, abs=0.02)
    assert accuracy.set_metrics[names[1]] > (0.2 if names[0].startswith("mask") else 0.98)
    drawn = [one.reference for one in bundle.manifest.comparisons]
    # The network sees 32 x 32 pixels. Half of them are padding, because the pictures are 400 x 200.
    assert {one.window for one in bundle.manifest.comparisons} == {(0.0, 0.25, 1.0, 0.75)}
    assert (
        f"{names[1].replace('mask m', 'Mask ').replace('mAP', 'AP')} per class"
        in (bundle.folder / "report.html").read_text()
    )
    # The second keypoint has a low score.
    points = 1 if shape == "keypoints" else 0
    assert {len(box.points) for answer in drawn for box in answer.boxes} == {points}
    for answer in drawn if layout == "yolo_v8_seg" else ():
        is_masked = np.asarray(map_of(answer).convert("RGBA"))[..., 3] > 0
        is_in_boxes = np.zeros_like(is_masked)
        for box in answer.boxes:
            x1, y1, x2, y2 = (round(share * is_masked.shape[0]) for share in box.box)
            is_in_boxes[y1:y2, x1:x2] = True
        assert not (is_masked & ~is_in_boxes).any()
        assert is_masked.sum() > 0.5 * is_in_boxes.sum()


def test_8_bits_that_lose_boxes_are_refused(tmp_path, coco):
    """Green is a thousandth of red in one tensor, so that 8 bits with one scale for both lose it."""
    bundle = exported(tmp_path, write_box_finder(tmp_path / "net.onnx", small=0.001), coco, precisions="int8")
    lossy = bundle.manifest.variant("int8-cpu.onnx")
    assert lossy.accuracy.set_metrics["mAP@50"] == 0.5
    assert (lossy.serve, lossy.passes_gate) == (False, False)
    assert "points of AP per image on 40 samples, over the budget of 1" in lossy.reason
    # The search had noticed it on the calibration images, and had tried to keep layers.
    assert [one.layers_kept for one in lossy.trade_offs] == [0, 1]
    assert all(one.accuracy.top1 < 0.6 for one in lossy.trade_offs)
    assert {one.label: round(one.recall, 1) for one in lossy.accuracy.per_class} == {"red": 1.0, "green": 0.0}
    compared = bundle.manifest.comparisons
    losses = [one.score - one.other_score for one in compared]
    assert len(compared) == MOST_COMPARED
    assert losses == sorted(losses, reverse=True)
    for one in compared:
        assert one.file.startswith("int8-")
        assert len(one.reference.boxes) == len(one.wanted.boxes)
        assert one.file != "int8-cpu.onnx" or {box.class_id for box in one.other.boxes} <= {0}
        for box in one.wanted.boxes:
            assert min(np.abs(np.subtract(box.box, own.box)).max() for own in one.reference.boxes) < 0.02
    page = (bundle.folder / "report.html").read_text()
    assert page.count("data:image/jpeg;base64,") == MOST_COMPARED
    assert "int8-cpu.onnx, AP per image " in page
    assert "AP@50:95 per class" in page


def test_a_detector_that_finds_nothing_is_not_published(tmp_path, coco):
    network = write_box_finder(tmp_path / "net.onnx", gains=(0.0, 0.0))
    with pytest.raises(JobError, match=r"nothing was published: mAP@50 0.0000, .*hardly anything is right; check"):
        exported(tmp_path, network, coco, precisions="fp32")


def test_expectations_are_of_the_published_measure(tmp_path, coco):
    accuracy = measured(tmp_path, coco, gains=(1.0, 0.0))[1].accuracy
    assert judge_score(accuracy, Expectations(min_percent=49)).objections == ()
    (objection,) = judge_score(accuracy, Expectations(min_percent=51)).objections
    assert "--min-accuracy wants 51 %" in objection


def test_labels_and_tasks_must_fit_the_data(tmp_path, coco):
    network = write_box_finder(tmp_path / "net.onnx")
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    with pytest.raises(JobError, match="classes unknown to the model: red, green; rename or remove them"):
        exported(tmp_path, network, coco, labels=tmp_path / "labels.txt")
    with pytest.raises(JobError, match="squares has boxes, but the task of the model is segment; pass --task detect"):
        exported(tmp_path, write_segmenter(tmp_path / "map.onnx"), coco, task="segment")
    (tmp_path / "labels.txt").write_text("green\nred\n")
    bundle = exported(tmp_path, network, coco, labels=tmp_path / "labels.txt", precisions="fp32", force=True)
    # By name: now every box is of the other class.
    assert bundle.manifest.variants[0].accuracy.set_metrics["mAP@50"] < 0.05
    write_yolo(tmp_path / "yolo", pictures(30), "val")
    (tmp_path / "labels.txt").write_text("red\n")
    with pytest.raises(JobError, match="yolo has class 1, and the model has 1 labels, from 0 to 0; pass the --labels"):
        exported(tmp_path, network, tmp_path / "yolo", labels=tmp_path / "labels.txt")


def test_calibration_images_without_objects_are_counted(tmp_path):
    shown = pictures(30)
    write_coco(tmp_path / "squares", shown[:10], "train")
    write_coco(tmp_path / "squares", shown[10:], "val")
    file = tmp_path / "squares" / "annotations" / "instances_train.json"
    whole = json.loads(file.read_text())
    whole["annotations"] = [box for box in whole["annotations"] if box["image_id"] >= 103]
    file.write_text(json.dumps(whole))
    said: list[str] = []

    class Heard(Progress):
        def say(self, line: str) -> None:
            said.append(line)

    network = write_box_finder(tmp_path / "net.onnx")
    options = ExportOptions(
        str(network),
        "net",
        data=str(tmp_path / "squares"),
        preprocess="unit",
        input="3x32x32",
        precisions="fp32",
        store=tmp_path / "store",
    )
    export_bundle(options, Heard())
    assert "warning: 3 of 10 calibration images contain no objects" in said


def test_a_segmenter_is_scored_by_masks(tmp_path):
    shown = pictures(50)
    write_masks(tmp_path / "squares", shown[:20], "train")
    write_masks(tmp_path / "squares", shown[20:], "val")
    bundle = exported(tmp_path, write_segmenter(tmp_path / "net.onnx"), tmp_path / "squares", precisions="int8")
    accuracy = bundle.manifest.variants[0].accuracy
    assert bundle.manifest.spec.task == "segment"
    assert accuracy.metric == "mean IoU per image"
    assert list(accuracy.set_metrics) == ["mean IoU"]
    assert 0.98 < accuracy.set_metrics["mean IoU"] <= 1.0
    assert [one.label for one in accuracy.per_class] == ["0", "1", "2"]
    compared = bundle.manifest.comparisons
    assert len(compared) == MOST_COMPARED
    for one in compared:
        wanted, own = (np.asarray(map_of(answer).convert("RGBA")) for answer in (one.wanted, one.reference))
        assert (wanted == own).all(axis=2).mean() > 0.9


def map_of(answer: DrawnAnswer) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(answer.class_map)))


def placed(width: int, height: int, **changes: Any) -> ImagePlacement:
    plain = ImageSpec.plain(64, 96, 3, "uint8_nhwc")
    return ImagePlacement.of((width, height), ImageSpec(**{**vars(plain), **changes}))


PLACEMENTS = {
    "exact": {},
    "crop": {"resize_mode": "shorter_side", "resize_px": 100},
    "letterbox": {"resize_mode": "letterbox"},
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(PLACEMENTS)), st.integers(20, 300), st.integers(20, 300), st.integers(0, 2**32 - 1))
def test_boxes_come_back_to_where_they_were(mode, width, height, seed):
    placement = placed(width, height, **PLACEMENTS[mode])
    corners = np.sort(np.random.default_rng(seed).uniform(0, 1, (6, 2, 2)), axis=1).reshape(6, 4)
    boxes = corners * np.tile((width, height), 2)
    assert np.allclose(placement.boxes_on_picture(boxes_on_input(boxes, placement)), boxes)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(PLACEMENTS)), st.integers(20, 200), st.integers(20, 200))
def test_masks_show_on_the_input_what_is_there(mode, width, height):
    """Each pixel of the input has the mask's value at its own centre."""
    placement = placed(width, height, **PLACEMENTS[mode])
    mask = (np.arange(width)[None, :] * 3 + np.arange(height)[:, None]).astype(np.uint8) % 200
    found = mask_on_input(mask, placement)
    assert found.shape == placement.window[::-1]
    for y, x in ((0, 0), (31, 47), (63, 95), (5, 90)):
        # A centre may lie on the edge of two pixels, but for rounding.
        left, top = placement.boxes_on_picture(np.array([[x + 0.5, y + 0.5, x + 0.5, y + 0.5]]))[0, :2] + 1e-9
        inside = [
            0 <= at + 0.5 + corner < full
            for at, corner, full in zip((x, y), placement.corner, placement.full, strict=True)
        ]
        assert found[y, x] == (
            mask[min(int(top), height - 1), min(int(left), width - 1)] if all(inside) else UNLABELLED
        )


def test_a_crop_clips_objects_and_ignores_those_that_it_hardly_leaves():
    placement = placed(300, 100, resize_mode="shorter_side", resize_px=100)
    # The crop shows x from 102 to 198, y from 18 to 82.
    boxes = [[110, 20, 130, 40], [92, 20, 112, 40], [87, 20, 104, 40], [0, 0, 50, 50]]
    found = objects_on_input(Objects(np.array(boxes, float), np.array([4, 5, 6, 7]), np.zeros(4, bool)), placement)
    assert found[:2].tolist() == [[8, 2, 28, 22, 4, OBJECT], [0, 2, 10, 22, 5, OBJECT]]
    assert found[2, 4:].tolist() == [6, CROWD]
    assert found[3, 4] == -1


def test_targets_have_a_row_for_each_object_and_one_for_the_picture(tmp_path):
    write_coco(tmp_path, pictures(6))
    samples = load_annotated(str(tmp_path), most_calibrated=9, is_split=False).part("test")
    targets = Targets.of(samples, IMAGE)
    made = np.stack([targets.one(sample, (64, 64)) for sample in samples])
    assert made.shape == (6, 1 + max(len(one.target.boxes) for one in samples), 6)
    assert made[:, 0].tolist() == [[0, 0, SIDE_PX, SIDE_PX, -1, PICTURE]] * 6
    assert [(row[:, 4] >= 0).sum() for row in made] == [len(one.target.boxes) for one in samples]
