"""The shapes: drawn pictures, their files, and the small detector and U-Net that learn from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from convoy.export.options import ExportOptions
from convoy.export.plan import make_plan
from convoy.models import zoo
from convoy.models.checkpoint import read_checkpoint_header
from convoy.models.errors import UsageError
from convoy.models.shapes.__main__ import main
from convoy.models.shapes.coco import run_lengths
from convoy.models.shapes.drawing import draw
from convoy.models.shapes.shape_set import LEAST_PX, MASK_CLASSES, MOST_SHAPES, SHAPES, ShapeSet, named_set
from convoy.models.spec import TensorSpec
from convoy.models.tasks import SegmentationOutput
from convoy.models.train_options import TrainOptions

# --- pictures and files; no torch needed


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(0, 1), st.sampled_from([LEAST_PX, 97, 160]))
def test_a_picture_depends_on_its_seed_alone_and_boxes_and_masks_agree(
    seed: int, number: int, stream: int, px: int
) -> None:
    picture, again = (draw(number, seed, stream, px) for _ in range(2))
    assert np.array_equal(picture.pixels, again.pixels)
    assert np.array_equal(picture.instances, again.instances)
    assert picture.pixels.shape == (px, px, 3)
    assert 1 <= len(picture.classes) <= MOST_SHAPES
    assert set(np.unique(picture.instances)) - {0} == set(range(1, len(picture.classes) + 1))
    for index, (kind, (x1, y1, x2, y2)) in enumerate(zip(picture.classes, picture.boxes, strict=True), start=1):
        visible = picture.instances == index
        assert (picture.mask[visible] == kind + 1).all()
        # Everything is inside the box, and each side of it touches something.
        inside = visible[y1:y2, x1:x2]
        assert inside.sum() == visible.sum()
        assert inside[0].any()
        assert inside[-1].any()
        assert inside[:, 0].any()
        assert inside[:, -1].any()
    assert (picture.mask == 0).sum() == (picture.instances == 0).sum()


def test_pictures_show_every_class_and_differ_between_numbers_seeds_and_parts() -> None:
    drawn = [draw(number, 0, 0, LEAST_PX) for number in range(60)]
    counts = np.bincount(np.concatenate([one.classes for one in drawn]), minlength=len(SHAPES))
    assert counts.min() > counts.sum() / (2 * len(SHAPES))
    others = [draw(0, 1, 0, LEAST_PX), draw(0, 0, 1, LEAST_PX), *drawn]
    assert len({one.pixels.tobytes() for one in others}) == len(others)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_run_lengths_repeat_the_mask(height: int, width: int, data: st.DataObject) -> None:
    bits = data.draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width))
    mask = np.array(bits).reshape(height, width)
    lengths = run_lengths(mask)
    flat = np.concatenate([np.full(length, index % 2) for index, length in enumerate(lengths)])
    assert np.array_equal(flat.reshape(width, height).T, mask)
    assert all(length > 0 for length in lengths[1:])


def read_pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_a_set_is_written_as_coco_with_masks_the_same_each_time(tmp_path: Path, capsys: Any) -> None:
    asked = ["--seed", "7", "--px", str(LEAST_PX), "--images", "8"]
    for name in ("one", "two"):
        assert main([str(tmp_path / name), *asked]) == 0
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == 2 * (8 + 2) + 2
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)
    assert main([str(tmp_path / "one"), *asked]) == 1
    assert "already exists; choose a new folder" in capsys.readouterr().err
    document = json.loads((tmp_path / "one/annotations/instances_val.json").read_text())
    assert [(one["id"], one["name"]) for one in document["categories"]] == list(enumerate(SHAPES, start=1))
    numbers = {one["file_name"]: one["id"] for one in document["images"]}
    for name, number in numbers.items():
        pixels, mask = (read_pixels(tmp_path / "one" / kind / name) for kind in ("images", "masks"))
        assert pixels.shape == (LEAST_PX, LEAST_PX, 3)
        objects = [one for one in document["annotations"] if one["image_id"] == number]
        areas = np.bincount(mask.ravel(), minlength=len(MASK_CLASSES))[1:]
        for kind in range(len(SHAPES)):
            assert sum(one["area"] for one in objects if one["category_id"] == kind + 1) == areas[kind]
        for one in objects:
            x, y, width, height = one["bbox"]
            assert 0 < one["area"] <= width * height
            assert (mask[y : y + height, x : x + width] == one["category_id"]).sum() >= one["area"]


def test_a_set_is_named_by_its_number_of_pictures() -> None:
    assert named_set("shapes") == ShapeSet()
    assert named_set("shapes:12") == ShapeSet(training_images=12)
    assert named_set("shapes/") is None
    assert named_set("digits") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "simple_cnn"}, "simple_cnn is a classifier; pass --arch shapes_detector or --arch shapes_unet"),
        ({"dataset": "digits"}, "shapes_detector learns from the data set shapes, not from digits; pass shapes"),
        ({"class_weights": "balanced"}, "--class-weights balanced is for classifiers; remove it"),
        ({"loader_workers": 2}, "--loader-workers decode files, and shapes are drawn; remove it"),
        ({"validation": "/"}, "for shapes it is a share; pass one such as 0.1"),
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
    ],
)
def test_an_option_that_shapes_have_no_use_for_is_refused(changes: dict[str, Any], message: str) -> None:
    plain: dict[str, Any] = {"dataset": "shapes", "arch": "shapes_detector", "out": Path("d.safetensors")}
    with pytest.raises(UsageError, match=message):
        TrainOptions(**plain | changes)


def test_the_zoo_tells_export_how_outputs_are_read(tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(SHAPES))
    options = ExportOptions("zoo:shapes_detector", name="shapes", random_weights=True, labels=labels, preprocess="unit")
    plan = make_plan(options)
    assert (plan.task, plan.activation) == ("detect", "none")
    assert plan.detection is not None
    assert (plan.detection.boxes, plan.detection.layout) == ("detections", "yolo_v8")


# --- networks and learning


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def short(tmp_path: Path, arch: str, **changes: Any) -> TrainOptions:
    plain: dict[str, Any] = {"dataset": "shapes:24", "batch_size": 8, "epochs": 2, "device": "cpu", "arch": arch}
    return TrainOptions(**plain | {"out": tmp_path / f"{arch}.safetensors"} | changes)


def targets(px: int = 160, count: int = 4) -> tuple[list[Any], np.ndarray]:
    drawn = [draw(number, 3, 0, px) for number in range(count)]
    wanted = np.full((count, MOST_SHAPES, 5), -1, np.float32)
    for row, one in zip(wanted, drawn, strict=True):
        row[: len(one.classes), 0], row[: len(one.classes), 1:] = one.classes, one.boxes
    return drawn, wanted


@pytest.mark.slow
def test_a_detector_that_answers_what_it_was_assigned_finds_every_object(torch: Any) -> None:
    """From targets through assignment, the network's own decoding and the server's reading back to the objects."""
    from convoy.models.training.detecting import Boxes, assign
    from convoy.models.zoo.shapes_detector import STRIDE_PX, ShapesDetector, centred

    drawn, wanted = targets(count=12)
    said = zoo.entry("shapes_detector").detection
    assert said is not None
    objective = Boxes(160, said)
    assigned = assign(torch.from_numpy(wanted), 160)
    side = 160 // STRIDE_PX
    line = (torch.arange(side) + 0.5) * STRIDE_PX
    x, y = line.repeat(side), line.repeat_interleave(side)
    x1, y1, x2, y2 = assigned.boxes.unbind(1)
    distances = torch.stack([x - x1, y - y1, x2 - x, y2 - y], 1).clamp(min=1e-3) / STRIDE_PX
    boxes = centred(distances.log().reshape(len(drawn), 4, side, side))
    scores = torch.nn.functional.one_hot(assigned.classes, len(SHAPES)).transpose(1, 2) * assigned.learns[:, None]
    answer = {"detections": torch.cat([boxes, scores.float()], 1)}
    tally = objective.tally()
    tally.add(answer, torch.from_numpy(wanted))
    perfect = tally.evaluation()
    assert perfect.accuracy > 0.95
    nothing = objective.tally()
    nothing.add({"detections": torch.cat([boxes, torch.zeros_like(scores)], 1)}, torch.from_numpy(wanted))
    assert nothing.evaluation().accuracy == 0
    assert nothing.evaluation().loss > 2 * perfect.loss
    network = ShapesDetector(len(SHAPES)).eval()
    with torch.inference_mode():
        assert network(torch.zeros(3, 3, 160, 96))["detections"].shape == (3, 4 + len(SHAPES), 20 * 12)


@pytest.mark.slow
def test_targets_are_mirrored_with_their_pictures(torch: Any) -> None:
    from convoy.models.training.detecting import Boxes
    from convoy.models.training.segmenting import Masks

    drawn, wanted = targets(count=16)
    said = zoo.entry("shapes_detector").detection
    assert said is not None
    instances = torch.from_numpy(np.stack([one.instances for one in drawn]))[:, None]
    turned, boxes = Boxes(160, said).distorted(instances, torch.from_numpy(wanted), torch.Generator().manual_seed(1))
    assert not torch.equal(turned, instances)
    for picture, found in zip(turned[:, 0].numpy(), boxes.numpy(), strict=True):
        for index, (_, x1, y1, x2, y2) in enumerate(found[found[:, 0] >= 0].astype(int), start=1):
            rows, columns = np.nonzero(picture == index)
            assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (x1, y1, x2, y2)
    masks = instances[:, 0]
    both = Masks().distorted(instances, masks, torch.Generator().manual_seed(1))
    assert torch.equal(both[0][:, 0], both[1])


@pytest.mark.slow
def test_the_mean_iou_and_the_loss_of_masks_tell_right_from_wrong(torch: Any) -> None:
    from convoy.models.training.segmenting import Masks

    mask = torch.tensor([[[0, 0, 1, 1], [0, 0, 1, 1]]], dtype=torch.uint8)

    def measured(answer: list[list[int]]) -> Any:
        tally = Masks().tally()
        logits = 20.0 * torch.nn.functional.one_hot(torch.tensor([answer]), 3).movedim(-1, 1)
        tally.add(logits, mask)
        return tally.evaluation()

    right, partly = measured([[0, 0, 1, 1], [0, 0, 1, 1]]), measured([[0, 0, 1, 1], [0, 0, 1, 0]])
    # The third class is nowhere and does not count.
    assert right.accuracy == 1
    assert partly.accuracy == pytest.approx((4 / 5 + 3 / 4) / 2)
    assert partly.loss > right.loss


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "labels"), [("shapes_detector", SHAPES), ("shapes_unet", MASK_CLASSES)])
def test_training_lowers_the_loss_and_the_header_tells_export_everything(
    tmp_path: Path, torch: Any, arch: str, labels: tuple[str, ...]
) -> None:
    from convoy.models.train import train

    result = train(short(tmp_path, arch, epochs=3, warm_up=0.1, validation="0.25"))
    assert result.epochs[-1].loss < result.epochs[0].loss
    assert all(0 <= (one.validation_accuracy or 0) <= 1 for one in result.epochs)
    header = read_checkpoint_header(result.out)
    assert header == result.header
    assert header is not None
    assert (header.labels, header.task) == (labels, zoo.entry(arch).task)
    assert {part: one.images for part, one in header.split.items()} == {"train": 18, "validation": 6, "test": 6}
    assert result.page is not None
    assert header.measure in result.page.read_text(encoding="utf-8")
    plan = make_plan(ExportOptions(f"zoo:{arch}", name="shapes", weights=result.out))
    assert (plan.task, plan.activation, plan.detection) == (header.task, header.activation, header.detection)
    assert (plan.labels, plan.image, plan.stated) == (labels, header.image, None)
    again = train(short(tmp_path, arch, epochs=3, warm_up=0.1, validation="0.25", out=tmp_path / "again.safetensors"))
    assert again.out.read_bytes() == result.out.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "classes", "shape"),
    [("shapes_detector", 4, (8, 400)), ("shapes_unet", 5, (5, 160, 160))],
)
def test_exported_with_random_weights_it_answers_any_batch_in_the_declared_layout(
    tmp_path: Path, torch: Any, arch: str, classes: int, shape: tuple[int, ...]
) -> None:
    import onnxruntime

    network = zoo.create(arch, classes).eval()
    file = tmp_path / "network.onnx"
    batch = {0: torch.export.Dim("batch", min=1, max=8)}
    images = torch.rand(2, 3, 160, 160)
    torch.onnx.export(network, (images,), file, dynamo=True, dynamic_shapes=(batch,), verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for count in (1, 5):
        some = torch.rand(count, 3, 160, 160)
        (answer,) = session.run(None, {session.get_inputs()[0].name: some.numpy()})
        assert answer.shape == (count, *shape)
        with torch.inference_mode():
            expected = network(some)
        expected = expected["detections"] if arch == "shapes_detector" else expected
        np.testing.assert_allclose(answer, expected.numpy(), rtol=1e-3, atol=1e-3)
    said = zoo.entry(arch).detection
    if said is not None:
        assert said.check([TensorSpec(said.boxes, "FP32", shape)]) == classes
        assert (answer[:, 2:4] > 0).all()
        assert ((answer[:, 4:] >= 0) & (answer[:, 4:] <= 1)).all()
    else:
        assert SegmentationOutput("map").check([TensorSpec("map", "FP32", shape)]) == classes


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["shapes_detector", "shapes_unet"])
def test_the_default_training_learns_the_shapes(tmp_path: Path, torch: Any, arch: str) -> None:
    from convoy.models.train import train

    result = train(TrainOptions("shapes", out=tmp_path / "learned.safetensors", arch=arch, device="cpu"))
    assert result.header.test_accuracy >= 0.8
    if arch == "shapes_detector":
        assert average_precision(torch, result.out) >= 0.8


def average_precision(torch: Any, weights: Path) -> float:
    """The mean over classes of AP at an IoU of 0.5, all points, on the pictures that training measured."""
    from safetensors.torch import load_file

    from convoy.models.boxes import find_boxes
    from convoy.models.shapes.drawing import pictures

    header = read_checkpoint_header(weights)
    assert header is not None
    assert header.detection is not None
    network = zoo.create("shapes_detector", len(SHAPES)).eval()
    network.load_state_dict(load_file(weights))
    mean, std = (np.array(one, np.float32) for one in (header.image.mean, header.image.std))
    rows: list[tuple[int, float, bool]] = []
    objects = np.zeros(len(SHAPES), int)
    for picture in pictures(ShapeSet(), "val"):
        pixels = ((picture.pixels / np.float32(255) - mean) / std).transpose(2, 0, 1)[None]
        with torch.inference_mode():
            answer = network(torch.from_numpy(pixels))["detections"][0].numpy()
        found = find_boxes({"detections": answer}, header.detection, "none", (160, 160), 0.001, 100)
        rows += graded(found, picture)
        objects += np.bincount(picture.classes, minlength=len(SHAPES))
    return float(np.mean([area(rows, kind, objects[kind]) for kind in range(len(SHAPES))]))


def graded(found: Any, picture: Any) -> list[tuple[int, float, bool]]:
    """Class, score, and whether it finds an object that no better one has found."""
    left = set(range(len(picture.classes)))
    rows = []
    for box, kind, score in zip(found.corners, found.classes, found.scores, strict=True):
        overlaps = {index: iou(box, picture.boxes[index]) for index in left if picture.classes[index] == kind}
        best = max(overlaps, key=lambda index: overlaps[index], default=None)
        is_right = best is not None and overlaps[best] >= 0.5
        left -= {best} if is_right else set()
        rows.append((int(kind), float(score), is_right))
    return rows


def area(rows: list[tuple[int, float, bool]], kind: int, objects: int) -> float:
    right = np.array([is_right for one, _, is_right in sorted(rows, key=lambda row: -row[1]) if one == kind], float)
    precision = right.cumsum() / np.arange(1, len(right) + 1)
    return float((np.maximum.accumulate(precision[::-1])[::-1] * right).sum() / objects)


def iou(one: Any, other: Any) -> float:
    sides = (np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])).clip(0)
    shared = sides.prod()
    return float(shared / ((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - shared))
