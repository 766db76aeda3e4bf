"""What is measured in which order, and which setting is a peer's best.

Pure: a seeded generator of random numbers is all that it knows of chance.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from convoy.loadtest.peers.results import ClosedLoad, Setting, SweepTrial

LOADS = (ClosedLoad("binary", 1), ClosedLoad("binary", 16), ClosedLoad("binary", 64), ClosedLoad("json", 16))


@dataclass(frozen=True, slots=True)
class Duel:
    """A pair to be measured; whose turn is first is decided by lot, so that a drift helps nobody."""

    round: int
    peer: str
    load: ClosedLoad
    ours_first: bool


@dataclass(frozen=True, slots=True)
class Tryout:
    """One start of a peer with one setting, and the loads to try on it."""

    peer: str
    setting: Setting
    loads: tuple[ClosedLoad, ...]


def duels(contenders: Sequence[tuple[str, ClosedLoad]], rounds: int, seed: int) -> list[Duel]:
    """Every contender once a round, each round in an order of its own."""
    lots = random.Random(seed)
    planned = []
    for turn in range(rounds):
        order = list(contenders)
        lots.shuffle(order)
        planned += [Duel(turn, peer, load, lots.random() < 0.5) for peer, load in order]
    return planned


def tryouts(
    settings: Sequence[tuple[str, Setting]], loads: dict[str, tuple[ClosedLoad, ...]], rounds: int, seed: int
) -> list[Tryout]:
    """Every setting once a round, in random order; the loads of one start in random order, too."""
    lots = random.Random(seed)
    planned = []
    for _ in range(rounds):
        order = list(settings)
        lots.shuffle(order)
        planned += [Tryout(peer, setting, tuple(lots.sample(loads[peer], len(loads[peer])))) for peer, setting in order]
    return planned


def best_setting(trials: Iterable[SweepTrial], peer: str, load: ClosedLoad) -> Setting | None:
    """The setting that served this load best, in the median over its trials; None where none served it.

    Best is the lowest median latency for one connection, because nothing else is at stake there, and the highest
    rate for several. A setting under which any request failed is out.
    """
    by_setting: dict[Setting, list[SweepTrial]] = {}
    for trial in trials:
        if trial.peer == peer and trial.load == load:
            by_setting.setdefault(trial.setting, []).append(trial)
    sound = {setting: tried for setting, tried in by_setting.items() if not any(one.reading.failed for one in tried)}
    if not sound:
        return None
    if load.connections == 1:
        return min(sound, key=lambda setting: statistics.median(one.reading.p50_ms for one in sound[setting]))
    return max(sound, key=lambda setting: statistics.median(one.reading.rps for one in sound[setting]))
