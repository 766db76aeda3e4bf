"""Carries out the search for the highest sustained rate, probe by probe.

Knows how to make a probe of a rate. Which rate comes next, and what the probes mean, is `capacity`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.loadtest.capacity import LEAST_REQUESTS, CapacityProbe, Limits, conclude, next_rate
from convoy.loadtest.observe import Observation, TargetObserver
from convoy.loadtest.options import DEFAULT_CONCURRENCY, MAX_REQUESTS, LoadTestOptions
from convoy.loadtest.results import LoadTestOutcome, Result, whole
from convoy.loadtest.target import LoadTarget

# A closed loop says roughly what the server can do; half of that is where the search begins.
SCOUTING_S = 2.0
FIRST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Found:
    result: Result
    observed: Observation


def find_capacity(target: LoadTarget, options: LoadTestOptions, observer: TargetObserver) -> LoadTestOutcome:
    """Ctrl-C ends the search; a probe that it cut short is not counted."""
    found = [_first_look(options, observer)]
    probes: list[CapacityProbe] = []
    measured_s = options.duration_s - options.warm_up_cut_s
    limits = Limits(least=LEAST_REQUESTS / measured_s, most=MAX_REQUESTS / options.duration_s)
    rate = next_rate(probes, FIRST_SHARE * found[0].result.summary.throughput_rps, limits)
    while rate is not None and not found[-1].observed.measurement.interrupted:
        at_rate = replace(options, find_capacity=False, rate=rate)
        observed = observer.observe(at_rate)
        result = whole(at_rate, observed.measurement, f"probe {len(probes) + 1}")
        found.append(_Found(result, observed))
        if not observed.measurement.interrupted:
            probes.append(_probe(rate, result))
            observer.audience.probed(probes[-1])
            rate = next_rate(probes, rate, limits)
    return _outcome(target, options, found, probes)


def _probe(rate: float, result: Result) -> CapacityProbe:
    summary, void = result.summary, result.verdict.void
    most = max(summary.errors, key=lambda error: error.count, default=None)
    reason = void if void is not None or most is None else f"{most.problem.title}: {most.problem.text}"
    return CapacityProbe(rate, summary.goodput, void is not None, summary.good, reason)


def _first_look(options: LoadTestOptions, observer: TargetObserver) -> _Found:
    duration_s = min(SCOUTING_S, options.duration_s)
    closed = replace(
        options, find_capacity=False, concurrency=DEFAULT_CONCURRENCY, duration_s=duration_s, warm_up_s=None
    )
    observed = observer.observe(closed)
    return _Found(whole(closed, observed.measurement, "closed loop"), observed)


def _outcome(
    target: LoadTarget, options: LoadTestOptions, found: Sequence[_Found], probes: Sequence[CapacityProbe]
) -> LoadTestOutcome:
    capacity = conclude(probes)
    tried = [one for one in found[1:] if not one.observed.measurement.interrupted]
    shown = next((one for one in reversed(tried) if one.result.rate == capacity.sustained), found[-1])
    return LoadTestOutcome(
        target=target,
        options=options,
        rows=tuple(one.result for one in tried) or (shown.result,),
        shown=shown.result,
        capacity=capacity,
        server=shown.observed.server,
        use=shown.observed.use,
        interrupted=found[-1].observed.measurement.interrupted,
    )
