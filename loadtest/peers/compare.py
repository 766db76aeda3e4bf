"""From pairs to ratios. Pure.

A ratio is taken within a pair, whose two readings are seconds apart, and only then summarised: machines drift more
between rounds than servers differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
    ours: Figures
    rps_ratio: Spread
    p50_ratio: Spread
    cpu_ratio: Spread


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
        ours=Figures.of([pair.ours for pair in pairs]),
        rps_ratio=Spread.of([ratio(pair.ours.rps, pair.theirs.rps) for pair in pairs]),
        p50_ratio=Spread.of([ratio(pair.theirs.p50_ms, pair.ours.p50_ms) for pair in pairs]),
        cpu_ratio=Spread.of([ratio(pair.theirs.server_cpu_us, pair.ours.server_cpu_us) for pair in pairs]),
    )


def ratio(above: float, below: float) -> float:
    """Infinite where the other did nothing at all; 1 where neither did."""
    if below == 0:
        return 1.0 if above == 0 else float("inf")
    return above / below
