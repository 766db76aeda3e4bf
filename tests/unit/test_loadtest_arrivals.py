from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.arrivals import bursts_s, constant_s, poisson_s, schedule_of
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.units import NS_PER_S

rates = st.floats(0.1, 5000)
durations_s = st.floats(0.01, 10)
kinds = st.sampled_from(["poisson", "constant", "bursts"])


@given(kinds, rates, durations_s, st.integers(0, 1000))
def test_a_schedule_rises_and_lies_within_the_duration(arrivals, rate, duration_s, seed):
    options = LoadTestOptions(rate=rate, arrivals=arrivals, duration_s=duration_s, seed=seed)
    offsets_ns = schedule_of(options).offsets_ns
    assert (np.diff(offsets_ns) >= 0).all()
    assert ((offsets_ns >= 0) & (offsets_ns < duration_s * NS_PER_S)).all()


@given(rates, durations_s)
def test_constant_arrivals_are_evenly_spaced_and_all_there(rate, duration_s):
    due_s = constant_s(rate, duration_s)
    assert abs(len(due_s) - rate * duration_s) <= 1
    assert np.abs(np.diff(due_s) - 1 / rate).max(initial=0) <= 1e-6


def test_poisson_gaps_are_exponential():
    gaps_s = np.diff(poisson_s(1000.0, 60.0, 1))
    assert gaps_s.mean() == pytest.approx(1e-3, rel=0.03)
    assert gaps_s.std() == pytest.approx(1e-3, rel=0.03)  # mean and deviation are equal for no other schedule here
    assert np.quantile(gaps_s, 0.5) == pytest.approx(np.log(2) * 1e-3, rel=0.03)


def test_the_seed_makes_the_schedule():
    assert (poisson_s(100, 1, 7) == poisson_s(100, 1, 7)).all()
    assert len(poisson_s(100, 1, 7)) != len(poisson_s(100, 1, 8))


def test_one_seed_at_two_rates_is_one_pattern_at_two_paces():
    slow_s, fast_s = poisson_s(100, 10, 7), poisson_s(200, 5, 7)
    assert np.allclose(slow_s[:400], 2 * fast_s[:400])


@given(st.floats(0.1, 3), st.floats(0.1, 3), st.integers(0, 100))
def test_bursts_are_silent_between_and_keep_their_mean_over_whole_cycles(on_s, off_s, seed):
    cycles, rate = 5, 400.0
    due_s = bursts_s(rate, cycles * (on_s + off_s), on_s, off_s, seed)
    assert (due_s % (on_s + off_s) <= on_s + 1e-9).all()
    expected = rate * cycles * (on_s + off_s)
    assert abs(len(due_s) - expected) < 6 * np.sqrt(expected)


def test_a_ladder_gives_each_step_its_rate_and_its_time():
    schedule = schedule_of(LoadTestOptions(steps=(100, 400, 50), arrivals="constant", duration_s=2))
    assert [(step.rate, step.start_s, step.end_s) for step in schedule.steps] == [(100, 0, 2), (400, 2, 4), (50, 4, 6)]
    counts = [
        np.count_nonzero(
            (schedule.offsets_ns >= step.start_s * NS_PER_S) & (schedule.offsets_ns < step.end_s * NS_PER_S)
        )
        for step in schedule.steps
    ]
    assert counts == [200, 800, 100]


@given(st.integers(1, 8), st.integers(0, 50))
def test_processes_share_a_schedule_without_loss_and_each_has_the_whole_shape(count, seed):
    schedule = schedule_of(LoadTestOptions(rate=500, duration_s=1, seed=seed))
    shares = [schedule.share(index, count) for index in range(count)]
    assert np.sort(np.concatenate(shares)).tolist() == schedule.offsets_ns.tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
