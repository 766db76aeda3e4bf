"""What is measured in which order, and which setting is a peer's best.

Pure: a seeded generator of random numbers is all that it knows of chance.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from convoy.loadtest.peers.results import BodyKind, ClosedLoad, Setting, SweepTrial

_CONNECTIONS: dict[BodyKind, tuple[int, ...]] = {
    "binary": (1, 16, 64),
    "json": (16,),
    "grpc": (1, 16),
    "ids": (1, 16, 64),
    "ids150k": (1, 16),
    "png": (1, 16, 64),
    "jpeg340": (16, 64),
    "jpeg500": (16, 64),
}
LOADS = tuple(ClosedLoad(body, connections) for body, several in _CONNECTIONS.items() for connections in several)


@dataclass(frozen=True, slots=True)
class Duel:
    """Pairs to be measured on one start of both, the first of them in `round`.

    Whose turn is first in each of them is decided by lot, so that a drift helps nobody.
    """

    round: int
    peer: str
    load: ClosedLoad
    ours_first: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Tryout:
    """One start of a peer with one setting, and the loads to try on it."""

    peer: str
    setting: Setting
    loads: tuple[ClosedLoad, ...]


def duels(contenders: Sequence[tuple[str, ClosedLoad]], rounds: int, rounds_per_start: int, seed: int) -> list[Duel]:
    """Every contender's pairs, so many a start; all have had as many starts before one has another."""
    lots = random.Random(seed)
    planned = []
    for first in range(0, rounds, rounds_per_start):
        count = min(rounds_per_start, rounds - first)
        planned += [
            Duel(first, peer, load, tuple(lots.random() < 0.5 for _ in range(count)))
            for peer, load in lots.sample(contenders, len(contenders))
        ]
    return planned


def tryouts(starts: Sequence[Tryout], rounds: int, seed: int) -> list[Tryout]:
    """Every start once a round, in random order; the loads of one start in random order, too."""
    lots = random.Random(seed)
    return [
        replace(start, loads=tuple(lots.sample(start.loads, len(start.loads))))
        for _ in range(rounds)
        for start in lots.sample(starts, len(starts))
    ]


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
