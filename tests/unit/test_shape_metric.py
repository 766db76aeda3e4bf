"""Mean average precision of masks and keypoints, from files of annotations to the judge, beside pycocotools."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from convoy.app.pictures.answering import detections
from convoy.app.pictures.coco import coco_records
from convoy.export.proof.judging import judge_of
from convoy.export.targets import Targets, target_key
from convoy.models.annotations.filled import filled
from convoy.models.annotations.reading import load_annotated
from convoy.models.errors import JobError
from convoy.models.geometry import ImagePlacement
from convoy.models.run_lengths import counts_of, mask_of
from convoy.models.samples import Objects, Sample
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import DetectionOutputs
from convoy.models.tensors import TensorBytes

coco: Any = pytest.importorskip("pycocotools.coco")
cocoeval: Any = pytest.importorskip("pycocotools.cocoeval")
coco_mask: Any = pytest.importorskip("pycocotools.mask")

SIDE, BOXES, MASKS, POINTS = 96, 40, 4, 17
IMAGE = ImageSpec(**{**vars(ImageSpec.plain(SIDE, SIDE, 3, "uint8_nhwc")), "resize_mode": "letterbox"})
SAID = {
    "segm": DetectionOutputs("boxes", layout="yolo_v8_seg", prototypes="prototypes", threshold=0.25, iou_threshold=0.9),
    "keypoints": DetectionOutputs("boxes", layout="yolo_v8_pose", keypoints=(POINTS, 3), iou_threshold=0.9),
}
SHAPES: dict[str, Any] = {"segm": "masks", "keypoints": "keypoints"}
NAMES = {"segm": ("mask mAP@50", "mask mAP@50:95"), "keypoints": ("OKS mAP@50", "OKS mAP@50:95")}


@pytest.mark.parametrize("seed", range(200))
def test_polygons_are_filled_as_by_pycocotools(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(10):
        width, height = (int(side) for side in generator.integers(1, 60, 2))
        polygons = [
            generator.uniform(-0.05, 1.05, (int(generator.integers(3, 12)), 2)) * [width, height]
            for _ in range(int(generator.integers(1, 4)))
        ]
        polygons = [np.rint(one) for one in polygons] if generator.random() < 0.3 else polygons
        theirs = coco_mask.merge(coco_mask.frPyObjects([one.reshape(-1).tolist() for one in polygons], height, width))
        assert np.array_equal(counts_of(theirs["counts"].decode()), filled(polygons, (width, height)))


def annotated(folder: Path, generator: np.random.Generator, count: int = 6) -> Path:
    """COCO's annotations of pictures, with polygons, some run lengths, crowds, and objects without labelled points."""
    images, objects = [], []
    for number in range(1, count + 1):
        width, height = (int(side) for side in generator.integers(60, 240, 2))
        Image.new("RGB", (width, height), (number, 0, 0)).save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": width, "height": height})
        for place in range(int(generator.integers(1, 6))):
            low, sizes = (
                generator.uniform(0, 0.5, 2) * [width, height],
                generator.uniform(0.2, 0.5, 2) * [width, height],
            )
            angles = np.sort(generator.uniform(0, 2 * np.pi, 12))
            outline = low + sizes / 2 + np.stack([np.cos(angles), np.sin(angles)], axis=1) * sizes / 2
            points = np.concatenate([low + generator.random((POINTS, 2)) * sizes, np.zeros((POINTS, 1))], axis=1)
            points[:, 2] = generator.integers(0, 3, POINTS) if generator.random() < 0.8 else 0
            (rle,) = coco_mask.frPyObjects([outline.reshape(-1).tolist()], height, width)
            is_crowd = generator.random() < 0.2
            mask: Any = [outline.reshape(-1).tolist()]
            if is_crowd:
                text = rle["counts"].decode()
                mask = {"size": [height, width], "counts": text if place % 2 else counts_of(text).tolist()}
            objects.append(
                {
                    "id": len(objects) + 1,
                    "image_id": number,
                    "category_id": int(generator.integers(1, 3)),
                    "bbox": [*low.tolist(), *sizes.tolist()],
                    "area": float(coco_mask.area(rle)),
                    "iscrowd": int(is_crowd),
                    "segmentation": mask,
                    "keypoints": points.reshape(-1).tolist(),
                    "num_keypoints": int((points[:, 2] > 0).sum()),
                }
            )
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    file = folder / "annotations.json"
    file.write_text(json.dumps({"images": images, "annotations": objects, "categories": categories, "info": {}}))
    return file


def outputs_near(sample: Sample, kind: str, size: tuple[int, int], generator: np.random.Generator) -> dict[str, Any]:
    """A network's outputs for a picture: near its objects, twice, and elsewhere; all scores differ."""
    target, placement = sample.target, ImagePlacement.of(size, IMAGE)
    assert isinstance(target, Objects)
    scale = np.divide(placement.full, placement.picture)
    rows = np.zeros((BOXES, 4 + 2 + {"segm": MASKS, "keypoints": 3 * POINTS}[kind]), np.float32)
    scores = generator.permutation(1000)[:BOXES] / 1024 + 0.005
    for row in range(BOXES):
        near = int(generator.integers(len(target.boxes)))
        corners = (target.boxes[near].reshape(2, 2) * scale - placement.corner) + generator.normal(0, 2, (2, 2))
        low, high = corners.min(axis=0), corners.max(axis=0) + 1
        rows[row, :4] = *((low + high) / 2), *(high - low)
        label = target.classes[near] if row % 3 else generator.integers(2)
        rows[row, 4 + label] = scores[row]
        if kind == "segm":
            rows[row, 6:] = generator.normal(0, 1, MASKS)
            rows[row, 6] = 3
        else:
            assert target.keypoints is not None
            points = target.keypoints[near].copy()
            points[:, :2] = points[:, :2] * scale - placement.corner + generator.normal(0, 2.5, (POINTS, 2))
            rows[row, 6:] = points.reshape(-1)
    found = {"boxes": rows.T[None].copy()}
    if kind == "segm":
        cells = generator.normal(0, 0.5, (MASKS, 24, 24)).astype(np.float32)
        cells[0] += 1
        found["prototypes"] = cells[None]
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["segm", "keypoints"])
def test_the_judge_has_the_map_of_pycocotools(tmp_path: Path, kind: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    file = annotated(tmp_path, generator)
    samples = load_annotated(str(file), most_calibrated=9, is_split=False, shapes=SHAPES[kind]).parts["test"]
    targets_of = Targets.of(samples, IMAGE)
    answers, targets, records, sizes = [], [], [], []
    images = TensorSpec("images", "UINT8", IMAGE.tensor_shape)
    for sample in samples:
        assert isinstance(sample.content, Path)
        with Image.open(sample.content) as opened:
            size = opened.size
        sizes.append(size)
        answers.append(outputs_near(sample, kind, size, generator))
        targets.append(targets_of.one(sample, size))
        outputs = tuple(TensorSpec(name, "FP32", array.shape[1:]) for name, array in answers[-1].items())
        own: dict[str, Any] = {"task": "detect", "detection": SAID[kind]}
        spec = ModelSpec("m", (images,), outputs, 4, IMAGE, "none", ("cat", "dog"), **own)
        sent = {name: TensorBytes(array.shape, memoryview(array.tobytes())) for name, array in answers[-1].items()}
        found = detections(sent, spec, ImagePlacement.of(size, IMAGE), 0.001, 100)
        records += coco_records(found, int(sample.content.stem))
    together = {name: np.concatenate([one[name] for one in answers]) for name in answers[0]}
    judge = judge_of(spec)
    judged: Any = judge.judged(together, together, np.stack(targets))
    expected = summarised(file, records, kind)
    assert judged.set_metrics == pytest.approx(dict(zip(NAMES[kind], expected, strict=True)), abs=1e-6)
    assert 0.02 < expected[1] < expected[0] < 1, "what is compared here should happen"
    assert judge.restored(judged.arrays()).set_metrics == judged.set_metrics  # type: ignore[attr-defined]
    # Without shapes in the data, boxes are measured.
    plain = load_annotated(str(file), most_calibrated=9, is_split=False).parts["test"]
    boxes = [Targets.of(plain, IMAGE).one(one, size) for one, size in zip(plain, sizes, strict=True)]
    of_boxes: Any = judge.judged(together, together, np.stack(boxes))
    assert list(of_boxes.set_metrics) == ["mAP@50", "mAP@50:95"]
    assert target_key(plain[0]) != target_key(samples[0])


def summarised(file: Path, records: list[dict[str, Any]], kind: str) -> tuple[float, float]:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco.COCO(str(file))
        answers = [{**one, "category_id": one["category_id"] + 1} for one in records]
        evaluation = cocoeval.COCOeval(truth, truth.loadRes(answers), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[1]), float(evaluation.stats[0])


def test_labels_of_yolo_have_the_same_masks_and_keypoints(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20)).save(tmp_path / "one.png")
    for name, lines, more in (
        ("segm", "1 0.1 0.2 0.5 0.2 0.5 0.9 0.1 0.9\n0 0.5 0.5 0.9 0.5 0.9 0.9", ""),
        (
            "keypoints",
            "1 0.5 0.5 0.4 0.6 0.5 0.25 2 0 0 0\n0 0.2 0.2 0.2 0.2 0.25 0.2 1 0.2 0.25 1",
            "kpt_shape: [2, 3]\n",
        ),
        ("pairs", "1 0.5 0.5 0.4 0.6 0.5 0.25 0.25 0.5", "kpt_shape: [2, 2]\n"),
    ):
        folder = tmp_path / name
        for kind in ("images", "labels"):
            (folder / kind / "val").mkdir(parents=True)
        Image.new("RGB", (40, 20)).save(folder / "images" / "val" / "one.png")
        (folder / "labels" / "val" / "one.txt").write_text(lines)
        (folder / "data.yaml").write_text(f"train: images/val\nval: images/val\nnames: [cat, dog]\n{more}")
        shapes = SHAPES.get(name, "keypoints")
        (sample,) = load_annotated(str(folder), most_calibrated=9, is_split=True, shapes=shapes).parts["test"]
        target = sample.target
        assert isinstance(target, Objects)
        if name == "segm":
            assert target.masks is not None
            expected = np.zeros((20, 40), bool)
            expected[4:18, 4:20] = True
            assert np.array_equal(mask_of(target.masks[0], 20, 40), expected)
        elif name == "keypoints":
            assert target.keypoints is not None
            assert target.areas is not None
            assert target.keypoints.tolist() == [[[20, 5, 2], [0, 0, 0]], [[10, 4, 1], [8, 5, 1]]]
            assert target.areas == pytest.approx([0.53 * 16 * 12, 0.53 * 8 * 4])
        else:
            assert target.keypoints is not None
            assert target.keypoints.tolist() == [[[20, 5, 1], [10, 10, 1]]]


def test_what_only_some_objects_have_is_left_out(tmp_path: Path) -> None:
    file = annotated(tmp_path, np.random.default_rng(0), 2)
    document = json.loads(file.read_text())
    for name in ("segmentation", "keypoints"):
        del document["annotations"][0][name]
        document["annotations"][0]["iscrowd"] = 0
    file.write_text(json.dumps(document))
    for shapes in SHAPES.values():
        samples = load_annotated(str(file), most_calibrated=9, is_split=False, shapes=shapes).parts["test"]
        assert Targets.of(samples, IMAGE).shape_columns == 0


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ({"size": [9, 9], "counts": [3, 4]}, "run lengths of a mask have 7 pixels, and the image"),
        ({"size": [9, 9], "counts": "0o"}, "the segmentation of annotation 1: the run lengths are damaged"),
        ([[1, 2, 3, 4, 5, "6"]], "a polygon of annotation 1 must be 6 numbers"),
        ([[1, 2, 3, 4, 5, 6, 7]], "a polygon of annotation 1 must be 6 numbers"),
        ([[1, 2, 3, 4, 5, 9e8]], "a polygon is far outside of the image"),
    ],
)
def test_a_damaged_mask_is_named(tmp_path: Path, mask: Any, words: str) -> None:
    file = annotated(tmp_path, np.random.default_rng(0), 1)
    document = json.loads(file.read_text())
    document["annotations"][0]["segmentation"] = mask
    file.write_text(json.dumps(document))
    with pytest.raises(JobError, match=words):
        load_annotated(str(file), most_calibrated=9, is_split=False, shapes="masks")
    assert load_annotated(str(file), most_calibrated=9, is_split=False).parts["test"]
