"""What the server's processes used meanwhile, CPU and memory, by their own metrics.

Knows `process_*`, which most servers with Prometheus metrics have of the process that answers, and Convoy's
`convoy_process_*`, which has each process. Readings are taken now and then during a run: their differences are what CPU
time has intervals from. Pure; asking is the client's. The readings themselves are in what the server used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from convoy.loadtest.bootstrap import ConfidenceInterval, ratio_interval
from convoy.loadtest.records import Records
from convoy.loadtest.rows import GOOD
from convoy.loadtest.statistics import Window
from convoy.loadtest.units import BYTES_PER_MIB, MS_PER_S, NS_PER_S

OF_EACH, OF_ONE = "convoy_process_", "process_"
FIGURES = ("cpu_seconds_total", "resident_memory_bytes", "start_time_seconds")


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process at one moment. `began_s` tells a process from another that took its place and name."""

    name: str
    cpu_s: float
    memory_bytes: float
    began_s: float


@dataclass(frozen=True, slots=True)
class UseReading:
    """All processes at one moment of CLOCK_MONOTONIC."""

    at_ns: int
    processes: tuple[ProcessReading, ...]


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process over the measured time."""

    name: str
    cpu_s: float
    peak_mib: float


@dataclass(frozen=True, slots=True)
class UseSample:
    """All processes together between two readings: `cores` is CPU time over time, `memory_mib` that of the second."""

    start_s: float
    end_s: float
    cores: float
    memory_mib: float


@dataclass(frozen=True, slots=True)
class ServerUse:
    """All processes together between the first and the last reading within the measured window.

    `cpu_ms_per_answer` is CPU time over the good answers of that time, None without one. Intervals are 95 % confidence
    intervals by bootstrap over the samples; None where there are fewer than ten. `peak_mib` is the most that was read.
    """

    cpu_s: float
    cores: float
    cores_interval: ConfidenceInterval | None
    cpu_ms_per_answer: float | None
    cpu_ms_per_answer_interval: ConfidenceInterval | None
    peak_mib: float
    processes: tuple[ProcessUse, ...]
    samples: tuple[UseSample, ...]


def read_processes(metrics: str) -> tuple[ProcessReading, ...]:
    """From the text of /metrics; none where it says nothing of processes."""
    for prefix in (OF_EACH, OF_ONE):
        wanted = tuple(prefix + figure for figure in FIGURES)
        # Only these lines: reading all of them would take longer than the server took to write them.
        lines = [line for line in metrics.splitlines() if line.startswith(wanted)]
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name = sample.labels.get("process", "server")
                found.setdefault(name, {})[sample.name.removeprefix(prefix)] = sample.value
        if found:
            return tuple(
                ProcessReading(name, *(of.get(figure, 0.0) for figure in FIGURES)) for name, of in found.items()
            )
    return ()


def server_use(readings: Sequence[UseReading], records: Records, window: Window) -> ServerUse | None:
    """None where fewer than two readings lie within the window."""
    within = [one for one in readings if window.start_ns <= one.at_ns <= window.end_ns]
    if len(within) < 2:
        return None
    pairs = list(pairwise(within))
    spent_s = [_spent_s(first, second) for first, second in pairs]
    cpu_s = np.array([sum(of.values()) for of in spent_s])
    at_ns = np.array([one.at_ns for one in within])
    seconds = np.diff(at_ns) / NS_PER_S
    finished_ns = np.sort(records.finished_ns[records.outcome == GOOD])
    answers = np.diff(np.searchsorted(finished_ns, at_ns)).astype(np.float64)
    per_answer = ratio_interval(cpu_s, answers)
    return ServerUse(
        cpu_s=float(cpu_s.sum()),
        cores=float(cpu_s.sum() / seconds.sum()),
        cores_interval=ratio_interval(cpu_s, seconds),
        cpu_ms_per_answer=float(MS_PER_S * cpu_s.sum() / answers.sum()) if answers.sum() else None,
        cpu_ms_per_answer_interval=per_answer
        and ConfidenceInterval(MS_PER_S * per_answer.low, MS_PER_S * per_answer.high),
        peak_mib=max(_memory_mib(one) for one in within),
        processes=_by_process(within, spent_s),
        samples=tuple(
            UseSample(
                start_s=(first.at_ns - window.run_start_ns) / NS_PER_S,
                end_s=(second.at_ns - window.run_start_ns) / NS_PER_S,
                cores=float(cpu / length),
                memory_mib=_memory_mib(second),
            )
            for (first, second), cpu, length in zip(pairs, cpu_s, seconds, strict=True)
        ),
    )


def _spent_s(first: UseReading, second: UseReading) -> dict[str, float]:
    """CPU time of each process between two readings; one that began meanwhile has spent all that it has."""
    before = {(one.name, one.began_s): one.cpu_s for one in first.processes}
    return {one.name: max(0.0, one.cpu_s - before.get((one.name, one.began_s), 0.0)) for one in second.processes}


def _by_process(readings: Sequence[UseReading], spent_s: Sequence[dict[str, float]]) -> tuple[ProcessUse, ...]:
    peaks: dict[str, float] = {}
    for reading in readings:
        for one in reading.processes:
            peaks[one.name] = max(peaks.get(one.name, 0.0), one.memory_bytes / BYTES_PER_MIB)
    return tuple(
        ProcessUse(name, sum(of.get(name, 0.0) for of in spent_s), peak_mib) for name, peak_mib in peaks.items()
    )


def _memory_mib(reading: UseReading) -> float:
    return sum(one.memory_bytes for one in reading.processes) / BYTES_PER_MIB
