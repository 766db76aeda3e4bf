"""The value iteration where the answer is known, and the policy against it."""

from __future__ import annotations

import pytest

from tests.simulation.optimum import SmallCase, best_share, small_workload
from tests.simulation.rules import feasible, run_rule, serve_all
from tests.simulation.virtual_policy import run_policy


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_where_only_one_fresh_request_can_be_served_the_best_is_a_renewal(chance: float) -> None:
    """Two slots of service, then a wait for the next request: 1 / (2 + (1 - p) / p) a slot."""
    assert best_share(SmallCase(fixed=1, within=2, chance=chance)) == pytest.approx(1 / (1 + chance), rel=0.005)


def test_no_rule_beats_the_best() -> None:
    for chance in (0.3, 0.6, 0.9):
        case = SmallCase(fixed=2, within=9, chance=chance)
        workload, best = small_workload(case, 40_000, seed=2), best_share(case)
        for rule in (serve_all, feasible):
            assert run_rule(rule(case.device), workload, case.device).good_share <= best + 0.01


@pytest.mark.parametrize(("fixed", "within"), [(1, 6), (2, 9), (2, 12), (3, 12)])
@pytest.mark.parametrize("chance", [0.4, 0.9])
def test_the_policy_comes_within_five_per_cent_of_the_best(fixed: int, within: int, chance: float) -> None:
    case = SmallCase(fixed, within, chance)
    reached = run_policy(small_workload(case, 20_000, seed=0), case.device).good_share / best_share(case)
    assert 0.95 <= reached <= 1.02, "more than the best would be a bug to explain"
