"""Whether a run may be believed, in plain words.

Pure. A load generator that is itself late reports its own slowness as the server's; so its lateness is
audited and a run in which it was late is void, however good the figures look.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from loadtest.statistics import NS_PER_MS, Summary, nearest_rank

LATENESS_FLOOR_MS = 1.0
LATENESS_SHARE = 0.05  # of the objective, or of the median latency where there is no objective
BUSY_SHARE = 0.9  # of one core; the generator is one thread
CROWDED_SHARE = 0.6  # less than this, and its own work is not what made it late


@dataclass(frozen=True, slots=True)
class Verdict:
    """`void` says why the figures mean nothing (None: they mean something). `notes` qualify them."""

    void: str | None
    notes: tuple[str, ...]
    lateness_p99_ms: float | None
    lateness_limit_ms: float | None


def lateness_limit_ms(slo_ms: float | None, median_ms: float | None) -> float:
    """How late the generator may be, at p99, before its own delay colours the result."""
    reference_ms = slo_ms if slo_ms is not None else median_ms
    return max(LATENESS_FLOOR_MS, LATENESS_SHARE * (reference_ms or 0.0))


def judge(
    summary: Summary, *, rate: float | None, slo_ms: float | None, generator_cpu_share: float, waited: int
) -> Verdict:
    """`rate` is None for a closed loop, where nothing is due before the last answer: nothing to be late for.

    `generator_cpu_share` is the generator's CPU time per second of the run; `waited` counts the requests
    that found every allowed connection busy.
    """
    notes = _notes(summary, rate, generator_cpu_share, waited)
    if summary.offered == 0:
        return Verdict("nothing was measured; choose a longer --duration", notes, None, None)
    if rate is None:
        return Verdict(None, notes, None, None)
    p99_ms = nearest_rank(np.sort(summary.lateness_ns), Fraction(99, 100)) / NS_PER_MS
    limit_ms = lateness_limit_ms(slo_ms, summary.median_ms)
    if p99_ms <= limit_ms:
        return Verdict(None, notes, p99_ms, limit_ms)
    words = (
        f"the load generator could not keep the schedule of {rate:g} requests/s: 1 in 100 was sent "
        f"{p99_ms:.1f} ms or more too late (limit {limit_ms:.1f} ms); {_remedy(generator_cpu_share)}"
    )
    return Verdict(words, notes, p99_ms, limit_ms)


def _remedy(cpu_share: float) -> str:
    if cpu_share > CROWDED_SHARE:
        return f"it used {100 * cpu_share:.0f} % of a core, so lower --rate"
    return (
        f"it used only {100 * cpu_share:.0f} % of a core, so others kept it from running: "
        "give it a core of its own, or run it on another machine"
    )


def _notes(summary: Summary, rate: float | None, cpu_share: float, waited: int) -> tuple[str, ...]:
    notes = []
    if rate is None and cpu_share > BUSY_SHARE:
        notes.append(
            f"the load generator used {100 * cpu_share:.0f} % of a core: the server may be faster than these figures"
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
