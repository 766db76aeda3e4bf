"""The whole comparison: which scenarios, which figures of each, on every core."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from convoy.loadtest.simulation.convoy import run_policy
from convoy.loadtest.simulation.frontier import Difference, frontier, paired
from convoy.loadtest.simulation.rules import rules
from convoy.loadtest.simulation.run import SimulationResult, run_rule
from convoy.loadtest.simulation.workload import Arrivals, Scenario, VirtualDevice, draw, equal, zipf
from convoy.loadtest.study.kept import Kept

CONVOY = "convoy"
SEEDS = 10
# Offered load in units of what full batches could do.
OVERLOADS = (0.5, 0.75, 1.0, 1.5, 3.0)
_OVERLOAD_SEEDS = 1
_KAPPAS = (0.2, 1.0, 5.0, 20.0)


def scenarios() -> list[Scenario]:
    """One to four models, equal and uneven, tight and loose objectives, steady and not."""
    return [
        *(_scenario(kappa, objective) for objective in (3, 5, 10, 20, 50) for kappa in _KAPPAS),
        *(_scenario(kappa, objective, equal(2)) for objective in (5, 20) for kappa in _KAPPAS),
        *(_scenario(kappa, objective, zipf(3)) for objective in (5, 10) for kappa in (1.0, 5.0)),
        *(
            _scenario(kappa, objective, shares)
            for shares in (equal(4), zipf(4))
            for objective in (5, 20, 50)
            for kappa in (1.0, 5.0, 20.0)
        ),
        *(
            _scenario(kappa, objective, arrivals=arrivals)
            for arrivals in _UNSTEADY
            for objective in (5, 20)
            for kappa in (1.0, 20.0)
            # Bunches of Gamma arrivals that tight an objective never holds, at any load.
            if (arrivals, kappa, objective) != ("gamma4", 1.0, 5)
        ),
        *(_scenario(kappa, 20, zipf(4), arrivals) for arrivals in _UNSTEADY for kappa in (1.0, 20.0)),
        *(_scenario(kappa, objective, max_batch=32) for objective in (10, 20) for kappa in (1.0, 20.0)),
    ]


_UNSTEADY: tuple[Arrivals, ...] = ("gamma4", "bursts", "steps")


def _scenario(
    kappa: float,
    objective: float,
    shares: tuple[float, ...] = (1.0,),
    arrivals: Arrivals = "poisson",
    max_batch: int = 1024,
) -> Scenario:
    return Scenario(VirtualDevice(kappa, max_batch), objective, shares, arrivals)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one scenario. `frontiers` has one load per seed for each contender; `overload` is goodput,
    in the same unit, at each of OVERLOADS times the capacity."""

    scenario: Scenario
    frontiers: dict[str, list[float]]
    overload: dict[str, list[float]]

    def mean(self, contender: str) -> float:
        return statistics.fmean(self.frontiers[contender])

    @property
    def best_other(self) -> str:
        return max((name for name in self.frontiers if name != CONVOY), key=self.mean)

    @property
    def against_best(self) -> Difference:
        """Our frontier less that of the best of the others, as a share of the latter's mean."""
        theirs = self.frontiers[self.best_other]
        scale = max(1e-9, statistics.fmean(theirs))
        difference = paired(self.frontiers[CONVOY], theirs)
        return Difference(difference.mean / scale, difference.half_width / scale)

    @property
    def kept_in_overload(self) -> float:
        """Our goodput at the highest load, as a share of the highest at any."""
        return self.overload[CONVOY][-1] / max(self.overload[CONVOY])


@dataclass(frozen=True, slots=True)
class _SeedResult:
    frontiers: dict[str, float]
    overload: dict[str, list[float]]


def find(chosen: list[Scenario], seeds: int, kept: Kept) -> Iterator[Finding]:
    """The findings, in order, as they come; what is kept is not sought again."""
    known = {scenario: kept.figures(scenario) for scenario in chosen}
    # New processes: a fork of one that has threads may wait for ever for a thread that it does not have.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        sought = {
            scenario: [pool.submit(_one_seed, scenario, seed) for seed in range(seeds)]
            for scenario, figures in known.items()
            if figures is None
        }
        for scenario, figures in known.items():
            if figures is None:
                finding = _finding(scenario, [future.result() for future in sought[scenario]])
                kept.keep(scenario, {"frontiers": finding.frontiers, "overload": finding.overload})
                yield finding
            else:
                yield Finding(scenario, **figures)


def _finding(scenario: Scenario, results: list[_SeedResult]) -> Finding:
    frontiers = {name: [result.frontiers[name] for result in results] for name in results[0].frontiers}
    with_overload = [result for result in results if result.overload]
    overload = {
        name: [statistics.fmean(column) for column in zip(*(r.overload[name] for r in with_overload), strict=True)]
        for name in with_overload[0].overload
    }
    return Finding(scenario, frontiers, overload)


def contenders(scenario: Scenario) -> dict[str, Callable[[float, int], SimulationResult]]:
    """What plays one load on one seed, by name."""

    def player(make: Callable[[], object]) -> Callable[[float, int], SimulationResult]:
        return lambda rho, seed: run_rule(make(), draw(scenario, rho, seed), scenario.device)  # type: ignore[arg-type]

    others = {name: player(make) for name, make in rules(scenario).items()}
    return {**others, CONVOY: lambda rho, seed: run_policy(draw(scenario, rho, seed), scenario.device)}


def _one_seed(scenario: Scenario, seed: int) -> _SeedResult:
    found: dict[str, float] = {}
    overload: dict[str, list[float]] = {}
    for name, play in contenders(scenario).items():
        hint = max(found.values(), default=scenario.bound)
        found[name] = frontier(lambda rho, play=play: play(rho, seed).good_share, hint)  # type: ignore[misc]
        if seed < _OVERLOAD_SEEDS and name in (CONVOY, "serve all", "early drop:2"):
            loads = [factor * scenario.device.capacity for factor in OVERLOADS]
            overload[name] = [play(rho, seed).good * scenario.device.slope_ns / scenario.until_ns for rho in loads]
    return _SeedResult(found, overload)
