"""What a good answer is, what a loss may be and the words for it: judges, bounds, the gate, the verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from export_fixtures import IMAGE, answers, write_images, write_red_or_blue
from hypothesis import given, settings
from hypothesis import strategies as st
from report_fixtures import full_manifest
from test_export_report import Page

from convoy.export.data import ImageSet
from convoy.export.progress import SILENT
from convoy.export.proof.activation import purpose_of
from convoy.export.proof.judging import ScoreJudge, boxes_f1, class_maps, judge_of, mean_iou
from convoy.export.proof.outcomes import (
    Outcomes,
    ScoredOutcomes,
    binomial_upper,
    loss_bound_points,
    relative_errors,
    score_loss_bound_points,
)
from convoy.export.proof.proving import AccuracyGate
from convoy.export.proof.verify import Score, check_against_torch, measure_accuracy
from convoy.export.report.page import render
from convoy.export.report.verdict import verdict_of
from convoy.export.sources.layouts import likely_layout, outputs_read
from convoy.export.sources.onnx_metadata import usual_detection
from convoy.export.sources.torch_job import one_line
from convoy.export.variants.precision import REFERENCE, Recipe
from convoy.export.variants.variant import opened
from convoy.models.bundle import Accuracy, Interval, Manifest, Variant
from convoy.models.datasets import load
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


def test_whole_numbers_differ_by_share_floats_by_size_and_what_is_not_finite_by_infinity():
    errors = relative_errors(np.array([[np.nan, 1.0], [np.inf, 1.0], [3.0, 4.0]]), np.array([[3.0, 4.0]] * 3))
    assert errors.tolist() == [np.inf, np.inf, 0.0]
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
        ((ROW,), (), False, "none", "--task classify or multilabel if y has class scores"),
        ((ROW,), ("a", "b", "c"), False, "classify", ""),
        ((ROW, MAP), (), True, "none", "--task segment if m has a class per pixel"),
        ((ROW, MAP), ("a", "b", "c"), True, "classify", ""),
        ((MAP,), ("a", "b", "c"), True, "segment", "m is taken as a class per pixel"),
        ((MAP,), (), False, "none", "--task segment if m has"),
        ((TensorSpec("d", "FP32", (1, 8, 8)),), (), True, "none", "--task segment if d has"),
        ((IDS,), (), True, "segment", "i is taken as a class per pixel"),
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


PROBABILITIES = st.floats(0, 0.3)


def test_the_binomial_bound_is_clopper_and_pearsons():
    # From R: binom.test(5, 100, alternative = "less")$conf.int
    assert binomial_upper(5, 100, 0.05) == pytest.approx(0.1022534, abs=1e-6)
    assert binomial_upper(0, 100, 0.05) == pytest.approx(0.0295130, abs=1e-6)
    assert binomial_upper(100, 100, 0.05) == 1
    assert binomial_upper(49_000, 50_000, 0.05) == pytest.approx(0.98102, abs=1e-4)


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(100, 5000))
def test_the_bound_is_above_the_estimate_and_grows_with_what_is_lost(lost, won, images):
    bound = loss_bound_points(lost, won, images)
    assert bound > 100 * (lost - won) / images
    assert loss_bound_points(lost + 1, won, images) > bound
    assert loss_bound_points(lost, won + 1, images) <= bound
    assert loss_bound_points(lost, won, images, level=0.01) > bound


@settings(max_examples=25, deadline=None)
@given(PROBABILITIES, PROBABILITIES, st.sampled_from([10, 40, 200]), st.integers(0, 2**32 - 1))
def test_the_bound_covers_the_true_loss_in_at_least_95_of_100_samples(p_lost, p_won, images, seed):
    draws = np.random.default_rng(seed).multinomial(images, [p_lost, p_won, 1 - p_lost - p_won], size=400)
    kinds, counts = np.unique(draws[:, :2], axis=0, return_counts=True)
    true_points = 100 * (p_lost - p_won)
    covered = sum(
        count
        for (lost, won), count in zip(kinds.tolist(), counts.tolist(), strict=True)
        if loss_bound_points(lost, won, images) >= true_points
    )
    # 400 samples of 95 % vary by 1.1 points; four of those are never seen.
    assert covered / 400 >= 0.95 - 0.044


def outcomes(top1: list[int], labels: list[int]) -> Outcomes:
    answers = np.eye(8, dtype=np.float32)[top1]
    return Outcomes.of(answers, answers, np.array(labels))


def score(lost: int, won: int, images: int, budget_points: float = 1.0, looks: int = 1) -> Score:
    right, wrong = [0] * images, [1] * images
    reference = outcomes(right[: images - won] + wrong[:won], right)
    variant = outcomes(wrong[:lost] + right[lost:], right)
    return Score(variant.accuracy(reference, [str(i) for i in range(8)], budget_points, looks=looks), 0.0)


def test_scores_count_classes_and_pairs():
    labels = [0, 0, 1, 1]
    reference, variant = outcomes([0, 0, 1, 2], labels), outcomes([0, 1, 1, 1], labels)
    accuracy = variant.accuracy(reference, [str(i) for i in range(8)], 1.0)
    assert (accuracy.top1, accuracy.agreement, accuracy.loss_points) == (0.75, 0.5, 0.0)
    assert [(one.label, one.images, one.recall) for one in accuracy.per_class] == [("0", 2, 0.5), ("1", 2, 1.0)]
    assert accuracy.top5 == 1.0
    assert accuracy.loss_bound_points == pytest.approx(loss_bound_points(1, 1, 4))
    assert reference.accuracy(reference, (), 1.0).loss_bound_points == 0
    assert reference.accuracy(reference, (), 1.0).top5 is None


@pytest.mark.parametrize(
    ("lost", "images", "strict", "serves", "words"),
    [
        (
            0,
            1000,
            True,
            True,
            "loses 0.00 points of top-1 on 1000 images (loss below 0.31 points at 95 % confidence), within the budget",
        ),
        (6, 1000, False, True, "a budget of 1 is not proved with 1000 images"),
        (6, 1000, True, False, "is not proved with 1000 images, and --strict-gate wants it proved"),
        (11, 1000, False, False, "loses 1.10 points of top-1 on 1000 images, over the budget of 1"),
    ],
)
def test_the_gates_rule(lost, images, strict, serves, words):
    serve, reason = AccuracyGate(1.0, strict).verdict(score(lost, 0, images))
    assert serve == serves
    assert words in reason


@pytest.mark.parametrize(
    ("bound", "words"),
    [(None, ""), (0.3, "loss below 0.30 points"), (0.0, "loss below 0.00"), (-0.2, "gain above 0.20")],
)
def test_the_bound_says_whether_something_may_be_lost(bound, words):
    accuracy = replace(score(0, 0, 100).accuracy, loss_bound_points=bound)
    assert words in accuracy.bound_in_words
    assert ("at 95 % confidence" in accuracy.bound_in_words) == (bound is not None)


def test_without_labels_agreement_is_told_and_nothing_serves():
    serve, reason = AccuracyGate(1.0).verdict(
        Score(None, 0.1, agreement=0.75, likeness="agrees with fp32 on 75.0 % of"), real=False
    )
    assert not serve
    assert "not verified on labels: agrees with fp32 on 75.0 % of some random inputs" in reason


SPEC = ModelSpec(
    name="colours",
    inputs=(TensorSpec("images", "UINT8", IMAGE.tensor_shape),),
    outputs=(TensorSpec("logits", "FP32", (2,)),),
    max_batch_size=4,
    image=IMAGE,
    activation="softmax",
    labels=("red", "blue"),
)
SAMPLES = np.random.default_rng(1).integers(0, 256, (7, 8, 8, 3), dtype=np.uint8)


@pytest.fixture
def images(tmp_path):
    dataset = load(str(write_images(tmp_path / "images"))).in_order_of(("red", "blue"))
    return {part: ImageSet("colours", tuple(dataset.part(part)), IMAGE) for part in ("calibration", "test")}


@pytest.fixture
def fp32(tmp_path):
    write_red_or_blue(tmp_path / REFERENCE.file)
    with opened(SPEC, [REFERENCE], tmp_path) as (candidate,):
        yield candidate


def test_one_sample_that_differs_fails_the_export(fp32):
    reference = answers(fp32.path, SAMPLES)
    reference[5] *= 1.001
    with pytest.raises(JobError, match=r"differs from torch by 0.001 at batch size 1"):
        check_against_torch(fp32, {"images": SAMPLES}, {"logits": reference})


def test_a_network_that_magnifies_rounding_may_differ_by_some_roundings(fp32):
    reference = {"logits": answers(fp32.path, SAMPLES) * np.float32(1.0004)}
    for rounding, words in (({}, "by 0.0004 .*allowed is 0.0001"), ({"logits": 2e-5}, "allowed is 0.0001")):
        with pytest.raises(JobError, match=words):
            check_against_torch(fp32, {"images": SAMPLES}, reference, rounding=rounding)
    check_against_torch(fp32, {"images": SAMPLES}, reference, rounding={"logits": 1e-4})
    reference = {"logits": reference["logits"] * np.float32(1.003)}  # no network is that bad
    with pytest.raises(JobError, match=r"allowed is 0\.002"):
        check_against_torch(fp32, {"images": SAMPLES}, reference, rounding={"logits": 0.5})


def test_only_where_batches_differ_samples_are_said_to_mix(fp32, monkeypatch):
    reference = {"logits": answers(fp32.path, SAMPLES)}
    given = type(fp32).answers
    named = "net.onnx in ONNX Runtime"
    for is_mixed in (True, False):

        def wrong(self, inputs, is_mixed=is_mixed):
            found = given(self, inputs)
            factor = 1.01 if len(inputs["images"]) > 1 or not is_mixed else 1
            return {name: one * np.float32(factor) for name, one in found.items()}

        monkeypatch.setattr(type(fp32), "answers", wrong)
        with pytest.raises(JobError, match=f"differs from {named} by 0.01") as caught:
            check_against_torch(fp32, {"images": SAMPLES}, reference, original=named)
        assert ("mix samples" in str(caught.value)) == is_mixed
        assert "torch" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "limit", "kept"),
    [
        ("one\n  two", 300, "one two"),
        ("A first. A second. A third.", 20, "A first. A second."),
        ("a line\nanother line\na third", 20, "a line another line"),
        ("one sentence that is longer than that. Another.", 10, "one sentence that is longer than that."),
        ("no end at all that anybody could find", 10, "no end at all that anybody could find"),
        ("version 1.2.3 of it. More", 18, "version 1.2.3 of it."),
    ],
)
def test_a_librarys_words_end_where_a_sentence_or_a_line_does(text, limit, kept):
    assert one_line(text, limit) == kept


def test_a_variant_that_is_wrong_on_one_class_loses_half_the_points(tmp_path, fp32, images):
    model = onnx.load(fp32.path)
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head.bias")
    head.CopyFrom(onnx.numpy_helper.from_array(np.array([9, 0], np.float32), "head.bias"))
    onnx.save(model, tmp_path / "broken.onnx")
    with opened(SPEC, [Recipe("broken.onnx", "int8", "cpu", None)], tmp_path) as (broken,):
        _, score = measure_accuracy([fp32, broken], images["test"], SILENT)
    assert (score.accuracy.top1, score.accuracy.agreement, score.accuracy.loss_points) == (0.5, 0.5, 50.0)


def test_broken_images_are_left_out_until_they_are_too_many(fp32, images):
    broken = images["test"].samples[0].content
    broken.write_bytes(b"not an image")
    with pytest.raises(JobError, match=r"1 of 24 images of colours cannot be read: blue/0.png; remove or repair"):
        measure_accuracy([fp32], images["test"], SILENT)
    many = ImageSet("colours", images["test"].samples * 10, IMAGE)
    many.samples[1].content.write_bytes(many.samples[2].content.read_bytes())
    broken.write_bytes(many.samples[2].content.read_bytes())
    (score,) = measure_accuracy([fp32], many, SILENT)
    assert score.accuracy.images == 240


LARGE_IMAGE = ImageSpec(224, 224, 3, "shorter_side", 256, "bilinear", True, (0.5,) * 3, (0.5,) * 3, "uint8_nhwc")


def manifest_of(*variants: Variant, **changes: object) -> Manifest:
    manifest = full_manifest()
    spec = replace(manifest.spec, image=LARGE_IMAGE)
    return replace(manifest, spec=spec, variants=variants or manifest.variants, **changes)  # type: ignore[arg-type]


def of_task(task: Task, accuracy: Accuracy | None = None) -> Manifest:
    """Of tensors, with fp32 alone."""
    manifest = full_manifest()
    spec = replace(manifest.spec, task=task, activation="none")
    return replace(manifest, spec=spec, variants=(replace(FP32, accuracy=accuracy),))


FP32, INT8, FP16 = full_manifest().variants
SLOW = replace(INT8, serve=False, passes_gate=True, latency=replace(INT8.latency, speedup=Interval(0.9, 0.8, 1.0)))
POOR = replace(INT8, serve=False, passes_gate=False)
FAST = "CPUs use int8-cpu.onnx, 2.35 times as fast as fp32 on the export machine (2.25 to 2.44)"
RIGHT = "with 93.40 % top-1 on 1,200 images"
TENSORS = "/predictions does not answer for resnet, because it has no image preprocessing. CPUs use fp32.onnx"


@pytest.mark.parametrize(
    ("manifest", "tone", "sentence"),
    [
        (
            manifest_of(),
            "good",
            f"{FAST}, with 92.81 % top-1 on 1,200 images, 0.59 points less than fp32 (loss below 0.97 points "
            "at 95 % confidence); "
            "GPUs may use fp16.onnx.",
        ),
        (
            manifest_of(FP32, SLOW),
            "good",
            f"CPUs use fp32.onnx, {RIGHT}, while int8-cpu.onnx is not significantly faster.",
        ),
        (
            manifest_of(FP32, POOR, replace(SLOW, file="bf16.onnx", target="openvino")),
            "good",
            f"CPUs use fp32.onnx, {RIGHT}, while bf16.onnx is not significantly faster and int8-cpu.onnx does not "
            "pass the accuracy gate.",
        ),
        (
            manifest_of(FP32, replace(FP16, serve=False, passes_gate=False)),
            "good",
            f"CPUs use fp32.onnx, {RIGHT}.",
        ),
        (
            manifest_of(FP32, FP16, replace(FP16, file="fp8.onnx"), replace(FP16, file="int8-trt.onnx")),
            "good",
            f"CPUs use fp32.onnx, {RIGHT}; GPUs may use fp16.onnx, fp8.onnx and int8-trt.onnx.",
        ),
        (
            manifest_of(
                FP32, replace(INT8, accuracy=replace(INT8.accuracy, loss_points=-0.5, is_proved=False), latency=None)
            ),
            "good",  # of what was not measured nobody can say that it is what serves
            f"CPUs use fp32.onnx, {RIGHT}.",
        ),
        (
            manifest_of(FP32, replace(INT8, accuracy=replace(INT8.accuracy, loss_points=-0.5, is_proved=False))),
            "doubt",
            f"{FAST}, with 92.81 % top-1 on 1,200 images, 0.50 points more than fp32 (loss below 0.97 points "
            "at 95 % confidence); not proved to be within the budget.",
        ),
        (
            manifest_of(replace(FP32, accuracy=None)),
            "doubt",
            "CPUs use fp32.onnx, accuracy not measured, because there are no labelled images (--evaluate).",
        ),
        (
            replace(full_manifest(), variants=(replace(FP32, accuracy=None),)),
            "doubt",
            f"{TENSORS}, accuracy not measured, because there are no targets (--evaluate).",
        ),
        (
            of_task("none"),
            "doubt",
            f"{TENSORS}, accuracy not measured, because there are no targets (--evaluate FILE.npz and --metric).",
        ),
        (
            of_task("multilabel"),
            "doubt",
            f"{TENSORS}, accuracy not measured, because there are no targets (--evaluate FILE.npz).",
        ),
        (
            of_task("none", replace(FP32.accuracy, metric="scores.py:close", top1=-0.25, images=1)),
            "good",
            f"{TENSORS}, with scores.py:close -0.25 on 1 sample.",
        ),
        (
            manifest_of(objections=("10.00 % are right: not better than chance", "--min-accuracy wants 50 %")),
            "alarm",
            "resnet should not be served: 10.00 % are right: not better than chance (and 1 more, below).",
        ),
        (
            manifest_of(replace(FP32, serve=False), replace(POOR, reason="it is poor")),
            "alarm",
            "No file of resnet is served (fp32.onnx: because; int8-cpu.onnx: it is poor).",
        ),
        (
            manifest_of(replace(FP32, serve=False), FP16),
            "alarm",
            "GPUs may use fp16.onnx (fp32.onnx: because; fp16.onnx: because).",
        ),
    ],
)
def test_every_outcome_is_one_sentence(manifest, tone, sentence):
    found = verdict_of(manifest)
    assert (found.tone, found.sentence) == (tone, sentence)


@given(st.lists(st.tuples(st.sampled_from([FP32, INT8, SLOW, POOR, FP16]), st.booleans()), min_size=1, max_size=6))
def test_what_the_sentence_says_is_served_may_serve(drawn):
    variants = tuple(
        replace(variant, file=f"{index}-{variant.file}", serve=serve) for index, (variant, serve) in enumerate(drawn)
    )
    sentence = verdict_of(manifest_of(*variants)).sentence
    served = {variant.file for variant in variants if variant.serve}
    named = {variant.file for variant in variants if f"use {variant.file}" in sentence}
    assert named <= served
    assert bool(named) == bool(served)


def test_a_model_that_fails_the_absolute_check_raises_an_alarm_before_all_else():
    objection = "10.00 % of 390 images are right: not significantly better than chance"
    page = Page(render(manifest_of(objections=(objection,))))
    (alarm,) = [given for tag, given in page.tags if given.get("role") == "alert"]
    assert alarm["class"] == "banner alarm"
    words = " ".join(page.text.split())
    assert words.index("should not be served: 10.00 %") < words.index("exported 2026")
    assert "verdict good" not in {given.get("class") for _, given in page.tags}
    assert not [given for _, given in Page(render(manifest_of())).tags if given.get("role") == "alert"]


@pytest.mark.parametrize(
    ("layout", "shapes", "expected"),
    [
        ("yolo_v8", {"output0": (2, 7, 525), "output1.feats.0": (2, 64, 20, 20)}, ("output0", None)),
        (
            "detr",
            {"logits": (2, 9, 4), "pred_boxes": (2, 9, 4), "last_hidden_state": (2, 9, 4)},
            ("pred_boxes", "logits"),
        ),
        ("yolo_v8_seg", {"y": (2, 39, 525), "proto": (2, 32, 40, 40)}, ("y", "proto")),
        ("detr", {"dets": (2, 9, 4), "labels": (2, 9, 91)}, ("dets", "labels")),
        ("detr", {"hidden": (2, 9, 64), "boxes": (2, 9, 4), "class_logits": (2, 9, 80)}, ("boxes", "class_logits")),
        ("detr", {"output0": (2, 9, 84)}, ("output0", None)),
    ],
)
def test_a_layout_reads_the_outputs_that_hold_boxes_and_scores(layout, shapes, expected):
    assert outputs_read(layout, shapes) == expected


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"output0": (2, 7, 525), "output1.feats.0": (2, 64, 20, 20)}, "yolo_v8"),
        ({"output0.0": (2, 39, 525), "output0.1": (2, 32, 40, 40), "output1.0": (2, 64, 20, 20)}, "yolo_v8_seg"),
        ({"output": (2, 1575, 8)}, "yolo_v5"),
        ({"output0": (2, 300, 6), "output1.feats.0": (2, 64, 20, 20)}, "end_to_end"),
        ({"logits": (2, 9, 4), "pred_boxes": (2, 9, 4)}, "detr"),
        ({"logits": (2, 9, 4), "boxes": (2, 8, 4)}, None),
        ({"output": (2, 3, 160, 160)}, None),
        ({"logits": (2, 10)}, None),
    ],
)
def test_shapes_suggest_a_layout(shapes, expected):
    assert likely_layout(shapes, 160, 160) == expected


def test_the_last_class_of_a_softmax_over_queries_is_no_object():
    outputs = (TensorSpec("logits", "FP32", (9, 4)), TensorSpec("pred_boxes", "FP32", (9, 4)))
    said = usual_detection("detr", "")
    found = purpose_of(
        "detect", outputs, labels=("a", "b", "c"), takes_images=True, detection=said, activation="softmax"
    )
    assert found.detection is not None
    assert (found.detection.boxes, found.detection.scores) == ("pred_boxes", "logits")
    assert (found.detection.background, found.detection.is_multi_label) == (3, False)
    with pytest.raises(JobError, match="there are 3 labels, but read as detr"):
        purpose_of("detect", outputs, labels=("a", "b", "c"), takes_images=True, detection=said, activation="sigmoid")
