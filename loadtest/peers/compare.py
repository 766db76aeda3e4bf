"""From pairs to ratios. Pure.

A ratio is taken within a pair, whose two readings are seconds apart, and only then summarised: machines drift more
between rounds than servers differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from convoy.loadtest.peers.results import ClosedLoad, Pair, Reading, Setting


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of several values and how far they reach; `count` tells how many stand behind it."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """At least one value."""
        return Spread(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class PairRatio:
    """The median ratio of pairs; `low` and `high` are one-sided 95 % bounds of the true one.

    They are ratios of pairs themselves (sign test), so that nothing is assumed of how ratios are spread. Fewer than
    five pairs bear no bounds: then they are the lowest and the highest, and `has_bounds` is False.
    """

    median: float
    low: float
    high: float
    has_bounds: bool

    @staticmethod
    def of(ratios: Sequence[float]) -> PairRatio:
        """At least one."""
        ascending, rank = sorted(ratios), bound_rank(len(ratios))
        low, high = ascending[max(rank, 1) - 1], ascending[-max(rank, 1)]
        return PairRatio(statistics.median(ascending), low, high, rank > 0)

    @property
    def verdict(self) -> Literal["won", "lost", "open"]:
        if self.has_bounds and self.low > 1:
            return "won"
        return "lost" if self.has_bounds and self.high < 1 else "open"


def bound_rank(count: int) -> int:
    """Which of so many ascending values lies below the true median in 95 % of all cases, from 1; 0 where none does."""
    rank, below = 0, 0
    while 20 * (below := below + math.comb(count, rank)) <= 2**count:
        rank += 1
    return rank


@dataclass(frozen=True, slots=True)
class Figures:
    """One server under one load, over the rounds."""

    rps: Spread
    p50_ms: Spread
    p99_ms: Spread
    server_cpu_us: Spread
    generator_cpu_us: Spread
    failed: int

    @staticmethod
    def of(readings: Sequence[Reading]) -> Figures:
        """At least one reading."""

        def spread(value: Callable[[Reading], float]) -> Spread:
            return Spread.of([value(reading) for reading in readings])

        return Figures(
            rps=spread(lambda reading: reading.rps),
            p50_ms=spread(lambda reading: reading.p50_ms),
            p99_ms=spread(lambda reading: reading.p99_ms),
            server_cpu_us=spread(lambda reading: reading.server_cpu_us),
            generator_cpu_us=spread(lambda reading: reading.generator_cpu_us),
            failed=sum(reading.failed for reading in readings),
        )


@dataclass(frozen=True, slots=True)
class Match:
    """Convoy against one peer under one load. Ratios above 1 are in Convoy's favour.

    `rps_ratio` is Convoy's rate over the peer's, the other two are the peer's latency and CPU over Convoy's.
    """

    peer: str
    load: ClosedLoad
    setting: Setting
    theirs: Figures
    rps_ratio: PairRatio
    p50_ratio: PairRatio
    cpu_ratio: PairRatio
    pairs: int


def matches(pairs: Iterable[Pair]) -> list[Match]:
    """One match per peer and load, in the order in which they first appear by name."""
    groups: dict[tuple[ClosedLoad, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.load, pair.peer), []).append(pair)
    return [_match(group) for group in groups.values()]


def _match(pairs: Sequence[Pair]) -> Match:
    first = pairs[0]
    return Match(
        peer=first.peer,
        load=first.load,
        setting=first.setting,
        theirs=Figures.of([pair.theirs for pair in pairs]),
        rps_ratio=PairRatio.of([ratio(pair.ours.rps, pair.theirs.rps) for pair in pairs]),
        p50_ratio=PairRatio.of([ratio(pair.theirs.p50_ms, pair.ours.p50_ms) for pair in pairs]),
        cpu_ratio=PairRatio.of([ratio(pair.theirs.server_cpu_us, pair.ours.server_cpu_us) for pair in pairs]),
        pairs=len(pairs),
    )


def ratio(above: float, below: float) -> float:
    """Infinite where the other did nothing at all; 1 where neither did."""
    if below == 0:
        return 1.0 if above == 0 else float("inf")
    return above / below
