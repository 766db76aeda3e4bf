"""The search for the frontier, on curves that are known."""

from __future__ import annotations

import pytest

from tests.simulation.frontier import frontier


@pytest.mark.parametrize("edge", [0.0123, 0.3, 0.77, 1.19])
@pytest.mark.parametrize("hint", [0.0, 0.01, 0.5, 2.0])
def test_the_edge_is_found_from_wherever_the_search_begins(edge: float, hint: float) -> None:
    assert edge / 1.01 <= frontier(lambda rho: 1.0 if rho <= edge else 0.98, hint) <= edge


def test_what_misses_at_every_load_has_no_frontier_and_what_never_does_the_highest() -> None:
    assert frontier(lambda rho: 0.5, 0.5) == 0.0
    assert frontier(lambda rho: 1.0, 0.5) == 1.2
