"""What a good answer is, by task; how sure a mean score is; and what outputs are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.export.proof.activation import purpose_of
from convoy.export.proof.judging import ScoreJudge, boxes_f1, class_maps, judge_of, mean_iou
from convoy.export.proof.outcomes import ScoredOutcomes, relative_errors, score_loss_bound_points
from convoy.models.errors import JobError
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import AnchorLevel, DetectionOutputs, Task

BOXES = DetectionOutputs("boxes", "scores", iou_threshold=0.5)


def spec_of(task: Task, *outputs: TensorSpec, activation: str = "none") -> ModelSpec:
    inputs = (TensorSpec("x", "FP32", (4,)),)
    return ModelSpec("m", inputs, outputs, 4, None, activation, (), task=task)  # type: ignore[arg-type]


def detector_of(said: DetectionOutputs, arrays: dict[str, np.ndarray], activation: str = "none") -> ModelSpec:
    image = ImageSpec.plain(100, 200, 3, "uint8_nhwc")
    outputs = tuple(TensorSpec(name, "FP32", array.shape[1:]) for name, array in arrays.items())
    inputs = (TensorSpec("images", "UINT8", image.tensor_shape),)
    return ModelSpec("m", inputs, outputs, 4, image, activation, (), task="detect", detection=said)  # type: ignore[arg-type]


def scored(scores: np.ndarray) -> ScoredOutcomes:
    return ScoredOutcomes(scores, np.ones(len(scores)), np.zeros((len(scores), 1)))


def test_iou_is_the_mean_over_the_classes_of_map_or_target():
    one = np.array([[[0, 0], [1, 1]]])
    assert mean_iou(one, np.array([[[0, 0], [1, 1]]])) == [1.0]
    # Of class 0 two of three, of class 1 one of two.
    assert mean_iou(one, np.array([[[0, 0], [0, 1]]])) == [pytest.approx((2 / 3 + 1 / 2) / 2)]
    assert mean_iou(one, np.array([[[0, 255], [255, 1]]])) == [1.0]
    assert mean_iou(one, np.full((1, 2, 2), 255)) == [1.0]
    assert mean_iou(one, np.array([[[2, 2], [2, 2]]])) == [0.0]


def test_maps_come_from_scores_from_one_score_and_from_classes():
    scores = np.array([[[[2.0, -1.0]], [[1.0, 3.0]]]])
    assert class_maps(scores, "softmax").tolist() == [[[0, 1]]]
    assert class_maps(scores[:, :1], "sigmoid").tolist() == [[[1, 0]]]
    assert class_maps(np.array([[[0.4, 0.6]]])[:, None], "none").tolist() == [[[0, 1]]]
    assert class_maps(np.array([[[3, 1]]]), "none").tolist() == [[[3, 1]]]
    # What the server would not answer is right nowhere.
    assert class_maps(np.array([[[3, 300]]]), "none").tolist() == [[[-1, -1]]]
    assert mean_iou(class_maps(scores * np.nan, "softmax"), np.array([[[0, 1]]])) == [0.0]


def test_boxes_match_by_class_and_overlap_whatever_their_order():
    boxes = np.array([[[0, 0, 10, 10], [20, 20, 30, 30]]], np.float32)
    scores = np.array([[[0.9, 0.0], [0.0, 0.8]]], np.float32)
    reference = {"boxes": boxes, "scores": scores}
    spec = detector_of(BOXES, reference)
    assert boxes_f1(reference, reference, spec) == [1.0]
    turned = {"boxes": boxes[:, ::-1], "scores": scores[:, ::-1]}
    assert boxes_f1(turned, reference, spec) == [1.0]
    assert boxes_f1({"boxes": boxes + 6, "scores": scores}, reference, spec) == [0.0]
    assert boxes_f1({"boxes": boxes, "scores": scores[:, :, ::-1]}, reference, spec) == [0.0]
    one_less = {"boxes": boxes, "scores": scores * np.array([[[1], [0]]])}
    assert boxes_f1(one_less, reference, spec) == [pytest.approx(2 / 3)]


def test_boxes_are_those_that_a_server_would_answer():
    """Logits count as the scores that they are, anchors as boxes, and what overlaps has gone."""
    said = replace(BOXES, anchors=(AnchorLevel(1, 2, 100.0, 100.0, ((40.0, 40.0),)),), threshold=0.5, background=0)
    moved, logits = np.zeros((1, 2, 4), np.float32), np.array([[[9.0, 0.1, -9.0], [9.0, -0.1, -9.0]]], np.float32)
    reference = {"boxes": moved, "scores": logits}
    spec = detector_of(said, reference, "sigmoid")
    # The second box is below the threshold, wherever it lies; the first moves by half of its width.
    assert boxes_f1(reference | {"boxes": moved + np.array([[[0], [3]]], np.float32)}, reference, spec) == [1.0]
    assert boxes_f1(reference | {"boxes": moved + np.array([[[0.5], [0]]], np.float32)}, reference, spec) == [0.0]
    twice = {"boxes": np.repeat(np.array([[[0, 0, 10, 10.0]]], np.float32), 2, 1), "scores": logits}
    alike = detector_of(replace(BOXES, threshold=0.0), twice, "sigmoid")
    moved_away = twice | {"boxes": twice["boxes"] + np.array([[[0], [0.5]]], np.float32)}
    assert boxes_f1(moved_away, twice, alike) == [1.0]
    assert boxes_f1({name: array * np.nan for name, array in twice.items()}, twice, alike) == [0.0]


@settings(max_examples=20, deadline=None)
@given(st.integers(30, 200), st.floats(0, 0.2), st.integers(0, 2**32 - 1))
def test_the_bootstraps_bound_is_above_the_mean_and_shrinks_with_the_level(count, loss, seed):
    lost = np.random.default_rng(seed).normal(loss, 0.1, count)
    bound = score_loss_bound_points(lost)
    wider = score_loss_bound_points(lost, level=0.01)
    assert bound is not None
    assert wider is not None
    assert 100 * lost.mean() < bound < wider
    # Of a normal mean it is near the textbook's.
    assert bound == pytest.approx(100 * (lost.mean() + 1.645 * lost.std() / np.sqrt(count)), abs=1.5)


def test_few_scores_prove_nothing_and_right_or_wrong_have_the_exact_bound():
    few = scored(np.linspace(0, 1, 29))
    found = few.accuracy(scored(np.linspace(0, 1, 29)), (), 1.0)
    assert (found.loss_points, found.loss_bound_points, found.is_proved) == (0.0, None, False)
    binary = scored(np.ones(360)).accuracy(scored(np.ones(360)), (), 1.0)
    assert binary.loss_bound_points == pytest.approx(100 * (1 - 0.045 ** (1 / 360)), abs=1e-4)
    reference = scored(np.linspace(0, 1, 40))
    assert reference.accuracy(reference, (), 1.0).is_proved
    worse = scored(np.linspace(0, 1, 40) - 0.02).accuracy(reference, (), 1.0)
    assert worse.loss_points == pytest.approx(2)
    assert not worse.is_proved


def test_whole_numbers_differ_by_share_and_floats_by_size():
    assert relative_errors(np.array([[1, 2], [3, 4]]), np.array([[1, 0], [3, 4]])).tolist() == [0.5, 0.0]
    assert relative_errors(np.array([[[3.0, 4.5]]]), np.array([[[3.0, 4.0]]])).tolist() == [pytest.approx(0.1)]


def test_multilabel_counts_labels_and_none_counts_nothing_but_likeness():
    several = judge_of(spec_of("multilabel", TensorSpec("y", "FP32", (4,)), activation="sigmoid"))
    answers = {"y": np.array([[1.0, -1.0, 2.0, -2.0]], np.float32)}
    flipped = {"y": answers["y"] * np.array([1, 1, 1, -1], np.float32)}
    outcomes = several.judged(flipped, answers, np.array([[1, 0, 1, 1]]))
    assert isinstance(outcomes, ScoredOutcomes)
    assert (outcomes.agreements.tolist(), outcomes.scores.tolist()) == ([0.75], [1.0])
    plain = judge_of(spec_of("none", TensorSpec("y", "FP32", (4,))))
    assert isinstance(plain, ScoreJudge)
    assert not plain.scores_targets
    outcomes = plain.judged({"y": answers["y"] * np.float32(1.1)}, answers, np.zeros(1))
    assert outcomes.agreement(outcomes) == pytest.approx(0.9, abs=1e-6)


def test_targets_of_a_classifier_are_numbers_of_its_classes():
    judge = judge_of(spec_of("classify", TensorSpec("y", "FP32", (3,)), activation="softmax"))
    answers = {"y": np.eye(3, dtype=np.float32)}
    with pytest.raises(JobError, match="the targets name class 3, and the network has 3, from 0"):
        judge.judged(answers, answers, np.array([0, 1, 3]))
    with pytest.raises(JobError, match="a classifier's are one whole number, the class; pass --metric"):
        judge.judged(answers, answers, np.zeros((3, 2)))


ROW, MAP, IDS = TensorSpec("y", "FP32", (3,)), TensorSpec("m", "FP32", (3, 8, 8)), TensorSpec("i", "INT64", (8, 8))


@pytest.mark.parametrize(
    ("outputs", "labels", "takes_images", "task", "words"),
    [
        ((ROW,), (), True, "classify", ""),
        ((ROW,), (), False, "none", "--task classify or multilabel, if y scores classes"),
        ((ROW,), ("a", "b", "c"), False, "classify", ""),
        ((ROW, MAP), (), True, "none", "--task segment, if m is a class for each pixel"),
        ((ROW, MAP), ("a", "b", "c"), True, "classify", ""),
        ((MAP,), ("a", "b", "c"), True, "none", "--task segment, if m is"),
        ((IDS,), (), True, "none", "--task segment, if i is"),
        ((TensorSpec("z", "FP32", (2, 5)),), (), True, "none", "--task says otherwise"),
    ],
)
def test_only_what_is_sure_is_promised(outputs, labels, takes_images, task, words):
    found = purpose_of(None, outputs, labels=labels, takes_images=takes_images)
    assert found.task == task
    assert words in found.remark


def test_boxes_are_found_by_name():
    outputs = (TensorSpec("boxes", "FP32", (9, 4)), TensorSpec("scores", "FP32", (9, 3)))
    raw = purpose_of("detect", outputs, labels=(), takes_images=True).detection
    assert (raw.labels, raw.iou_threshold) == (None, 0.5)
    chosen = (outputs[0], TensorSpec("scores", "FP32", (9,)), TensorSpec("labels", "INT64", (9,)))
    left = purpose_of("detect", chosen, labels=(), takes_images=True).detection
    assert (left.labels, left.iou_threshold) == ("labels", None)
    with pytest.raises(JobError, match=r"output 'boxes' is FP32 \[9, 5\] .*; pass another --task"):
        purpose_of("detect", (TensorSpec("boxes", "FP32", (9, 5)), outputs[1]), labels=(), takes_images=True)
