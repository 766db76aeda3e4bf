"""How close the policy comes to the optimum where the optimum can be computed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from convoy.loadtest.simulation.convoy import run_policy
from convoy.loadtest.study.optimum import SmallCase, best_share, small_workload

_SLOTS = 20_000


@dataclass(frozen=True, slots=True)
class SmallFinding:
    """The shares in time that are possible and that the policy reached, the mean of several runs."""

    case: SmallCase
    best: float
    ours: float

    @property
    def reached(self) -> float:
        return self.ours / self.best


def small_cases() -> list[SmallCase]:
    """Objectives from three times a single request's time, small and large fixed costs, any load."""
    shapes = ((1, 6), (1, 10), (2, 9), (2, 12), (3, 12), (3, 15), (4, 15))
    return [SmallCase(fixed, within, chance) for fixed, within in shapes for chance in (0.1, 0.3, 0.5, 0.7, 0.9)]


def find_small(case: SmallCase, seeds: int) -> SmallFinding:
    shares = [run_policy(small_workload(case, _SLOTS, seed), case.device).good_share for seed in range(seeds)]
    return SmallFinding(case, best_share(case), statistics.fmean(shares))
