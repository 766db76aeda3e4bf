"""Whether a run may be believed, in plain words.

Pure. A load generator that is itself late reports its own slowness as the server's; so its lateness is
audited and a run in which it was late is void, however good the figures look.

The rule: the 99th percentile of (taken up - due) may be at most 5 % of the objective, or of the median
latency where there is no objective, and in any case 1 ms. 5 %, because a figure that is told in two digits
must not have its second digit from the generator; 1 ms, because that is what an ordinary kernel on a shared
machine can promise. Lateness only ever adds to latency, which counts from when the request was due: a late
generator can make a server look slower than it is, never faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from convoy.loadtest.statistics import Summary, nearest_rank
from convoy.loadtest.units import NS_PER_MS

LATENESS_FLOOR_MS = 1.0
LATENESS_SHARE = 0.05  # of the objective, or of the median latency where there is no objective
BUSY_SHARE = 0.9  # of one core; each generator is one thread
CROWDED_SHARE = 0.6  # less than this, and its own work is not what made it late


@dataclass(frozen=True, slots=True)
class Lateness:
    """How long after they were due requests were taken up, and how late the 99th percentile may be."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    limit_ms: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`void` says why the figures mean nothing (None: they mean something). `notes` qualify them.

    `lateness` is None for a closed loop, where nothing is due before the last answer: nothing to be late for.
    """

    void: str | None
    notes: tuple[str, ...]
    lateness: Lateness | None


def lateness_limit_ms(slo_ms: float | None, median_ms: float | None) -> float:
    """How late the generator may be, at p99, before its own delay colours the result."""
    reference_ms = slo_ms if slo_ms is not None else median_ms
    return max(LATENESS_FLOOR_MS, LATENESS_SHARE * (reference_ms or 0.0))


def judge(
    summary: Summary,
    *,
    rate: float | None,
    slo_ms: float | None,
    generator_cpu_share: float,
    waited: int,
    deaths: Sequence[str] = (),
) -> Verdict:
    """`rate` is None for a closed loop.

    `generator_cpu_share` is the busiest generator's CPU time per second of the run; `waited` counts the
    requests that found every allowed connection busy; `deaths` says which generators died, and how.
    """
    notes = _notes(summary, rate, generator_cpu_share, waited)
    lateness = _lateness(summary, slo_ms) if rate is not None and len(summary.lateness_ns) else None
    return Verdict(_void(summary, rate, lateness, generator_cpu_share, deaths), notes, lateness)


def _void(
    summary: Summary, rate: float | None, lateness: Lateness | None, cpu_share: float, deaths: Sequence[str]
) -> str | None:
    if deaths:
        return f"{'; '.join(deaths)}; the load was not what it should have been"
    if summary.offered == 0:
        return "nothing was measured; choose a longer --duration"
    if lateness is None or lateness.p99_ms <= lateness.limit_ms:
        return None
    return (
        f"the load generator could not keep the schedule of {rate:g} requests/s: 1 in 100 was sent "
        f"{lateness.p99_ms:.1f} ms or more too late (limit {lateness.limit_ms:.1f} ms); {_remedy(cpu_share)}"
    )


def _lateness(summary: Summary, slo_ms: float | None) -> Lateness:
    ascending = np.sort(summary.lateness_ns)
    return Lateness(
        p50_ms=nearest_rank(ascending, Fraction(1, 2)) / NS_PER_MS,
        p99_ms=nearest_rank(ascending, Fraction(99, 100)) / NS_PER_MS,
        max_ms=int(ascending[-1]) / NS_PER_MS,
        limit_ms=lateness_limit_ms(slo_ms, summary.median_ms),
    )


def _remedy(cpu_share: float) -> str:
    if cpu_share > CROWDED_SHARE:
        return f"its busiest process used {100 * cpu_share:.0f} % of a core: lower --rate, or raise --processes"
    return (
        f"its busiest process used only {100 * cpu_share:.0f} % of a core, so others kept it from running: "
        "give it a core of its own, or run it on another machine"
    )


def _notes(summary: Summary, rate: float | None, cpu_share: float, waited: int) -> tuple[str, ...]:
    notes = []
    if rate is None and cpu_share > BUSY_SHARE:
        notes.append(
            f"the load generator used {100 * cpu_share:.0f} % of a core: the server may be faster than these "
            "figures; raise --processes"
        )
    if waited and rate is not None:
        notes.append(
            f"{waited} requests found all connections busy and waited; their latency counts from when they were due"
        )
    if summary.failed_in_warm_up:
        notes.append(f"{summary.failed_in_warm_up} requests failed during the warm-up and are not counted")
    if summary.unfinished:
        notes.append(f"{summary.unfinished} requests were still unanswered when the run was stopped; not counted")
    if summary.offered and not summary.good:
        notes.append("not one request was answered well")
    return tuple(notes)
