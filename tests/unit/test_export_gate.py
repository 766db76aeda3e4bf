"""The bound covers what it claims, and the gate's words follow from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.export.proof.outcomes import Outcomes, binomial_upper, loss_bound_points, relative_errors
from convoy.export.proof.proving import AccuracyGate
from convoy.export.proof.verify import Score

PROBABILITIES = st.floats(0, 0.3)


def test_no_difference_on_many_images_bounds_the_loss_by_three_in_so_many():
    # The rule of three, with nine tenths of the error spent on it.
    assert loss_bound_points(0, 0, 360) == pytest.approx(100 * (1 - 0.045 ** (1 / 360)), abs=1e-4)
    assert loss_bound_points(0, 0, 1) == pytest.approx(95.5, abs=0.01)
    assert loss_bound_points(10, 0, 10) == 100


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


def test_an_answer_that_is_not_finite_is_infinitely_far():
    errors = relative_errors(np.array([[np.nan, 1.0], [np.inf, 1.0], [3.0, 4.0]]), np.array([[3.0, 4.0]] * 3))
    assert errors.tolist() == [np.inf, np.inf, 0.0]


@pytest.mark.parametrize(
    ("lost", "images", "strict", "serves", "words"),
    [
        (0, 1000, True, True, "loses 0.00 points of top-1 on 1000 images (at most 0.31 with 95 %), within the budget"),
        (6, 1000, False, True, "a budget of 1 is not proved with 1000 images"),
        (6, 1000, True, False, "is not proved with 1000 images, and --strict-gate wants it proved"),
        (11, 1000, False, False, "loses 1.10 points of top-1 on 1000 images, over the budget of 1"),
    ],
)
def test_the_gates_rule(lost, images, strict, serves, words):
    serve, reason = AccuracyGate(1.0, strict).verdict(score(lost, 0, images))
    assert serve == serves
    assert words in reason


def test_without_labels_agreement_is_told_and_nothing_serves():
    serve, reason = AccuracyGate(1.0).verdict(
        Score(None, 0.1, agreement=0.75, likeness="agrees with fp32 on 75.0 % of"), real=False
    )
    assert not serve
    assert "not verified on labels: agrees with fp32 on 75.0 % of some random inputs" in reason
