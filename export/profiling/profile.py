"""Latency per batch size of each variant in the serving engine, variants taking turns.

Knows which variants can be compared on this device and how long that may take; the server's own code measures
(`convoy.app.engines.measure`). The CPU times in Linux's /proc/stat show whether other processes disturbed it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.measure import Pace, batch_knots, latency_tables, run_in_turns
from convoy.export.progress import Progress
from convoy.export.variants.variant import OpenVariant, OtherEngines
from convoy.models.bundle import LatencyTable

# Was the machine busy with something else during the measurement? CPU time of others, relative to what was left for us.
# /proc/stat counts what all processes take of each CPU, in hundredths of a second, and what a hypervisor gives to other
# guests. Without our own time, that is what others took.


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds since an arbitrary start: of the clock, of CPU time of all processes, and of this one's."""

    at_s: float
    all_s: float
    own_s: float


class CpuWatch:
    """Takes readings; two of them show how busy others were in between."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        self._readings: list[CpuReading] = []
        self.look()

    def look(self) -> None:
        """Take a reading; none if the system does not tell."""
        try:
            all_s = taken_s(self._stat.read_text(encoding="ascii"), self._cpus, os.sysconf("SC_CLK_TCK"))
        except (OSError, ValueError):
            return
        self._readings.append(CpuReading(time.monotonic(), all_s, time.process_time()))

    def busy_shares(self, looks: int) -> list[float | None]:
        """The share of our CPUs that others took between each two of `looks` readings, from 0 to 1; None if unknown."""
        if len(self._readings) != looks:
            return [None] * (looks - 1)
        return list(shares_of_others(self._readings, len(self._cpus), cpu_budget()))


def taken_s(stat: str, cpus: Collection[int], ticks_per_s: int) -> float:
    """Busy CPU seconds of these CPUs since boot. Raises ValueError for unexpected text."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    found = {name: fields for line in stat.splitlines() if line for name, *fields in [line.split()] if name in wanted}
    if len(found) < len(wanted):
        raise ValueError("some CPUs are not told of")
    # Of a line of /proc/stat: user, nice, system, irq, softirq, steal. The rest is idle, or already in user.
    busy = (0, 1, 2, 5, 6, 7)
    return sum(int(fields[at]) for fields in found.values() for at in busy if at < len(fields)) / ticks_per_s


def shares_of_others(readings: Sequence[CpuReading], cpus: int, budget: int) -> Sequence[float]:
    """For each two readings, what others took of the `budget` CPUs that we may use at once, of `cpus` in total.

    If we may not use all CPUs, others take nothing of ours as long as they fit on the rest. A period too short to judge
    is judged with its neighbours.
    """
    shares = []
    for index in range(len(readings) - 1):
        first, last = _window(readings, index)
        elapsed_s = readings[last].at_s - readings[first].at_s
        others_s = (readings[last].all_s - readings[first].all_s) - (readings[last].own_s - readings[first].own_s)
        others = others_s / elapsed_s if elapsed_s > 0 else 0.0
        shares.append(min(1.0, max(0.0, others - (cpus - budget)) / budget))
    return shares


def _window(readings: Sequence[CpuReading], index: int) -> tuple[int, int]:
    """The readings around one of them, as few as are long enough together."""
    first, last = index, index + 1
    # Below it, ticks of a hundredth of a second are too coarse.
    while readings[last].at_s - readings[first].at_s < 0.5 and (first > 0 or last + 1 < len(readings)):
        first, last = max(0, first - 1), min(len(readings) - 1, last + 1)
    return first, last


# A small network is measured in seconds, and none for longer than a minute or two.
PACE = Pace(budget_s=0.7, limit_s=20.0, warm_up=2, fewest=7, most=300)


def measure_latencies(candidates: Sequence[OpenVariant], progress: Progress) -> tuple[LatencyTable, ...]:
    """One table per candidate, the first of which is the fp32 reference; points at batch sizes 1, 2, 4, ..."""
    engines = [candidate.engine for candidate in candidates]
    measured = []
    watch = CpuWatch()
    with progress.step("Measuring latency", len(batch_knots(engines[0].info.batch_sizes[-1]))) as step:
        for rounds in run_in_turns(engines, PACE):
            measured.append(rounds)
            watch.look()
            step.advance()
    shares = watch.busy_shares(len(measured) + 1)
    return tuple(_told(table, shares) for table in latency_tables(engines, measured))


@dataclass(frozen=True, slots=True)
class Timings:
    """One variant's: its `latency` in the serving engine, and in the others; the fields are as in `Variant`."""

    latency: LatencyTable | None = None
    other_latencies: tuple[LatencyTable, ...] = ()
    refused_by: Mapping[str, str] = field(default_factory=dict)


def measured_everywhere(
    candidates: Sequence[OpenVariant], others: OtherEngines, progress: Progress
) -> tuple[Timings, ...]:
    """The candidates in their own engines and in the others, all in turns."""
    measured = measure_latencies([*candidates, *others.candidates], progress)
    elsewhere: dict[Path, list[LatencyTable]] = {}
    for candidate, table in zip(others.candidates, measured[len(candidates) :], strict=True):
        elsewhere.setdefault(candidate.path, []).append(table)
    return tuple(
        Timings(own, tuple(elsewhere.get(one.path, ())), dict(others.refused.get(one.recipe.file, {})))
        for one, own in zip(candidates, measured, strict=False)
    )


def _told(table: LatencyTable, shares: Sequence[float | None]) -> LatencyTable:
    """Add what others took of the CPUs while each point was measured."""
    points = zip(table.points, shares, strict=True)
    return replace(table, points=tuple(replace(point, others_share=share) for point, share in points))
