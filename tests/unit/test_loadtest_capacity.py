"""The search against servers that are a formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.capacity import MOST_PROBES, NARROW, Capacity, CapacityProbe, Limits, conclude, next_rate

LIMITS = Limits(least=10, most=100_000)


def search(answer: Callable[[float], CapacityProbe], first: float) -> Capacity:
    probes: list[CapacityProbe] = []
    while (rate := next_rate(probes, first, LIMITS)) is not None:
        probes.append(answer(rate))
    return conclude(probes)


def sustains(limit: float) -> Callable[[float], CapacityProbe]:
    return lambda rate: CapacityProbe(rate, 1.0 if rate <= limit else 0.5, False, 100)


@given(st.floats(10, 99_000), st.floats(0, 200_000))
def test_the_bracket_holds_the_limit_and_is_narrow(limit, first):
    found = search(sustains(limit), first)
    assert found.ending == "bracketed"
    assert found.sustained <= limit < found.failed
    assert found.width <= NARROW * found.sustained
    assert len(found.probes) <= MOST_PROBES


def test_the_bracket_comes_before_the_bisection():
    rates = [probe.rate for probe in search(sustains(1000), 300).probes]
    assert rates[:5] == [300, 600, 1200, 900, 1050]


def test_a_server_that_sustains_nothing_is_said_to():
    found = search(sustains(1), 5000)
    assert (found.ending, found.sustained, found.failed) == ("too slow", None, LIMITS.least)


def test_a_server_that_sustains_everything_is_said_to():
    found = search(sustains(1e9), 5000)
    assert (found.ending, found.sustained, found.failed) == ("not reached", LIMITS.most, None)


def test_a_rate_at_which_the_generator_was_late_once_is_tried_again():
    tried: list[float] = []

    def answer(rate: float) -> CapacityProbe:
        tried.append(rate)
        return CapacityProbe(rate, 1.0 if rate <= 1000 else 0.5, tried.count(rate) == 1 and rate > 900, 100)

    found = search(answer, 900)
    assert found.ending == "bracketed"
    assert found.sustained <= 1000 < found.failed
    assert tried[:4] == [900, 1800, 1800, 1350]


def test_where_everything_is_void_the_search_stops_soon_and_says_why():
    found = search(lambda rate: CapacityProbe(rate, 1.0, True, 100, f"late at {rate:g}"), 1000)
    assert [probe.rate for probe in found.probes] == [1000, 1000, 500, 500]
    assert (found.ending, found.sustained) == ("generator", None)
    assert found.probes[-1].reason == "late at 500"


@pytest.mark.parametrize(("goodput", "sustained"), [(0.99, True), (0.9899, False), (None, False)])
def test_sustained_is_99_percent(goodput, sustained):
    assert CapacityProbe(1, goodput, False, 1).sustained is sustained
    assert not CapacityProbe(1, goodput, True, 1).sustained
