from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.statistics import Blocks
from convoy.loadtest.units import NS_PER_S

START_NS, END_NS = 7 * NS_PER_S, 17 * NS_PER_S


def evenly(count: int) -> np.ndarray:
    return np.linspace(START_NS, END_NS - 1, count).astype(np.int64)


def test_intervals_cover_the_truth_as_often_as_they_promise():
    covered = 0
    for seed in range(60):
        values = (np.random.default_rng(seed).exponential(1.0, 2000) * 1e6).astype(np.int64)
        (interval,) = Blocks(START_NS, END_NS).percentile_intervals(evenly(2000), values, [0.9])
        covered += interval.low <= -np.log(0.1) * 1e6 <= interval.high
    assert covered >= 0.88 * 60


def test_neighbours_that_are_alike_widen_the_interval():
    generator = np.random.default_rng(3)
    alike = np.repeat(generator.exponential(1e6, 100), 20).astype(np.int64)  # twenty requests in the same queue
    shuffled = generator.permutation(alike)
    blocks = Blocks(START_NS, END_NS)
    widths = []
    for values in (alike, shuffled):
        (interval,) = blocks.percentile_intervals(evenly(2000), values, [0.5])
        widths.append(interval.high - interval.low)
    assert widths[0] > 2 * widths[1]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300), st.floats(0, 1))
def test_ends_of_an_interval_are_latencies_that_were_there_in_order(values, share):
    (interval,) = Blocks(START_NS, END_NS).percentile_intervals(evenly(len(values)), np.array(values), [share])
    assert min(values) <= interval.low <= interval.high <= max(values)


@given(st.lists(st.integers(0, 9), max_size=300))
def test_shares_lie_between_none_and_all(seconds):
    times_ns = np.array(seconds, dtype=np.int64) * NS_PER_S + START_NS
    interval = Blocks(START_NS, END_NS).share_interval(times_ns[::2], times_ns)
    assert (interval is None) == (not seconds)
    if interval is not None:
        assert 0 <= interval.low <= interval.high <= 1


def test_too_short_a_run_has_no_intervals():
    blocks = Blocks(START_NS, START_NS + NS_PER_S // 2)
    assert blocks.rate_interval(evenly(10)) is None
    assert blocks.share_interval(evenly(10), evenly(10)) is None
    assert blocks.percentile_intervals(evenly(10), evenly(10), [0.5]) == [None]
