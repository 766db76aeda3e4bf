"""Servers that batch behind one who routes: what each rule costs where one of them is half as fast."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.scheduling.routing import BatchSpeed, expected_finish_s, ranked
from tests.simulation.routes import Route, by_expected_finish, least_outstanding, share_late

FAST, SLOW = BatchSpeed(0.004, 0.0005, 32), BatchSpeed(0.008, 0.001, 32)
EQUAL, UNEQUAL = [FAST] * 4, [SLOW, *[FAST] * 3]
SPEEDS = st.builds(
    BatchSpeed, st.floats(0, 0.1, allow_nan=False), st.floats(1e-5, 0.1, allow_nan=False), st.integers(1, 64)
)


def late_percent(speeds: list[BatchSpeed], route: Route, report_every_s: float = 0.0) -> float:
    """Of 40,000 requests at nine tenths of what four servers can do, with 50 ms each."""
    return 100 * share_late(
        speeds, route, load=0.9, deadline_s=0.05, requests=40_000, seed=1, report_every_s=report_every_s
    )


@pytest.mark.parametrize("route", [least_outstanding, by_expected_finish(EQUAL)])
def test_where_all_are_equal_any_rule_is_in_time(route: Route) -> None:
    assert late_percent(EQUAL, route) < 0.1


@pytest.mark.parametrize(
    ("route", "least", "most"),
    [
        pytest.param(least_outstanding, 8, 12, id="least outstanding"),
        pytest.param(by_expected_finish(UNEQUAL), 0, 0.05, id="least expected finish"),
    ],
)
def test_where_one_is_half_as_fast_only_the_expected_finish_is_in_time(route: Route, least: float, most: float) -> None:
    assert least <= late_percent(UNEQUAL, route) <= most


@pytest.mark.parametrize("speeds", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_queues_as_they_were_a_tenth_of_a_second_ago_are_worse_than_chance(speeds: list[BatchSpeed]) -> None:
    assert late_percent(speeds, least_outstanding, report_every_s=0.1) > 75
    assert late_percent(speeds, by_expected_finish(speeds), report_every_s=0.1) > 75


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
