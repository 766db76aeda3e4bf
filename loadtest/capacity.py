"""The search for the highest rate that a server sustains: the next rate to try, and the result. Pure.

A rate is sustained if at least 99 % of its requests succeeded within the objective; refused and late requests did not.
The rate doubles or halves until one is sustained and one is not, then the bracket is halved until it is narrow. A rate
at which the generator was late is tried once more, because other programs may be the reason. If the next rate fails in
the same way, the search ends, because such probes do not measure the server. Each probe is a Poisson open loop with the
same seed, so that two rates differ only in speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

SHARE = 0.99
NARROW = 0.05  # of the lower end; runs of some seconds cannot tell closer rates apart
MOST_PROBES = 20
TRIES = 2  # of a rate at which the generator was late
MOST_VOID = 4  # probes in a row
LEAST_REQUESTS = 200  # in one probe; among fewer, one slow response decides

Ending = Literal["bracketed", "too slow", "not reached", "generator", "too noisy", "dead"]


@dataclass(frozen=True, slots=True)
class CapacityProbe:
    """One rate that was tried. `goodput` is None if nothing was measured. `void`: the generator was late or failed.

    `reason` says why it is void, or is the most frequent error; None if nothing failed.
    """

    rate: float
    goodput: float | None
    void: bool
    answered: int
    reason: str | None = None

    @property
    def sustained(self) -> bool:
        return not self.void and self.goodput is not None and self.goodput >= SHARE


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates below `least` have too few requests, rates above `most` have too many."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """`sustained` and `failed` are the ends of the bracket; None if no such rate was found.

    `ending` says why the search ended: "bracketed" is success; "too slow" - the lowest rate was not sustained; "not
    reached" - the highest rate was sustained; "generator" - the upper end is the limit of the generator, or four probes
    in a row were void; "too noisy" - too many probes; "dead" - no request of a probe succeeded.
    """

    probes: tuple[CapacityProbe, ...]
    sustained: float | None
    failed: float | None
    ending: Ending

    @property
    def width(self) -> float | None:
        """The width of the bracket in requests/s."""
        return None if self.sustained is None or self.failed is None else self.failed - self.sustained


def next_rate(probes: Sequence[CapacityProbe], first: float, limits: Limits) -> float | None:
    """The next rate to try; None if the search is over."""
    if not probes:
        return min(max(first, limits.least), limits.most)
    if len(probes) >= MOST_PROBES or not probes[-1].answered:
        return None
    last = probes[-1]
    if void_in_a_row(probes) >= MOST_VOID:
        return None
    if last.void and [probe.rate for probe in probes].count(last.rate) < TRIES:
        return last.rate
    low, high = _bracket(probes)
    if high is None:
        assert low is not None
        return None if low >= limits.most else min(2 * low, limits.most)
    if low is None:
        return None if high <= limits.least else max(high / 2, limits.least)
    return None if high - low <= NARROW * low else (low + high) / 2


def void_in_a_row(probes: Sequence[CapacityProbe]) -> int:
    """The number of void probes at the end."""
    return len(list(takewhile(lambda probe: probe.void, reversed(probes))))


def conclude(probes: Sequence[CapacityProbe]) -> Capacity:
    """The result of a search that ended or was stopped."""
    low, high = _bracket(probes)
    return Capacity(tuple(probes), low, high, _ending(probes, low, high))


def _bracket(probes: Sequence[CapacityProbe]) -> tuple[float | None, float | None]:
    decided = {probe.rate: probe for probe in probes}.values()  # of each rate, the last try
    high = min((probe.rate for probe in decided if not probe.sustained), default=None)
    low = max((p.rate for p in decided if p.sustained and (high is None or p.rate < high)), default=None)
    return low, high


def _ending(probes: Sequence[CapacityProbe], low: float | None, high: float | None) -> Ending:
    if probes and not probes[-1].answered:
        return "dead"
    if [probe.void for probe in probes if probe.rate == high][-1:] == [True]:
        return "generator"
    if high is None:
        return "not reached"
    if low is None:
        return "too slow"
    return "bracketed" if high - low <= NARROW * low else "too noisy"
