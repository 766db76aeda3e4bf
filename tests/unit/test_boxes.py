"""Boxes: every form that a spec may declare, padding, and suppression beside one that is plain and slow."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.pictures.answering import detections
from convoy.models.boxes import anchor_boxes, in_order_of, suppressed
from convoy.models.errors import BundleError, ModelFailed
from convoy.models.geometry import ImagePlacement
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import AnchorLevel, DetectionOutputs
from convoy.models.tensors import TensorBytes

IMAGE = ImageSpec.plain(100, 200, 3, "uint8_nhwc")
SAME_SIZE = ImagePlacement.of((200, 100), IMAGE)


def spec_of(said: DetectionOutputs, arrays: dict[str, np.ndarray], activation: Any = "none", **own: Any) -> ModelSpec:
    names = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "int32": "INT32"}
    outputs = tuple(TensorSpec(name, names[array.dtype.name], array.shape) for name, array in arrays.items())
    images = TensorSpec("images", "UINT8", IMAGE.tensor_shape)
    return ModelSpec(
        "m", (images,), outputs, 8, IMAGE, activation, own.pop("labels", ()), task="detect", detection=said
    )


def found(
    said: DetectionOutputs,
    activation: Any = "none",
    *,
    placement: ImagePlacement = SAME_SIZE,
    threshold: float | None = None,
    most: int | None = None,
    class_names: tuple[str, ...] = (),
    **arrays: Any,
) -> list[tuple[Any, ...]]:
    """(box, class, label, score) of each; `arrays` are those of one sample."""
    made = {
        name: np.array(array, np.float32 if name in (said.boxes, said.scores) else None)
        for name, array in arrays.items()
    }
    spec = spec_of(said, made, activation, labels=class_names)
    answers = {name: TensorBytes((1, *array.shape), memoryview(array.tobytes())) for name, array in made.items()}
    return [
        (one.box, one.class_id, one.label, round(one.score, 4))
        for one in detections(answers, spec, placement, threshold, most)
    ]


FINAL = DetectionOutputs("boxes", "scores", labels="labels")
TWO = [[10, 20, 30, 40], [50, 60, 70, 80]]


def test_boxes_of_a_graph_that_suppresses_go_out_as_they_are_without_the_padding() -> None:
    boxes = [*TWO, [0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 2, 2]]
    answer = found(FINAL, boxes=boxes, scores=[0.5, 0.9, 0, 0.8, 0.04], labels=[0, 5, 0, -1, 1])
    assert answer == [((50, 60, 70, 80), 5, None, 0.9), ((10, 20, 30, 40), 0, None, 0.5)]
    # Even who asks for all gets no padding.
    assert len(found(FINAL, boxes=boxes, scores=[0.5, 0.9, 0, 0.8, 0.04], labels=[0, 5, 0, -1, 1], threshold=0)) == 3


def test_a_count_says_how_many_rows_are_boxes() -> None:
    said = replace(FINAL, count="count")
    arrays = {"boxes": TWO, "scores": [0.5, 0.9], "labels": [1, 2]}
    assert [one[1] for one in found(said, **arrays, count=[1])] == [1]
    assert found(said, **arrays, count=[0]) == []
    assert [one[1] for one in found(said, **arrays, count=np.int32(7))] == [2, 1]


def test_one_class_needs_no_labels() -> None:
    assert [one[1:] for one in found(DetectionOutputs("boxes", "scores"), boxes=TWO, scores=[0.3, 0.4])] == [
        (0, None, 0.4),
        (0, None, 0.3),
    ]


def test_labels_threshold_and_most() -> None:
    arrays = {"boxes": TWO, "scores": [[0.1, 0.6], [0.7, 0.2]]}
    said = DetectionOutputs("boxes", "scores", threshold=0.15)
    names = ("cat", "dog")
    assert [one[2:] for one in found(said, class_names=names, **arrays)] == [("cat", 0.7), ("dog", 0.6), ("dog", 0.2)]
    assert [one[2:] for one in found(said, class_names=names, threshold=0.65, **arrays)] == [("cat", 0.7)]
    assert [one[2:] for one in found(said, class_names=names, most=1, **arrays)] == [("cat", 0.7)]
    assert len(found(replace(said, max_boxes=2), **arrays)) == 2


def test_the_background_is_no_object_and_scores_are_activated() -> None:
    said = DetectionOutputs("boxes", "scores", background=0, threshold=0.29)
    scores = np.log([[0.6, 0.4, 1e-9], [0.2, 0.3, 0.5]])
    assert [one[1:] for one in found(said, "softmax", boxes=TWO, scores=scores + 5)] == [
        (2, None, 0.5),
        (1, None, 0.4),
        (1, None, 0.3),
    ]


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40),
    st.sampled_from([0.0, 1e-7, 1e-3, 0.05, 0.5, 0.999, 0.9999999, 1.0]),
)
def test_a_sigmoid_reaches_the_threshold_where_its_own_value_does(logits: list[float], threshold: float) -> None:
    arrays = {"boxes": [[0, 0, 1, 1]] * len(logits), "scores": np.array(logits, np.float32)}
    own = np.float32(1) / (np.float32(1) + np.exp(-np.array(logits, np.float32)))
    answered = found(DetectionOutputs("boxes", "scores"), "sigmoid", threshold=threshold, most=1000, **arrays)
    assert len(answered) == int(((own >= threshold) & (own > 0)).sum())


@pytest.mark.parametrize(
    ("form", "unit", "box"),
    [
        ("xyxy", "pixels", [20, 10, 60, 50]),
        ("xywh", "pixels", [20, 10, 40, 40]),
        ("cxcywh", "pixels", [40, 30, 40, 40]),
        ("xyxy", "fractions", [0.1, 0.1, 0.3, 0.5]),
        ("cxcywh", "fractions", [0.2, 0.3, 0.2, 0.4]),
    ],
)
def test_every_form_of_a_box(form: Any, unit: Any, box: list[float]) -> None:
    said = DetectionOutputs("boxes", "scores", box_form=form, box_unit=unit)
    twice = ImagePlacement.of((400, 200), IMAGE)
    assert [one[0] for one in found(said, placement=twice, boxes=[box], scores=[1.0])] == [(40, 20, 120, 100)]


LAYOUTS = ("yolo_v5", "yolo_v8", "end_to_end", "detr", "detr in one tensor")


@given(st.sampled_from(LAYOUTS), st.integers(0, 2**32), st.sampled_from(["none", "sigmoid"]), st.booleans())
def test_every_layout_says_the_same(layout: str, seed: int, activation: Any, agnostic: bool) -> None:
    """Boxes and the best class of each, written out as separate outputs, give what the layout's own tensor does."""
    generator = np.random.default_rng(seed)
    boxes = generator.uniform(0, 90, (40, 4)).astype(np.float32)
    boxes[:, 2:] = boxes[:, :2] + generator.uniform(1, 60, (40, 2))
    scores = generator.uniform(0.01, 0.99, (40, 3)).astype(np.float32)
    centred = np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)
    logits = np.log(scores / (1 - scores)) if activation == "sigmoid" else scores
    said = DetectionOutputs("boxes", layout=layout.split()[0], iou_threshold=0.5, class_agnostic=agnostic, max_boxes=40)  # type: ignore[arg-type]
    best = scores.max(axis=1)
    arrays: dict[str, Any]
    if layout == "yolo_v5":
        objectness = generator.uniform(0.01, 0.99, (40, 1)).astype(np.float32)
        best = (scores * objectness).max(axis=1)
        own = np.log(objectness / (1 - objectness)) if activation == "sigmoid" else objectness
        arrays = {"boxes": np.concatenate([centred, own, logits], axis=1)}
    elif layout == "yolo_v8":
        masks = generator.normal(0, 9, (40, 5))
        said = replace(said, classes=3)
        arrays = {"boxes": np.concatenate([centred, logits, masks], axis=1).T}
    elif layout == "end_to_end":
        numbers = scores.argmax(axis=1)[:, None]
        arrays = {"boxes": np.concatenate([boxes, logits.max(axis=1, keepdims=True), numbers], axis=1)}
    else:
        shares = centred / [200, 100, 200, 100]
        arrays = {"boxes": np.concatenate([shares, logits], axis=1)}
        if layout == "detr":
            said, arrays = replace(said, scores="scores", multi_label=False), {"boxes": shares, "scores": logits}
    plain = {"boxes": boxes, "scores": best, "labels": scores.argmax(axis=1)}
    expected = found(
        DetectionOutputs("boxes", "scores", labels="labels", iou_threshold=0.5, max_boxes=40, class_agnostic=agnostic),
        **plain,
        threshold=0.3,
    )
    answered = found(said, activation, **arrays, threshold=0.3)
    assert [one[1:3] for one in answered] == [one[1:3] for one in expected]
    np.testing.assert_allclose([one[3] for one in answered], [one[3] for one in expected], atol=2e-4)
    np.testing.assert_allclose(
        np.reshape([one[0] for one in answered], (-1, 4)), np.reshape([one[0] for one in expected], (-1, 4)), atol=0.02
    )


def test_lists_of_boxes_are_compared_whatever_their_order() -> None:
    """Rows that rounding swaps, or drops at the end of the list, are the same answer; others are not."""
    generator = np.random.default_rng(4)
    rows = np.concatenate([generator.uniform(0, 90, (50, 4)), np.linspace(0.9, 0.1, 50)[:, None]], axis=1)
    rows = np.concatenate([rows, generator.integers(0, 3, (50, 1))], axis=1).astype(np.float32)
    rows[10:13, 4] = rows[10, 4]
    said = DetectionOutputs("boxes", layout="end_to_end")
    swapped = rows[[*range(10), 12, 10, 11, *range(13, 50)]]
    swapped[:, :5] *= np.float32(1 + 1e-6)
    swapped[49, :4] = 3.0  # another box of the lowest score
    ordered = in_order_of({"boxes": rows[None]}, {"boxes": swapped[None]}, said)["boxes"]
    np.testing.assert_allclose(ordered[0], rows, rtol=1e-5)
    assert np.array_equal(ordered[0][49], rows[49])
    for changes in ((slice(20, 25), slice(0, 4), 9.0), (slice(0, 5), 5, 7.0), (slice(30, 40), 4, 0.95)):
        wrong = swapped.copy()
        wrong[changes[0], changes[1]] = changes[2]
        left = in_order_of({"boxes": rows[None]}, {"boxes": wrong[None]}, said)["boxes"]
        assert np.array_equal(left[0], wrong)


def test_queries_are_compared_whatever_their_order() -> None:
    generator = np.random.default_rng(5)
    boxes, logits = generator.uniform(0, 1, (30, 4)), generator.normal(0, 3, (30, 5))
    said = DetectionOutputs("boxes", "scores", layout="detr")
    expected = {"boxes": boxes[None].astype(np.float32), "scores": logits[None].astype(np.float32)}
    order = generator.permutation(30)
    swapped = {name: one[:, order] * np.float32(1 + 1e-6) for name, one in expected.items()}
    ordered = in_order_of(expected, swapped, said)
    for name, one in expected.items():
        np.testing.assert_allclose(ordered[name], one, rtol=1e-5)
    swapped["scores"][0, :3] += 1.0
    assert np.array_equal(in_order_of(expected, swapped, said)["scores"], swapped["scores"])


def test_a_grid_that_the_graph_leaves_to_us() -> None:
    """YOLOX: by its formulas, one cell at a time; 200x100 px have 25x12 and 12x6 cells."""
    generator = np.random.default_rng(2)
    raw = generator.normal(0, 0.5, (25 * 12 + 12 * 6, 7)).astype(np.float32)
    raw[:, 4:] = generator.uniform(0.3, 1, (len(raw), 3))
    said = DetectionOutputs("boxes", layout="yolo_v5", strides=(8, 16), max_boxes=1000, threshold=0.0)
    wide = ImagePlacement.of((200, 100), IMAGE)._replace(picture=(2000, 1000), full=(2000, 1000), corner=(500, 500))
    cells = [(c, r, s) for s in (8, 16) for r in range(100 // s) for c in range(200 // s)]
    expected = []
    for (column, row, stride), (x, y, w, h, objectness, *classes) in zip(cells, raw.tolist(), strict=True):
        cx, cy, width, height = (x + column) * stride, (y + row) * stride, math.exp(w) * stride, math.exp(h) * stride
        box = [cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2]
        expected.append(([side + 500 for side in box], objectness * max(classes)))
    expected.sort(key=lambda one: -one[1])
    answered = found(said, placement=wide, boxes=raw)
    np.testing.assert_allclose([one[3] for one in answered], [one[1] for one in expected], atol=1e-4)
    np.testing.assert_allclose([one[0] for one in answered[:50]], [one[0] for one in expected[:50]], atol=0.02)
    with pytest.raises(ModelFailed, match="the output has 371 boxes, but the grids of its strides have 372"):
        found(said, boxes=raw[1:])


@pytest.mark.parametrize(
    ("fields", "shape", "words"),
    [
        ({}, (84, 100), "layout separate needs the name of the output with the scores"),
        ({"layout": "yolo_v8", "scores": "s"}, (84, 100), "layout yolo_v8 has no scores; remove it"),
        ({"layout": "yolo_v8", "strides": [8]}, (84, 100), "layout yolo_v8 has no strides; remove it"),
        ({"layout": "end_to_end", "labels": "l", "count": "c"}, (300, 6), "has no count, labels; remove it"),
        ({"layout": "yolo_v8", "classes": 0}, (84, 100), "classes must be at least 1"),
        ({"layout": "yolo_v8"}, (4, 100), r"must be float \[4 \+ classes, boxes\] with 5 values or more"),
        ({"layout": "yolo_v8", "classes": 90}, (84, 100), "with 94 values or more"),
        ({"layout": "end_to_end"}, (100, 5), r"must be float \[boxes, 6\]"),
        ({"layout": "yolo_v5"}, (100,), r"must be float \[boxes, 5 \+ classes\]"),
        ({"layout": "yolo_v8", "background": 80}, (84, 100), "background 80 is none of the 80 classes"),
    ],
)
def test_what_a_layout_cannot_be_is_refused(fields: dict[str, Any], shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(BundleError, match=words):
        DetectionOutputs("boxes", **fields).check([TensorSpec("boxes", "FP32", shape)])


def test_what_differs_from_anchors() -> None:
    """By the formulas themselves (Girshick et al., 2014), one box at a time."""
    levels = (
        AnchorLevel(2, 3, 50.0, 66.0, ((20.0, 10.0), (40.0, 40.0))),
        AnchorLevel(1, 2, 100.0, 100.0, ((90.0, 60.0),), offset=0.0),
    )
    generator = np.random.default_rng(3)
    deltas = generator.normal(0, 0.4, (14, 4)).astype(np.float32)
    deltas[5, 2] = 100  # as of an untrained network
    said = DetectionOutputs("boxes", "scores", anchors=levels, anchor_weights=(10.0, 10.0, 5.0, 5.0), max_boxes=14)
    scores = np.linspace(0.9, 0.1, 14)
    wide = ImagePlacement.of((200, 100), IMAGE)._replace(picture=(20_000, 10_000), full=(20_000, 10_000))
    expected = []
    for level in levels:
        for row in range(level.rows):
            for column in range(level.columns):
                for width, height in level.sizes_px:
                    dx, dy, dw, dh = deltas[len(expected)] / [10, 10, 5, 5]
                    x = (column + level.offset) * level.step_x_px + dx * width
                    y = (row + level.offset) * level.step_y_px + dy * height
                    wide_px, high_px = (
                        side * math.exp(min(d, math.log(62.5))) for side, d in ((width, dw), (height, dh))
                    )
                    expected.append([x - wide_px / 2, y - high_px / 2, x + wide_px / 2, y + high_px / 2])
    assert len(anchor_boxes(levels)) == 14
    answered = [one[0] for one in found(said, placement=wide, boxes=deltas, scores=scores)]
    np.testing.assert_allclose(answered, np.clip(expected, 0, [20_000, 10_000] * 2), atol=0.011)


@pytest.mark.parametrize("arrays", [{"scores": [0.5, math.nan]}, {"boxes": [[0, 0, 1, math.nan], [0, 0, 1, 1]]}])
def test_what_is_not_a_number_is_an_error(arrays: dict[str, Any]) -> None:
    with pytest.raises(ModelFailed, match="NaN"):
        found(DetectionOutputs("boxes", "scores"), **{"boxes": TWO, "scores": [0.5, 0.6], **arrays})


def test_a_padded_row_may_hold_anything() -> None:
    boxes = [TWO[0], [math.nan] * 4]
    assert len(found(FINAL, boxes=boxes, scores=[0.5, 0.0], labels=[1, -1])) == 1


def slow_suppression(boxes: list[list[float]], classes: list[int], iou_threshold: float, most: int) -> list[int]:
    kept: list[int] = []
    for index, (x1, y1, x2, y2) in enumerate(boxes):
        for other in kept:
            a1, b1, a2, b2 = boxes[other]
            shared = max(0.0, min(x2, a2) - max(x1, a1)) * max(0.0, min(y2, b2) - max(y1, b1))
            union = (x2 - x1) * (y2 - y1) + (a2 - a1) * (b2 - b1) - shared
            if classes[index] == classes[other] and union > 0 and shared / union > iou_threshold:
                break
        else:
            kept.append(index)
    return kept[:most]


whole = st.integers(0, 24)
a_box = st.tuples(whole, whole, whole, whole).map(
    lambda four: [min(four[0], four[2]), min(four[1], four[3]), max(four[0], four[2]), max(four[1], four[3])]
)


@given(
    st.lists(st.tuples(a_box, st.integers(0, 2)), max_size=60),
    st.sampled_from([0.1, 0.3, 0.5, 0.7, 1.0]),
    st.integers(1, 70),
)
def test_suppression_is_the_plain_one(rows: list[tuple[list[int], int]], iou_threshold: float, most: int) -> None:
    boxes, classes = [row[0] for row in rows], [row[1] for row in rows]
    mine = suppressed(np.array(boxes, float).reshape(-1, 4), np.array(classes, np.int64), iou_threshold, most)
    assert mine.tolist() == slow_suppression(boxes, classes, iou_threshold, most)


def test_of_many_the_best_are_candidates() -> None:
    generator = np.random.default_rng(5)
    corners = generator.uniform(0, 60, (500, 2))
    boxes = np.concatenate([corners, corners + generator.uniform(5, 40, (500, 2))], axis=1)
    scores = generator.uniform(0.1, 1, (500, 4)).round(2)  # with many equals
    said = DetectionOutputs("boxes", "scores", iou_threshold=0.4, max_candidates=300, max_boxes=300, threshold=0.2)
    order = sorted(range(2000), key=lambda place: -scores.reshape(-1)[place])[:300]
    kept = slow_suppression(boxes[[one // 4 for one in order]].tolist(), [one % 4 for one in order], 0.4, 300)
    expected = [(order[one] % 4, scores.reshape(-1)[order[one]]) for one in kept]
    assert [(one[1], one[3]) for one in found(said, boxes=boxes, scores=scores)] == expected
