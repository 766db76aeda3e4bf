"""How fast is each variant? Latency per batch size in the serving engine, variants taking turns.

Knows measuring, not choosing. Turns, because a machine's speed drifts: what is measured in the same breath
can be compared. The time is bounded, whatever the network.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import geometric_mean

from app.engines.measure import Probe, batch_knots, make_probe, summarise
from export.progress import Progress, Step
from export.variant import Candidate
from models.bundle import LatencyPoint, LatencyTable

_BUDGET_S_PER_SIZE = 0.7
_WARM_UP_ROUNDS = 2
_FEWEST_ROUNDS = 7
_MOST_ROUNDS = 300


def measure_latencies(candidates: Sequence[Candidate], progress: Progress) -> tuple[LatencyTable, ...]:
    """One table per candidate, with points at batch sizes 1, 2, 4, ... and the largest."""
    sizes = batch_knots(candidates[0].engine.info.batch_sizes[-1])
    points: list[list[LatencyPoint]] = [[] for _ in candidates]
    with progress.step("measure latency", len(sizes)) as step:
        for size in sizes:
            _measure_size(candidates, size, points, step)
    return tuple(
        LatencyTable(candidate.engine.info.device_fingerprint, tuple(own))
        for candidate, own in zip(candidates, points, strict=True)
    )


def _measure_size(candidates: Sequence[Candidate], size: int, points: list[list[LatencyPoint]], step: Step) -> None:
    probes = [make_probe(candidate.engine, size) for candidate in candidates]
    for probe, own, runs_ms in zip(probes, points, _take_turns(probes), strict=True):
        own.append(summarise(probe.part.samples, runs_ms))
    step.advance()


def _take_turns(probes: Sequence[Probe]) -> list[list[float]]:
    """Milliseconds of each probe's runs: a, b, a, b, ... until the time is up."""
    for probe in probes:
        for _ in range(_WARM_UP_ROUNDS):
            probe.run_ms()
    runs_ms: list[list[float]] = [[] for _ in probes]
    end_s = time.monotonic() + _BUDGET_S_PER_SIZE
    while len(runs_ms[0]) < _FEWEST_ROUNDS or (len(runs_ms[0]) < _MOST_ROUNDS and time.monotonic() < end_s):
        for probe, own in zip(probes, runs_ms, strict=True):
            own.append(probe.run_ms())
    return runs_ms


def speedup(table: LatencyTable, reference: LatencyTable) -> float:
    """How many times faster than the reference: the geometric mean of the medians' ratios over all batch sizes."""
    return geometric_mean(
        theirs.median_ms / ours.median_ms for ours, theirs in zip(table.points, reference.points, strict=True)
    )
