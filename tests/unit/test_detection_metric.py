"""Mean average precision against pycocotools, on random sets and where its rules decide; the score of an image."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.export.proof.detection_metric import (
    MAP_50,
    MAP_50_95,
    Found,
    Matches,
    SetMatches,
    Wanted,
    image_score,
    match,
    mean_average_precision,
)
from convoy.export.proof.judging import judge_of
from convoy.export.proof.outcomes import DetectionOutcomes
from convoy.models.errors import JobError
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import DetectionOutputs

coco: Any = pytest.importorskip("pycocotools.coco")
cocoeval: Any = pytest.importorskip("pycocotools.cocoeval")

Picture = tuple[Found, Wanted]


def ours(pictures: list[Picture]) -> dict[str, float]:
    matches = [match(found, wanted) for found, wanted in pictures]
    both = Matches(*(np.concatenate([getattr(one, name) for one in matches], axis=1) for name in Matches._fields))
    return mean_average_precision(
        SetMatches(
            np.concatenate([found.scores for found, _ in pictures]),
            np.concatenate([found.classes for found, _ in pictures]),
            both,
            np.concatenate([wanted.classes[~wanted.is_crowd] for _, wanted in pictures]),
        )
    )


def theirs(pictures: list[Picture]) -> dict[str, float]:
    """The same from pycocotools."""
    objects, answers = [], []
    for image, (found, wanted) in enumerate(pictures, 1):
        for box, label, crowd in zip(*wanted[:3], strict=True):
            x1, y1, x2, y2 = map(float, box)
            own = {"image_id": image, "category_id": int(label), "iscrowd": int(crowd), "id": len(objects) + 1}
            objects.append({**own, "bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)})
        for box, label, score in zip(*found, strict=True):
            x1, y1, x2, y2 = map(float, box)
            bbox = [x1, y1, x2 - x1, y2 - y1]
            answers.append({"image_id": image, "category_id": int(label), "bbox": bbox, "score": float(score)})
    labels = sorted({one["category_id"] for one in [*objects, *answers]})
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco.COCO()
        truth.dataset = {
            "images": [{"id": image} for image in range(1, len(pictures) + 1)],
            "annotations": objects,
            "categories": [{"id": label, "name": str(label)} for label in labels],
            "info": {},
        }
        truth.createIndex()
        evaluation = cocoeval.COCOeval(truth, truth.loadRes(answers), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {MAP_50: float(evaluation.stats[1]), MAP_50_95: float(evaluation.stats[0])}


def boxes(generator: np.random.Generator, count: int, *, whole: bool) -> np.ndarray:
    corners = generator.uniform(0, 40, (count, 2))
    both = np.concatenate([corners, corners + generator.uniform(4, 24, (count, 2))], axis=1)
    return np.rint(both) if whole else both


def picture(generator: np.random.Generator, *, most: int = 8, labels: int = 3, whole: bool) -> Picture:
    """Detections near the objects, and elsewhere; with whole numbers, many scores and overlaps are equal."""
    objects = int(generator.integers(0, most))
    wanted = Wanted(
        boxes(generator, objects, whole=whole),
        generator.integers(0, labels, objects),
        generator.random(objects) < 0.2,
    )
    near = np.repeat(wanted.boxes, 2, axis=0) + generator.normal(0, 2, (2 * objects, 4))
    near = np.rint(near) if whole else near
    near[:, 2:] = np.maximum(near[:, 2:], near[:, :2] + 1)
    strays = boxes(generator, int(generator.integers(0, most)), whole=whole)
    classes = np.concatenate([np.repeat(wanted.classes, 2), generator.integers(0, labels, len(strays))])
    scores = generator.random(len(classes))
    scores = np.sort(np.round(scores, 1) if whole else scores)[::-1]
    order = generator.permutation(len(classes))
    return Found(np.concatenate([near, strays])[order], classes[order], scores), wanted


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.booleans())
def test_a_set_has_the_map_of_pycocotools(seed, count, whole):
    generator = np.random.default_rng(seed)
    pictures = [picture(generator, whole=whole) for _ in range(count)]
    if any(len(found.scores) for found, _ in pictures) and any((~wanted.is_crowd).any() for _, wanted in pictures):
        assert ours(pictures) == pytest.approx(theirs(pictures), abs=1e-6)


def made(*found: tuple[float, ...], wanted: list[tuple[float, ...]]) -> Picture:
    """Rows of x1, y1, x2, y2, class, score; and of x1, y1, x2, y2, class, is_crowd."""
    one, other = (np.array(rows, float).reshape(-1, 6) for rows in (found, wanted))
    return (
        Found(one[:, :4], one[:, 4].astype(int), one[:, 5]),
        Wanted(other[:, :4], other[:, 4].astype(int), other[:, 5] > 0),
    )


CASES = {
    "exactly at a threshold": made((0, 0, 10, 5, 0, 0.9), wanted=[(0, 0, 10, 10, 0, 0)]),
    "twice the same object": made((0, 0, 10, 10, 0, 0.9), (0, 0, 10, 10, 0, 0.8), wanted=[(0, 0, 10, 10, 0, 0)]),
    "two objects of one place": made(
        (0, 0, 10, 10, 0, 0.9), (0, 0, 10, 10, 0, 0.9), wanted=[(0, 0, 10, 10, 0, 0), (0, 0, 10, 10, 0, 0)]
    ),
    "the better object is taken by the first": made(
        (0, 0, 10, 10, 0, 0.9),
        (0, 0, 10, 9, 0, 0.8),
        (1, 0, 11, 10, 0, 0.7),
        wanted=[(0, 0, 10, 10, 0, 0), (2, 0, 12, 10, 0, 0)],
    ),
    "several in a crowd": made(
        (0, 0, 10, 10, 0, 0.9),
        (10, 10, 20, 20, 0, 0.8),
        (60, 60, 70, 70, 0, 0.7),
        wanted=[(0, 0, 50, 50, 0, 1), (60, 60, 70, 70, 0, 0)],
    ),
    "a crowd around an object": made(
        (0, 0, 10, 10, 0, 0.9), (0, 0, 10, 10, 0, 0.8), wanted=[(0, 0, 30, 30, 0, 1), (0, 0, 10, 10, 0, 0)]
    ),
    "another class": made((0, 0, 10, 10, 1, 0.9), wanted=[(0, 0, 10, 10, 0, 0)]),
    "a class without objects beside": made(
        (0, 0, 10, 10, 0, 0.9), (0, 0, 10, 10, 7, 0.95), wanted=[(0, 0, 10, 10, 0, 0)]
    ),
    "more than a hundred of a class": made(
        *[(30, 30, 40, 40, 0, 0.9)] * 100, (0, 0, 10, 10, 0, 0.1), wanted=[(0, 0, 10, 10, 0, 0)]
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_where_the_rules_decide_it_is_pycocotools_too(case):
    assert ours([CASES[case]]) == pytest.approx(theirs([CASES[case]]), abs=1e-6)


def score_of(one: Picture) -> float:
    found, wanted = one
    return image_score(found, match(found, wanted), int((~wanted.is_crowd).sum()))


def test_the_score_of_an_image_falls_with_what_is_lost_moved_renamed_or_false():
    wanted = [(0, 0, 10, 10, 0, 0), (20, 20, 30, 30, 1, 0)]
    both = ((0, 0, 10, 10, 0, 0.9), (20, 20, 30, 30, 1, 0.8))
    assert score_of(made(*both, wanted=wanted)) == 1.0
    assert score_of(made(both[0], wanted=wanted)) == 0.5
    assert score_of(made(both[0], (*both[1][:4], 0, 0.8), wanted=wanted)) == 0.5
    # An IoU of 0.9 is enough at nine of ten thresholds; at the last it is a false box above the other.
    assert score_of(made((0, 0, 10, 9, 0, 0.9), both[1], wanted=wanted)) == pytest.approx(0.9 + 0.25 / 10)
    above = (50, 50, 60, 60, 0, 0.95)
    assert score_of(made(above, *both, wanted=wanted)) == pytest.approx(2 / 3)
    # What is worse than everything right costs nothing, as in the mean average precision.
    assert score_of(made(*both, (*above[:5], 0.1), wanted=wanted)) == 1.0
    assert score_of(made(wanted=wanted)) == 0.0
    assert score_of(made(wanted=[])) == 1.0
    assert score_of(made((0, 0, 10, 10, 0, 0.3), wanted=[])) == pytest.approx(0.7)
    assert score_of(made((0, 0, 10, 10, 0, 0.3), wanted=[(0, 0, 40, 40, 0, 1)])) == 1.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_an_image_without_the_best_right_box_has_a_lower_score(seed):
    one, wanted = picture(np.random.default_rng(seed), whole=False)
    right = match(one, wanted).is_right.all(axis=0)
    if right.any():
        kept = np.arange(len(right)) != int(right.argmax())
        # Another box may take its place, but with a lower score.
        assert score_of((Found(*(array[kept] for array in one)), wanted)) <= score_of((one, wanted)) + 1e-12


def answered(found: Found, most: int) -> dict[str, np.ndarray]:
    """One sample's outputs of a network with `most` rows; unused ones have a score of 0."""
    rows = np.zeros((most, 6))
    rows[: len(found.scores)] = np.column_stack([found.boxes, found.classes, found.scores])
    order = np.random.default_rng(0).permutation(most)
    return {
        "boxes": rows[order, :4].astype(np.float32),
        "scores": rows[order, 5].astype(np.float32),
        "labels": rows[order, 4].astype(np.int64),
    }


def target(wanted: Wanted, most: int) -> np.ndarray:
    rows = np.full((most, 6), -1.0)
    rows[: len(wanted.classes)] = np.column_stack([wanted.boxes, wanted.classes, wanted.is_crowd])
    return rows


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_judge_of_detectors_has_the_map_of_pycocotools_batch_by_batch(seed):
    generator = np.random.default_rng(seed)
    pictures = [picture(generator, whole=True) for _ in range(7)]
    # Scores in a float32 network, each its own, because a network gives rows in any order.
    scores = [generator.permutation(1000)[: len(found.scores)] / 1024 + 0.01 for found, _ in pictures]
    pictures = [
        (found._replace(scores=np.sort(own.astype(np.float32).astype(float))[::-1]), wanted)
        for own, (found, wanted) in zip(scores, pictures, strict=True)
    ]
    if not any((~wanted.is_crowd).any() for _, wanted in pictures):
        return
    names = {"boxes": ("FP32", (30, 4)), "scores": ("FP32", (30,)), "labels": ("INT64", (30,))}
    outputs = tuple(TensorSpec(name, *one) for name, one in names.items())
    said = DetectionOutputs("boxes", "scores", "labels")
    spec = ModelSpec("m", (TensorSpec("x", "FP32", (4,)),), outputs, 4, None, "none", (), task="detect", detection=said)
    judge, parts = judge_of(spec), []
    for some in (pictures[:3], pictures[3:4], pictures[4:]):
        one_by_one = [answered(found, 30) for found, _ in some]
        answers = {name: np.stack([one[name] for one in one_by_one]) for name in names}
        parts.append(judge.judged(answers, answers, np.stack([target(wanted, 12) for _, wanted in some])))
    whole = DetectionOutcomes.joined(parts)
    assert whole.set_metrics == pytest.approx(theirs(pictures), abs=1e-6)
    # As the cache keeps them.
    assert judge.restored(whole.arrays()).set_metrics == whole.set_metrics
    assert np.allclose(
        whole.scores, [score_of((Found(*(array[found.scores >= 0.05] for array in found)), w)) for found, w in pictures]
    )


def test_boxes_are_clipped_to_the_picture_and_not_to_its_padding():
    spec = ModelSpec(
        "m",
        (TensorSpec("images", "UINT8", (100, 100, 3)),),
        (TensorSpec("boxes", "FP32", (1, 4)), TensorSpec("scores", "FP32", (1,))),
        4,
        ImageSpec.plain(100, 100, 3, "uint8_nhwc"),
        "none",
        (),
        task="detect",
        detection=DetectionOutputs("boxes", "scores"),
    )
    # A picture in the middle, with a padding of 25 above and below.
    answers = {"boxes": np.array([[[0, 5, 40, 60]]], np.float32), "scores": np.array([[0.9]], np.float32)}
    objects = np.array([[[0, 25, 100, 75, -1, 2], [0, 25, 40, 60, 0, 0]]], float)
    assert judge_of(spec).judged(answers, answers, objects).scores.tolist() == [1.0]
    assert judge_of(spec).judged(answers, answers, objects[:, 1:]).scores.tolist() == [pytest.approx(0.3)]
    with pytest.raises(JobError, match=r"a detector's are \[objects, 5\]: the box"):
        judge_of(spec).judged(answers, answers, np.zeros((1, 3)))
