"""Which of several servers that batch is expected to be done first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.scheduling.routing import BatchSpeed, expected_finish_s, ranked

FAST, SLOW = BatchSpeed(0.004, 0.0005, 32), BatchSpeed(0.008, 0.001, 32)
SPEEDS = st.builds(
    BatchSpeed, st.floats(0, 0.1, allow_nan=False), st.floats(1e-5, 0.1, allow_nan=False), st.integers(1, 64)
)


@pytest.mark.parametrize(("outstanding", "finish_s"), [(0, 0.0045), (31, 0.02), (32, 0.0245), (70, 0.0475)])
def test_one_more_is_done_with_the_last_of_as_few_batches_as_they_fit_into(outstanding: int, finish_s: float) -> None:
    assert expected_finish_s(outstanding, FAST) == pytest.approx(finish_s)


def test_one_half_as_fast_gets_half_as_many() -> None:
    assert ranked([16, 16], [SLOW, FAST]) == [1, 0]
    assert ranked([6, 15], [SLOW, FAST]) == [1, 0]
    assert ranked([4, 31], [SLOW, FAST]) == [0, 1]


@given(SPEEDS, st.integers(0, 500))
def test_one_more_before_it_is_never_sooner(speed: BatchSpeed, outstanding: int) -> None:
    assert expected_finish_s(outstanding + 1, speed) >= expected_finish_s(outstanding, speed) - 1e-12


@given(st.lists(st.tuples(SPEEDS, st.integers(0, 200)), min_size=1, max_size=6))
def test_the_first_is_where_it_is_done_first_and_so_on(servers: list[tuple[BatchSpeed, int]]) -> None:
    order = ranked([count for _, count in servers], [speed for speed, _ in servers])
    finish_s = [expected_finish_s(count, speed) for speed, count in servers]
    assert [finish_s[index] for index in order] == sorted(finish_s)


def test_one_that_has_not_told_how_fast_it_is_is_thought_to_be_like_the_others() -> None:
    assert ranked([5, 4, 6], [SLOW, None, SLOW]) == [1, 0, 2]
    assert ranked([0, 3, 0], [FAST, None, FAST])[2] == 1
    assert ranked([3, 0, 2], [None, None, None]) == [1, 2, 0]
