"""The search for the frontier and the statistics of its differences, on curves that are known."""

from __future__ import annotations

import pytest

from convoy.loadtest.simulation.frontier import frontier, paired


@pytest.mark.parametrize("edge", [0.0123, 0.3, 0.77, 1.19])
@pytest.mark.parametrize("hint", [0.0, 0.01, 0.5, 2.0])
def test_the_edge_is_found_from_wherever_the_search_begins(edge: float, hint: float) -> None:
    assert edge / 1.01 <= frontier(lambda rho: 1.0 if rho <= edge else 0.98, hint) <= edge


def test_what_misses_at_every_load_has_no_frontier_and_what_never_does_the_highest() -> None:
    assert frontier(lambda rho: 0.5, 0.5) == 0.0
    assert frontier(lambda rho: 1.0, 0.5) == 1.2


def test_a_difference_is_told_from_noise_and_noise_from_a_difference() -> None:
    assert paired([1.1, 2.1, 3.1, 4.2], [1.0, 2.0, 3.0, 4.0]).is_better
    assert paired([1.0, 2.0, 3.0, 4.0], [1.1, 2.1, 3.1, 4.2]).is_worse
    noise = paired([1.0, 2.0, 3.0, 4.0], [1.3, 1.7, 3.2, 3.8])
    assert not noise.is_better
    assert not noise.is_worse


def test_the_interval_is_that_of_student() -> None:
    difference = paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert (difference.mean, difference.half_width) == (2.0, pytest.approx(4.30 / 3**0.5, rel=1e-3))
