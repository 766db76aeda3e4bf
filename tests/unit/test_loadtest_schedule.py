from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.schedule import NS_PER_S, arrival_offsets_ns, constant_offsets_ns, poisson_offsets_ns

rates = st.floats(0.1, 5000)
durations_s = st.floats(0.01, 10)


@given(st.sampled_from(["poisson", "constant"]), rates, durations_s, st.integers(0, 1000))
def test_a_schedule_rises_and_lies_within_the_duration(arrivals, rate, duration_s, seed):
    offsets_ns = arrival_offsets_ns(arrivals, rate, duration_s, seed)
    assert (np.diff(offsets_ns) >= 0).all()
    assert ((offsets_ns >= 0) & (offsets_ns < duration_s * NS_PER_S)).all()


@given(rates, durations_s)
def test_constant_arrivals_are_evenly_spaced_and_all_there(rate, duration_s):
    offsets_ns = constant_offsets_ns(rate, duration_s)
    assert abs(len(offsets_ns) - rate * duration_s) <= 1
    assert np.abs(np.diff(offsets_ns) - NS_PER_S / rate).max(initial=0) <= 1_000


@given(st.integers(0, 50))
def test_poisson_counts_are_those_of_a_poisson_process(seed):
    count = len(poisson_offsets_ns(1000.0, 10.0, seed))
    assert abs(count - 10_000) < 6 * 100  # six standard deviations


def test_poisson_gaps_are_exponential():
    gaps_s = np.diff(poisson_offsets_ns(1000.0, 60.0, 1)) / NS_PER_S
    assert gaps_s.mean() == pytest.approx(1e-3, rel=0.03)
    assert gaps_s.std() == pytest.approx(1e-3, rel=0.03)  # mean and deviation are equal for no other schedule here
    assert np.quantile(gaps_s, 0.5) == pytest.approx(np.log(2) * 1e-3, rel=0.03)


def test_the_seed_makes_the_schedule():
    assert (poisson_offsets_ns(100, 1, 7) == poisson_offsets_ns(100, 1, 7)).all()
    assert len(poisson_offsets_ns(100, 1, 7)) != len(poisson_offsets_ns(100, 1, 8))
