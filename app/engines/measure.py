"""How long batches take in engines that are not in service: run in turns, because a machine's speed drifts.

Runs right after one another can be compared. Knows measuring; `convoy.app.engines.speedup` knows what the
figures mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.app.engines.base import Engine
from convoy.app.engines.parts import Part
from convoy.app.engines.speedup import fit_line, paired_speedup
from convoy.models.bundle import LatencyPoint, LatencyTable
from convoy.models.tensors import random_values, to_bytes


@dataclass(frozen=True, slots=True)
class Pace:
    """How long measuring may take, whatever the network.

    Each batch size gets `warm_up` rounds that are not counted, then `fewest` to `most` counted ones within
    about `budget_s`; a round is one run of every engine. A size whose fewest rounds would take longer than
    `limit_s` is left out, and all larger ones with it.
    """

    budget_s: float
    limit_s: float
    warm_up: int
    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """`runs_ms` is float64 [engines, rounds]: one column was measured in one breath."""

    batch_size: int
    runs_ms: np.ndarray


@dataclass(frozen=True, slots=True)
class Probe:
    """A batch of one size, ready to be run again and again."""

    engine: Engine
    part: Part

    def run_ms(self) -> float:
        """Milliseconds of one run, gather and scatter included; not what it waited for others on the device."""
        started_ns = time.perf_counter_ns()
        result = self.engine.run([self.part])
        return (time.perf_counter_ns() - started_ns - result.times.waited_ns) / 1e6


def batch_knots(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest batch itself: where latency tables have their points."""
    powers = [1 << bit for bit in range(largest.bit_length()) if 1 << bit < largest]
    return [*powers, largest]


def make_probe(engine: Engine, samples: int) -> Probe:
    """A batch of `samples` random samples; sizes that are free are their examples'."""
    generator = np.random.default_rng(0)
    arrays = [
        random_values(generator, spec, engine.whole_shape(spec, samples), are_indices=True) for spec in engine.inputs
    ]
    destinations = tuple(
        None if spec.sample_bytes is None else memoryview(bytearray(samples * spec.sample_bytes))
        for spec in engine.outputs
    )
    part = Part(
        samples=samples,
        shapes=tuple(array.shape for array in arrays),
        inputs=tuple(to_bytes(array, spec) for array, spec in zip(arrays, engine.inputs, strict=True)),
        wanted=tuple(range(len(engine.outputs))),
        destinations=destinations,
    )
    return Probe(engine, part)


def run_in_turns(engines: Sequence[Engine], pace: Pace) -> Iterator[Rounds]:
    """The engines' runs at each knot that all of them take, smallest first, as they are made. Raises EngineFailure."""
    previous: Rounds | None = None
    for size in batch_knots(min(engine.info.batch_sizes[-1] for engine in engines)):
        if previous is not None:
            # A larger batch never takes longer than the same samples in smaller ones, or hardly.
            round_s = float(np.median(previous.runs_ms, axis=1).sum()) / 1e3
            expected_s = round_s * size / previous.batch_size
            if expected_s * (pace.warm_up + pace.fewest) > pace.limit_s:
                return
        previous = Rounds(size, take_turns([make_probe(engine, size) for engine in engines], pace))
        yield previous


def take_turns(probes: Sequence[Probe], pace: Pace) -> np.ndarray:
    """Milliseconds of the probes' runs, float64 [probes, rounds]. Raises EngineFailure."""
    for _ in range(pace.warm_up):
        for probe in probes:
            probe.run_ms()
    rounds: list[list[float]] = []
    end_s = time.monotonic() + pace.budget_s
    while len(rounds) < pace.fewest or (len(rounds) < pace.most and time.monotonic() < end_s):
        # Every other round goes backwards, so that no engine always runs in the wake of the same one.
        order = range(len(probes)) if len(rounds) % 2 == 0 else range(len(probes) - 1, -1, -1)
        taken = {index: probes[index].run_ms() for index in order}
        rounds.append([taken[index] for index in range(len(probes))])
    return np.array(rounds).T


def latency_tables(engines: Sequence[Engine], measured: Sequence[Rounds]) -> tuple[LatencyTable, ...]:
    """One table per engine; the speed-ups of all but the first are against the first."""
    by_engine = [[rounds.runs_ms[index] for rounds in measured] for index in range(len(engines))]
    tables = []
    for engine, own in zip(engines, by_engine, strict=True):
        points = tuple(summarise(rounds.batch_size, runs) for rounds, runs in zip(measured, own, strict=True))
        line = fit_line(points)
        tables.append(
            LatencyTable(
                device_fingerprint=engine.info.device_fingerprint,
                points=points,
                fixed_ms=line.fixed_ms if line else None,
                per_sample_ms=line.per_sample_ms if line else None,
                speedup=None if own is by_engine[0] else paired_speedup(by_engine[0], own),
            )
        )
    return tuple(tables)


def summarise(batch_size: int, runs_ms: np.ndarray) -> LatencyPoint:
    """Median and spread of repeated runs [n], in milliseconds."""
    p10, median, p90 = (float(value) for value in np.percentile(runs_ms, [10, 50, 90]))
    return LatencyPoint(batch_size, median, p10, p90)
