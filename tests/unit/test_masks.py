"""Masks and keypoints of objects: run lengths as pycocotools', outlines, and the way back through the letterbox."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import ndimage

from convoy.app.pictures import instances
from convoy.app.pictures.answering import detections
from convoy.app.pictures.coco import coco_records
from convoy.export.proof.activation import purpose_of
from convoy.export.sources.onnx_metadata import usual_detection
from convoy.models.answers import Detection, Keypoint
from convoy.models.boxes import in_order_of
from convoy.models.errors import BundleError, InvalidRequest, JobError, ModelFailed
from convoy.models.geometry import ImagePlacement
from convoy.models.masks import masks_on_picture
from convoy.models.polygons import TOLERANCE_PX, polygons_of, simplified
from convoy.models.run_lengths import counts_between, counts_of, counts_text, cropped_mask, mask_of
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import DetectionOutputs
from convoy.models.tensors import TensorBytes

LETTERBOX = replace(ImageSpec.plain(64, 96, 3, "uint8_nhwc"), resize_mode="letterbox")
SEED = st.integers(0, 2**32 - 1)


def random_mask(generator: np.random.Generator, most: int = 40) -> np.ndarray:
    height, width = generator.integers(1, most, 2)
    return generator.random((height, width)) < generator.choice([0, 0.1, 0.5, 0.9, 1])


def counts_in(mask: np.ndarray) -> np.ndarray:
    return counts_between(np.flatnonzero(np.diff(mask.T.reshape(-1).astype(int), prepend=0, append=0)), mask.size)


# Run lengths


@settings(deadline=None)
@given(SEED)
def test_run_lengths_are_those_of_pycocotools(seed: int) -> None:
    pycocotools = pytest.importorskip("pycocotools.mask")
    mask = random_mask(np.random.default_rng(seed), 300)
    theirs = pycocotools.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()
    counts = counts_in(mask)
    assert counts_text(counts) == theirs
    assert np.array_equal(counts_of(theirs), counts)
    assert np.array_equal(mask_of(counts, *mask.shape), mask)


@settings(deadline=None)
@given(SEED)
def test_the_crop_has_the_whole_mask_and_nothing_around_it(seed: int) -> None:
    mask = random_mask(np.random.default_rng(seed))
    crop, left, top = cropped_mask(counts_in(mask), len(mask))
    whole = np.zeros_like(mask)
    whole[top : top + crop.shape[0], left : left + crop.shape[1]] = crop
    assert np.array_equal(whole, mask)
    assert crop[:, [0, -1]].any(axis=0).all() if crop.size else not mask.any()


@pytest.mark.parametrize("text", ["o", "0" + "o" * 20 + "0", " ", "~", "O", "ä"])
def test_damaged_run_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"run length|ascii"):
        counts_of(text)


def test_run_lengths_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="of 6 pixels, not 2 x 2"):
        mask_of(np.array([2, 4]), 2, 2)


# Outlines


def enclosed(polygons: list[np.ndarray], height: int, width: int) -> np.ndarray:
    """How many polygons enclose the centre of each pixel, by the even-odd rule."""
    rows, columns = np.mgrid[:height, :width] + 0.5
    total = np.zeros((height, width), int)
    for polygon in polygons:
        is_odd = np.zeros((height, width), bool)
        for (x1, y1), (x2, y2) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
            if y1 != y2:
                crosses = (rows > min(y1, y2)) & (rows < max(y1, y2))
                is_odd ^= crosses & (columns > x1 + (rows - y1) * (x2 - x1) / (y2 - y1))
        total += is_odd
    return total


@settings(deadline=None)
@given(SEED)
def test_outlines_enclose_each_part_of_a_mask_with_its_holes(seed: int) -> None:
    mask = random_mask(np.random.default_rng(seed), 16)
    parts, count = ndimage.label(mask)
    filled = sum(ndimage.binary_fill_holes(parts == part, np.ones((3, 3))) for part in range(1, count + 1))
    found = polygons_of(counts_in(mask), len(mask), tolerance_px=0)
    assert len(found) == count
    assert np.array_equal(enclosed(found, *mask.shape), np.zeros_like(mask, int) + filled)


@settings(deadline=None)
@given(SEED)
def test_a_simplified_outline_is_as_near_as_one_made_point_by_point(seed: int) -> None:
    generator = np.random.default_rng(seed)
    count = int(generator.integers(3, 60))
    angles = np.sort(generator.uniform(0, 2 * np.pi, count))
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1) * generator.uniform(1, 30)
    points = np.rint(circle * generator.uniform(0.8, 1.2, (count, 1))).astype(int)
    opposite = int(((points - points[0]) ** 2).sum(axis=1).argmax())
    places = [0, *between(points, 0, opposite), *([opposite] if opposite else []), *between(points, opposite, count)]
    expected = points[places] if len(places) >= 3 else points
    assert np.array_equal(simplified(points, TOLERANCE_PX), expected)


def between(points: np.ndarray, start: int, end: int) -> list[int]:
    first, along = points[start], points[end % len(points)] - points[start]
    farthest, place = 0.0, -1
    for one in range(start + 1, end):
        x, y = points[one] - first
        length = np.hypot(*along)
        distance = abs(along[0] * y - along[1] * x) / length if length else np.hypot(x, y)
        if distance > farthest + 1e-12:
            farthest, place = distance, one
    if farthest <= TOLERANCE_PX:
        return []
    return [*between(points, start, place), place, *between(points, place, end)]


# Masks on the picture


def drawn(coefficients: np.ndarray, prototypes: np.ndarray, box: np.ndarray, placement: ImagePlacement) -> np.ndarray:
    """The values [height, width] at the centre of each pixel, interpolated one by one; NaN outside of the box."""
    values = np.tensordot(coefficients.astype(float), prototypes.astype(float), 1)
    places = []
    for axis, cells in ((0, values.shape[1]), (1, values.shape[0])):
        centres = np.arange(placement.picture[axis]) + 0.5
        on_input = centres * placement.full[axis] / placement.picture[axis] - placement.corner[axis]
        places.append(on_input.clip(*shown(placement, axis, cells)) * cells / placement.window[axis] - 0.5)
    rows, columns = np.meshgrid(places[1], places[0], indexing="ij")
    found: np.ndarray = ndimage.map_coordinates(values, [rows, columns], order=1, mode="nearest")
    own_rows, own_columns = np.mgrid[: placement.picture[1], : placement.picture[0]]
    x1, y1, x2, y2 = box
    found[(own_columns < x1) | (own_columns >= x2) | (own_rows < y1) | (own_rows >= y2)] = np.nan
    return found


def shown(placement: ImagePlacement, axis: int, cells: int) -> tuple[float, float]:
    """The centres of the first and last cell of the prototypes that shows only the picture. Where a cell shows both
    the picture and its padding, cells are cut into the largest equal parts that do not."""
    size = placement.window[axis]
    first, end = max(0, -placement.corner[axis]), min(size, placement.full[axis] - placement.corner[axis])
    cell_px = size // cells if size % cells == 0 else 1
    part_px = next(px for px in range(cell_px, 0, -1) if not (first % px or end % px or cell_px % px))
    return first + part_px / 2, end - part_px / 2


@settings(deadline=None)
@example(405682, "letterbox")  # cells of 32 px, and a padding that ends 4 px before one
@given(SEED, st.sampled_from(["letterbox", "exact", "shorter_side"]))
def test_masks_are_where_interpolated_values_are_above_0(seed: int, mode: Any) -> None:
    generator = np.random.default_rng(seed)
    width, height = (int(side) for side in generator.integers(1, 400, 2))
    placement = ImagePlacement.of((width, height), replace(LETTERBOX, resize_mode=mode, resize_px=100))
    rows, columns = generator.choice([[16, 24], [32, 48], *generator.integers(1, 30, (2, 2)).tolist()])
    prototypes = generator.normal(size=(4, rows, columns)).astype(np.float32)
    coefficients = generator.normal(size=(3, 4)).astype(np.float32)
    boxes = np.sort(generator.uniform(-0.1, 1.1, (3, 2, 2)), axis=1).reshape(3, 4) * [width, height, width, height]
    boxes = boxes.clip(0, [width, height, width, height])
    for one, counts in enumerate(masks_on_picture(coefficients, prototypes, boxes, placement)):
        values = drawn(coefficients[one], prototypes, boxes[one], placement)
        differs = mask_of(counts, height, width) != (values > 0)
        assert np.abs(values[differs]).max(initial=0) < 1e-4


# A network of one class on an input of 96 x 64: an object in each half, and a prototype that is the upper half.
PROTOTYPES = np.stack([np.repeat([1.0, -1.0], 8).reshape(16, 1) * np.ones((16, 24)), np.full((16, 24), 0.5)])
BOXES = [[24.0, 32, 48, 64, 0.9, 1, 0], [72, 32, 48, 64, 0.8, 0, 1], [50, 32, 10, 10, 0.4, 0, -1]]
SEGMENTS = DetectionOutputs(
    "boxes", layout="yolo_v8_seg", prototypes="prototypes", threshold=0.25, iou_threshold=0.7, max_candidates=1000
)


def answered(
    said: DetectionOutputs, size: tuple[int, int], arrays: dict[str, np.ndarray], **asked: Any
) -> list[Detection]:
    made = {name: array.astype(np.float32) for name, array in arrays.items()}
    outputs = tuple(TensorSpec(name, "FP32", array.shape) for name, array in made.items())
    images = TensorSpec("images", "UINT8", LETTERBOX.tensor_shape)
    spec = ModelSpec("m", (images,), outputs, 8, LETTERBOX, "none", (), task="detect", detection=said)
    answers = {name: TensorBytes((1, *array.shape), memoryview(array.tobytes())) for name, array in made.items()}
    return detections(answers, spec, ImagePlacement.of(size, LETTERBOX), None, None, **asked)


def seen(found: list[Detection]) -> list[np.ndarray]:
    return [one.mask.array() for one in found if one.mask is not None]


@pytest.mark.parametrize("layout", ["yolo_v8_seg", "end_to_end"])
def test_each_object_has_its_own_mask_in_its_box(layout: Any) -> None:
    """A picture of 192 x 64 is scaled to 96 x 32, with a padding of 16 above and below."""
    rows = np.array(BOXES)
    if layout == "end_to_end":
        corners = np.concatenate([rows[:, :2] - rows[:, 2:4] / 2, rows[:, :2] + rows[:, 2:4] / 2], axis=1)
        boxes = np.concatenate([corners, rows[:, 4:5], np.zeros((3, 1)), rows[:, 5:]], axis=1)
    else:
        boxes = rows.T
    said = replace(SEGMENTS, layout=layout, iou_threshold=None if layout == "end_to_end" else 0.7)
    arrays = {"boxes": boxes, "prototypes": PROTOTYPES}
    found = answered(said, (192, 64), arrays)
    first, second, third = seen(found)
    upper = np.zeros((64, 192), bool)
    upper[:32, :96] = True
    assert np.array_equal(first, upper)
    assert np.array_equal(second, np.arange(192) >= 96 + np.zeros((64, 1)))
    assert not third.any()
    outlines = [one.polygons for one in answered(said, (192, 64), arrays, masks="polygons")]
    assert outlines == [[[0, 0, 96, 0, 96, 32, 0, 32]], [[96, 0, 192, 0, 192, 64, 96, 64]], []]
    plain = answered(said, (192, 64), arrays, masks="none")
    assert [one.box for one in plain] == [one.box for one in found]
    assert {(one.mask, one.polygons) for one in plain} == {(None, None)}


def test_too_many_masks_for_an_answer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"boxes": np.array(BOXES).T, "prototypes": PROTOTYPES}
    monkeypatch.setattr(instances, "MOST_MASKS", 2)
    with pytest.raises(InvalidRequest, match="3 objects are more than the limit of 2 for masks; raise threshold"):
        answered(SEGMENTS, (192, 64), arrays)
    assert len(answered(SEGMENTS, (192, 64), arrays, masks="none")) == 3
    monkeypatch.setattr(instances, "MOST_MASKS", 3)
    monkeypatch.setattr(instances, "MOST_RUNS", 30)
    with pytest.raises(InvalidRequest, match="more runs than the limit of 30"):
        answered(SEGMENTS, (192, 64), arrays)


def test_a_value_that_is_no_number_fails_the_request() -> None:
    boxes = np.array(BOXES).T
    boxes[5, 2] = np.nan
    with pytest.raises(ModelFailed):
        answered(SEGMENTS, (192, 64), {"boxes": boxes, "prototypes": PROTOTYPES})
    prototypes = PROTOTYPES.copy()
    prototypes[0, 3, 4] = np.inf
    with pytest.raises(ModelFailed):
        answered(SEGMENTS, (192, 64), {"boxes": np.array(BOXES).T, "prototypes": prototypes})


# Keypoints


@settings(deadline=None)
@given(SEED, st.sampled_from([2, 3]), st.sampled_from(["yolo_v8_pose", "end_to_end"]))
def test_keypoints_of_a_picture_come_back_from_its_letterbox(seed: int, values: int, layout: Any) -> None:
    generator = np.random.default_rng(seed)
    size = tuple(int(side) for side in generator.integers(1, 2000, 2))
    placement = ImagePlacement.of(size, LETTERBOX)  # type: ignore[arg-type]
    points = generator.uniform(0, size, (4, 5, 2))
    on_input = points * np.divide(placement.full, placement.picture) - placement.corner
    scores = generator.random((4, 5, 1))
    further = np.concatenate([on_input, scores], axis=2)[..., :values].reshape(4, -1)
    own = np.linspace(0.9, 0.5, 4)[:, None]
    heads = {"yolo_v8_pose": [own, own / 2], "end_to_end": [own, np.zeros((4, 1))]}[layout]
    boxes = np.concatenate([np.full((4, 4), 30.0), *heads, further], axis=1)
    said = DetectionOutputs("boxes", layout=layout, keypoints=(5, values), threshold=0.25)
    found = answered(said, size, {"boxes": boxes if layout == "end_to_end" else boxes.T})  # type: ignore[arg-type]
    assert np.array([[point[:2] for point in one.keypoints] for one in found]) == pytest.approx(points, abs=0.02)
    if values == 3:
        answer = np.array([[point.score for point in one.keypoints] for one in found])
        assert answer == pytest.approx(scores[..., 0], abs=1e-6)
    else:
        assert {point.score for one in found for point in one.keypoints} == {None}


def test_documents_have_what_the_model_gives() -> None:
    arrays = {"boxes": np.array(BOXES[:2]).T, "prototypes": PROTOTYPES}
    (one, _) = answered(SEGMENTS, (192, 64), arrays)
    assert set(one.document()) == {"class_id", "label", "score", "box", "mask"}
    (record, _) = coco_records(answered(SEGMENTS, (192, 64), arrays), 7)
    assert record["segmentation"] == one.document()["mask"]
    (outlined, _) = coco_records(answered(SEGMENTS, (192, 64), arrays, masks="polygons"), 7)
    assert outlined["segmentation"] == [[0, 0, 96, 0, 96, 32, 0, 32]]
    posed = replace(one, mask=None, keypoints=(Keypoint(1, 2, 0.5), Keypoint(3, 4)))
    assert posed.document()["keypoints"] == [{"x": 1, "y": 2, "score": 0.5}, {"x": 3, "y": 4}]
    assert coco_records([posed], 7)[0]["keypoints"] == [1, 2, 0.5, 3, 4, 1]


# What a spec may declare


OUTPUTS = [TensorSpec("b", "FP32", (116, 100)), TensorSpec("p", "FP32", (32, 8, 8)), TensorSpec("f", "FP32", (8, 8))]


@pytest.mark.parametrize(
    ("fields", "shape", "words"),
    [
        ({"layout": "yolo_v8", "prototypes": "p"}, (116, 100), "layout yolo_v8 has no prototypes; remove it"),
        ({"layout": "yolo_v8_seg"}, (116, 100), "layout yolo_v8_seg needs prototypes; add it"),
        ({"layout": "yolo_v8_pose"}, (56, 100), "layout yolo_v8_pose needs keypoints; add it"),
        ({"layout": "yolo_v8_pose", "keypoints": (17,)}, (56, 100), r"such as \[17, 3\]; got \[17\]"),
        ({"layout": "yolo_v8_pose", "keypoints": (17, 4)}, (56, 100), r"got \[17, 4\]"),
        ({"layout": "end_to_end", "keypoints": (17, 3), "prototypes": "p"}, (300, 57), "not both"),
        ({"layout": "yolo_v8_seg", "prototypes": "q"}, (116, 100), "no output 'q' for the prototypes"),
        ({"layout": "yolo_v8_seg", "prototypes": "f"}, (116, 100), r"float \[masks, height, width\] of fixed size"),
        ({"layout": "yolo_v8_seg", "prototypes": "p", "classes": 79}, (116, 100), "with 115 values"),
        ({"layout": "yolo_v8_seg", "prototypes": "p"}, (36, 100), "with 37 values or more"),
        ({"layout": "end_to_end", "prototypes": "p"}, (300, 6), r"must be float \[boxes, 38\]"),
        ({"layout": "yolo_v8_pose", "keypoints": (17, 3)}, (55, 100), "with 56 values or more"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], shape: tuple[int, int], words: str) -> None:
    with pytest.raises(BundleError, match=words):
        DetectionOutputs("b", **fields).check([replace(OUTPUTS[0], shape=shape), *OUTPUTS[1:]])


def test_classes_are_what_masks_and_keypoints_leave() -> None:
    assert DetectionOutputs("b", layout="yolo_v8_seg", prototypes="p").check(OUTPUTS) == 80
    assert DetectionOutputs("b", layout="yolo_v8_pose", keypoints=(12, 3)).check(OUTPUTS) == 76
    assert DetectionOutputs("b", layout="yolo_v8_seg", prototypes="p", classes=80).check(OUTPUTS) == 80


@pytest.mark.parametrize(
    ("values", "expected"),
    [(51, (17, 3)), (34, (17, 2)), (6, "may be keypoints of 2 or of 3"), (1, "are no keypoints"), (0, "are no")],
)
def test_a_layout_by_its_name_finds_its_keypoints(values: int, expected: Any) -> None:
    outputs = [TensorSpec("b", "FP32", (4 + 2 + values, 100))]
    asked: dict[str, Any] = {"labels": ("cat", "dog"), "takes_images": True}
    said = usual_detection("yolo_v8_pose", "")
    if isinstance(expected, str):
        with pytest.raises(JobError, match=f"b has {values} values, which {expected}"):
            purpose_of("detect", outputs, **asked, detection=said)
    else:
        found = purpose_of("detect", outputs, **asked, detection=said).detection
        assert found is not None
        assert (found.boxes, found.keypoints) == ("b", expected)


def test_only_rows_of_boxes_are_brought_into_order() -> None:
    said = DetectionOutputs("b", layout="end_to_end", prototypes="p")
    rows = np.array([[0.0, 0, 9, 9, 0.9, 0, 1], [5, 5, 20, 20, 0.9, 1, 2]])
    one, other = (
        {"b": boxes[None], "p": np.full((1, 1, 2, 2), value)} for boxes, value in ((rows, 1), (rows[::-1], 2))
    )
    ordered = in_order_of(one, other, said)
    assert np.array_equal(ordered["b"][0], rows)
    assert np.array_equal(ordered["p"], other["p"])
