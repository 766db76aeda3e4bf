"""How many replicas there should be, in virtual time: a load that rises and falls."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.ray.autoscaling import REQUESTS_PER_S, UTILISATION, WAITING_S, ByUtilisation, demand_of, replicas_for

TARGET = 0.7


def context(loads: list[float], waiting_s: float = 0.0, rate: float = 100.0, least: int = 1, most: int = 10) -> object:
    """What Ray tells the policy of replicas that have told so much of themselves."""
    return SimpleNamespace(
        aggregated_metrics={
            UTILISATION: dict(enumerate(loads)),
            WAITING_S: dict.fromkeys(range(len(loads)), waiting_s),
            REQUESTS_PER_S: dict.fromkeys(range(len(loads)), rate),
        },
        target_num_replicas=len(loads),
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
    )


def decided(*given: object, **more: object) -> int:
    return ByUtilisation(TARGET)(context(*given, **more))[0]  # type: ignore[arg-type]


def test_one_that_is_overrun_gets_help_and_what_waits_counts() -> None:
    assert decided([0.5]) == 1
    assert decided([1.0]) == 2
    assert decided([1.0], 3.0) == 6


def test_nobody_is_sent_away_where_the_rest_would_be_near_the_target() -> None:
    assert decided([0.35, 0.34]) == 2  # one could do it, barely
    assert decided([0.25, 0.25]) == 1


def test_the_bounds_hold_and_who_is_asked_nothing_needs_no_replica() -> None:
    assert decided([1.0] * 4, 9.0, most=5) == 5
    assert decided([0.02, 0.02], rate=0.0, least=0) == 0
    assert decided([0.02, 0.02], rate=0.0, least=1) == 1
    assert decided([0.02], rate=1.0, least=0) == 1


def test_replicas_that_have_told_nothing_yet_change_nothing() -> None:
    silent = SimpleNamespace(
        aggregated_metrics={}, target_num_replicas=3, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=9
    )
    assert ByUtilisation(TARGET)(silent)[0] == 3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 20))
def test_a_number_once_reached_is_kept(loads: list[float], now: int) -> None:
    """With the same demand a second look wants what the first one wanted, and enough of it."""
    demand = demand_of(loads, [])
    first = replicas_for(demand, now, TARGET)
    assert replicas_for(demand, first, TARGET) == first
    assert first * TARGET >= demand - 1e-6


@pytest.mark.parametrize("peak", [0.5, 2.4, 6.0])
def test_a_load_that_rises_and_falls_is_followed_without_swinging(peak: float) -> None:
    """Ten minutes of virtual time, a decision a second, a replica a decision later."""
    now, path = 1, [1]
    for second in range(600):
        share = min(second, 600 - second) / 300  # up, and down again
        demand = peak * share
        each = min(1.0, demand / now)
        now = decided([each] * now, max(0.0, demand / now - 1.0))
        path.append(now)
    changes = [after - before for before, after in pairwise(path) if after != before]
    rises = [change for change in changes if change > 0]
    assert changes == rises + [change for change in changes if change < 0], "it goes up, then down, and does not swing"
    # What waits is worked off in the meantime; more than one beyond the need is not asked for.
    assert peak / TARGET <= max(path) <= peak / TARGET + 2
    assert path[-1] == 1
