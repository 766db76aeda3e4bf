"""What the latency model must be able to learn, and to forget."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from convoy.app.scheduling.latency import UNKNOWN_NS, LatencyModel
from convoy.app.scheduling.queues import WAKING_NS, Lane
from convoy.app.scheduling.request import MILLISECOND_NS

LARGEST = 32
POWERS = (1, 2, 4, 8, 16, 32)
fixed_costs = st.floats(0.1, 20.0)
sample_costs = st.floats(0.01, 2.0)
# A batch of some size that took some multiple of what it should.
disturbances = st.lists(
    st.tuples(st.integers(1, LARGEST), st.one_of(st.floats(0.001, 1.0), st.floats(1.0, 1000.0))), max_size=60
)


def affine(fixed_ms: float, per_sample_ms: float) -> Callable[[int], float]:
    return lambda samples: (fixed_ms + per_sample_ms * samples) * MILLISECOND_NS


def profile(truth: Callable[[int], float]) -> dict[int, float]:
    return {size: truth(size) for size in POWERS}


def largest_within(budget_ns: float, latency_ns: Callable[[int], float]) -> int:
    """The batch that a policy would run with so much time left; one sample always runs."""
    best = 1
    while best < LARGEST and latency_ns(best + 1) <= budget_ns:
        best += 1
    return best


def test_before_anything_is_known_everything_is_thought_cheap() -> None:
    assert LatencyModel().expect_ns(1) == LatencyModel().expect_ns(1000) == UNKNOWN_NS


def test_a_profile_is_read_with_straight_lines_between_its_points() -> None:
    model = LatencyModel({1: 10.0, 4: 40.0, 8: 120.0})
    assert [model.expect_ns(size) for size in (1, 2, 4, 6, 8, 10)] == [10, 20, 40, 80, 120, 160]


def test_one_point_grows_in_proportion() -> None:
    model = LatencyModel({4: 40.0})
    assert [model.expect_ns(size) for size in (1, 4, 8)] == [40, 40, 80]


def test_the_margin_follows_the_worst_of_the_last_ten_within_its_bounds() -> None:
    model = LatencyModel({1: 1000.0})
    assert model.margin == 1.0
    model.observe(1, 1200)
    assert model.margin == pytest.approx(1.2)
    model.observe(1, 1_000_000)
    assert model.margin == pytest.approx(1.5)
    for _ in range(10):
        model.observe(1, model.expect_ns(1))
    assert model.margin == 1.0


def test_one_hiccup_does_not_count_in_full() -> None:
    model = LatencyModel({1: 1000.0})
    model.observe(1, 1_000_000_000)
    assert model.expect_ns(1) <= 2000


# A size may seem to take half as much again as a larger one; a batch between two powers of two then moves both.
UNEVEN = 1.75


@given(fixed_costs, sample_costs, disturbances)
@example(1.0, 0.03125, [(15, 4.0), (13, 4.0), (11, 5.0), (28, 0.25)])  # 1.6
@settings(max_examples=100, deadline=None)
def test_predictions_stay_positive_finite_and_nearly_monotone(fixed: float, each: float, history) -> None:
    truth = affine(fixed, each)
    model = LatencyModel(profile(truth))
    for size, factor in history:
        model.observe(size, int(truth(size) * factor))
        predictions = {samples: model.expect_ns(samples) for samples in range(1, 2 * LARGEST)}
        assert all(0 < prediction < 1 << 62 for prediction in predictions.values())
        assert all(predictions[smaller] <= UNEVEN * predictions[size] + 10 for smaller in range(1, size))
        assert all(predictions[size] <= UNEVEN * predictions[larger] + 10 for larger in range(size, 2 * LARGEST))


@given(fixed_costs, sample_costs, st.integers(1, LARGEST), st.integers(0, 1 << 32))
@settings(max_examples=50, deadline=None)
def test_without_a_profile_the_true_table_is_learned(fixed: float, each: float, first: int, seed: int) -> None:
    chance = random.Random(seed)
    truth = affine(fixed, each)
    model = LatencyModel()
    model.observe(first, int(20 * truth(first)))  # the first run pays for many things
    for _ in range(1500):
        size = chance.randint(1, LARGEST)
        model.observe(size, int(truth(size)))
    for size in range(1, LARGEST + 1):
        assert model.expect_ns(size) == pytest.approx(truth(size), rel=0.1)


@given(fixed_costs, sample_costs, st.integers(1, LARGEST), st.floats(0.2, 5.0), st.integers(1, LARGEST))
@settings(max_examples=100, deadline=None)
def test_a_single_size_that_keeps_coming_is_learned_whatever_it_is(
    fixed: float, each: float, first: int, factor: float, size: int
) -> None:
    truth = affine(fixed, each)
    model = LatencyModel()
    model.observe(first, int(truth(first) * factor))
    for _ in range(100):
        model.observe(size, int(truth(size)))
    assert model.expect_ns(size) == pytest.approx(truth(size), rel=0.02)
    assert model.margin <= 1.03


@given(fixed_costs, sample_costs, disturbances, st.floats(1.1, 10.0))
@settings(max_examples=100, deadline=None)
def test_after_any_disturbance_the_sizes_that_are_affordable_come_back(
    fixed: float, each: float, history, patience: float
) -> None:
    """Only sizes that a policy picks are seen, and it picks by the very predictions that were disturbed."""
    truth = affine(fixed, each)
    model = LatencyModel(profile(truth))
    budget = patience * truth(1)
    for size, factor in history:
        model.observe(size, int(truth(size) * factor))
    for _ in range(700):
        size = largest_within(budget, model.predict_ns)
        model.observe(size, int(truth(size)))
    picked = largest_within(budget, model.predict_ns)
    assert largest_within(0.9 * budget, truth) <= picked <= largest_within(1.1 * budget, truth)
    for size in range(1, picked + 1):
        assert truth(size) * 0.9 <= model.predict_ns(size) <= truth(size) * 1.12


@given(fixed_costs, sample_costs, st.floats(1.5, 10.0), st.floats(0.2, 5.0))
@settings(max_examples=50, deadline=None)
def test_a_device_that_changes_its_clock_is_followed_at_every_size(
    fixed: float, each: float, patience: float, clock: float
) -> None:
    truth = affine(fixed, each)
    model = LatencyModel(profile(truth))
    budget = patience * truth(1) * clock
    for _ in range(700):
        size = largest_within(budget, model.predict_ns)
        model.observe(size, int(truth(size) * clock))
    for size in range(1, LARGEST + 1):
        assert model.expect_ns(size) == pytest.approx(truth(size) * clock, rel=0.1)


@given(fixed_costs, sample_costs, st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_light_load_does_not_unlearn_large_batches(fixed: float, each: float, seen: int, asked: int) -> None:
    assume(seen != asked)
    truth = affine(fixed, each)
    model = LatencyModel(profile(truth))
    for _ in range(1000):
        model.observe(POWERS[seen], int(truth(POWERS[seen])))
    assert model.expect_ns(POWERS[asked]) == pytest.approx(truth(POWERS[asked]), rel=0.02)


def test_the_soonest_end_is_the_fastest_recent_one_and_a_little_less() -> None:
    model = LatencyModel({1: 1e6, 8: 8e6})
    assert model.soonest_ns(8) == 6_000_000, "of which nothing is known yet"
    for took_ns in (8e6, 7.2e6, 8e6):
        model.observe(8, int(took_ns))
    assert model.soonest_ns(8) == pytest.approx(0.95 * 0.9 * model.expect_ns(8), rel=0.03)


def test_a_size_between_powers_of_two_teaches_both_neighbours() -> None:
    model = LatencyModel({1: 1e6, 16: 16e6})
    for _ in range(50):
        model.observe(6, 12_000_000)
    assert model.expect_ns(6) == pytest.approx(12e6, rel=0.02)
    assert model.expect_ns(4) < model.expect_ns(6) < model.expect_ns(8)
    assert model.expect_ns(1) < 2.5e6, "sizes far away learn little"


@pytest.mark.parametrize("staging_ms", [0.1, 1, 4])
def test_what_comes_before_computing_is_learned_and_hidden_up_to_a_half(staging_ms: float) -> None:
    lane = Lane(0, "device", (1, 2, 16), LatencyModel({1: 2e6, 16: 1e7}), depth=2)
    assert lane.lead_ns(16) == 1.25 * MILLISECOND_NS + WAKING_NS, "of which nothing is known yet"
    for _ in range(60):
        lane.staging.observe(16, int(staging_ms * MILLISECOND_NS))
    assert lane.hidden_ns(9) == pytest.approx(staging_ms * MILLISECOND_NS, rel=0.02)
    assert lane.lead_ns(16) == pytest.approx(1.25 * staging_ms * MILLISECOND_NS + WAKING_NS, rel=0.02)
    assert lane.hidden_ns(1) <= lane.expect_ns(1) / 2
