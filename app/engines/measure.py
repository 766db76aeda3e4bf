"""Measure how long batches take in engines that are not in service, and interpret the results.

Engines run in turns, because a machine's speed drifts and only neighbouring runs are comparable. Export stores the line
through the latencies, the speed-up with its interval and the share of the device's limit; the server measures if
nothing was stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from convoy.app.engines.base import Engine
from convoy.app.engines.parts import Part
from convoy.models.bundle import Interval, LatencyPoint, LatencyTable, Precision, Roofline
from convoy.models.tensors import random_values, to_bytes

# A quantised variant must be significantly faster, otherwise the exact one serves.
WORTHWHILE_SPEEDUP = 1.02
_BYTES_RELATIVE_TO_FP32 = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": 0.25, "fp8": 0.25}


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to measure.

    Each batch size gets `warm_up` rounds that do not count, then `fewest` to `most` rounds within about `budget_s`. A
    round is one run of every engine. If the fewest rounds of a size would take longer than `limit_s`, it and all larger
    sizes are left out.
    """

    budget_s: float
    limit_s: float
    warm_up: int
    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """Measurements of one batch size. `runs_ms` is float64 [engines, rounds]; a column holds neighbouring runs."""

    batch_size: int
    runs_ms: np.ndarray


@dataclass(frozen=True, slots=True)
class Probe:
    """A batch of one size that can be run repeatedly."""

    engine: Engine
    part: Part

    def run_ms(self) -> float:
        """Run once. Returns milliseconds with gather and scatter, without the wait for others on the device."""
        started_ns = time.perf_counter_ns()
        result = self.engine.run([self.part])
        return (time.perf_counter_ns() - started_ns - result.times.waited_ns) / 1e6


def batch_knots(largest: int) -> list[int]:
    """The batch sizes of latency tables: 1, 2, 4, ... and the largest."""
    powers = [1 << bit for bit in range(largest.bit_length()) if 1 << bit < largest]
    return [*powers, largest]


def make_probe(engine: Engine, samples: int) -> Probe:
    """Make a batch of `samples` random samples; dynamic sizes are the example's."""
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
    """Run the engines in turns at each batch size that all of them take, smallest first. Raises EngineFailure."""
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
        # Every other round is reversed, so that no engine always runs after the same one.
        order = range(len(probes)) if len(rounds) % 2 == 0 else range(len(probes) - 1, -1, -1)
        taken = {index: probes[index].run_ms() for index in order}
        rounds.append([taken[index] for index in range(len(probes))])
    return np.array(rounds).T


def latency_tables(engines: Sequence[Engine], measured: Sequence[Rounds]) -> tuple[LatencyTable, ...]:
    """One table per engine; speed-ups are relative to the first engine."""
    tables = []
    reference = [rounds.runs_ms[0] for rounds in measured]
    for index, engine in enumerate(engines):
        own = [rounds.runs_ms[index] for rounds in measured]
        points = tuple(summarise(rounds.batch_size, runs) for rounds, runs in zip(measured, own, strict=True))
        line = fit_line(points)
        tables.append(
            LatencyTable(
                device_fingerprint=engine.info.device_fingerprint,
                points=points,
                fixed_ms=line.fixed_ms if line else None,
                per_sample_ms=line.per_sample_ms if line else None,
                speedup=paired_speedup(reference, own) if index else None,
            )
        )
    return tuple(tables)


def summarise(batch_size: int, runs_ms: np.ndarray) -> LatencyPoint:
    """Median and spread of repeated runs [n], in milliseconds."""
    p10, median, p90 = (float(value) for value in np.percentile(runs_ms, [10, 50, 90]))
    return LatencyPoint(batch_size, median, p10, p90)


@dataclass(frozen=True, slots=True)
class Line:
    """The latency `fixed_ms` + `per_sample_ms` * b of a batch of b samples; neither is negative."""

    fixed_ms: float
    per_sample_ms: float

    def at(self, batch_size: float) -> float:
        """The latency in milliseconds."""
        return self.fixed_ms + self.per_sample_ms * batch_size


def fit_line(points: Sequence[LatencyPoint]) -> Line | None:
    """Fit a line to the medians by least absolute relative errors; None with fewer than two points.

    Relative, because 1 ms is much for one sample and little for 64; absolute, because one disturbed size must not bend
    the line. Such an optimum passes through two of the points, or through one of them if a coefficient is held at 0
    (Bloomfield & Steiger, Least Absolute Deviations, 1983), so trying all of these finds it.
    """
    if len(points) < 2:
        return None
    return min(_lines(points), key=lambda line: sum(abs(line.at(p.batch_size) / p.median_ms - 1) for p in points))


def _lines(points: Sequence[LatencyPoint]) -> Iterator[Line]:
    for point in points:
        yield Line(0.0, point.median_ms / point.batch_size)
        yield Line(point.median_ms, 0.0)
    for one, other in combinations(points, 2):
        slope = (other.median_ms - one.median_ms) / (other.batch_size - one.batch_size)
        fixed = one.median_ms - slope * one.batch_size
        if slope >= 0 and fixed >= 0:
            yield Line(fixed, slope)


def paired_speedup(reference_ms: Sequence[np.ndarray], own_ms: Sequence[np.ndarray], *, seed: int = 0) -> Interval:
    """The speed-up against the reference over all batch sizes, with a 95 % interval.

    Both arguments hold one float array [rounds] of milliseconds per batch size. Runs at the same index were neighbours,
    so their ratio is free of the machine's drift. The estimate is the geometric mean over the sizes of the median
    ratio; the interval is the percentile bootstrap over rounds within each size (Efron & Tibshirani, An Introduction to
    the Bootstrap, 1993, ch. 13).
    """
    generator = np.random.default_rng(seed)
    estimates, resampled = [], []
    for theirs, ours in zip(reference_ms, own_ms, strict=True):
        ratios = np.log(theirs / ours)
        draws = generator.integers(0, len(ratios), (1000, len(ratios)))
        estimates.append(np.median(ratios))
        resampled.append(np.median(ratios[draws], axis=1))
    low, high = np.exp(np.percentile(np.mean(resampled, axis=0), [2.5, 97.5]))
    return Interval(float(np.exp(np.mean(estimates))), float(low), float(high))


def is_beyond_doubt(speedup: Interval) -> bool:
    """Whether a speed-up is significant: the lower end of its interval decides."""
    return speedup.low > WORTHWHILE_SPEEDUP


def is_worthwhile(table: LatencyTable) -> bool:
    """Whether the variant is significantly faster than the reference."""
    return table.speedup is not None and is_beyond_doubt(table.speedup)


def best_per_sample_ms(table: LatencyTable) -> float:
    """Milliseconds per sample at the most efficient batch size."""
    return min(point.median_ms / point.batch_size for point in table.points)


@dataclass(frozen=True, slots=True)
class Limit:
    """The least time of a batch, and which of the two ceilings sets it.

    `flop_per_byte` is the arithmetic intensity, the x axis of the roofline.
    """

    least_ms: float
    bound_by: Literal["arithmetic", "memory"]
    flop_per_byte: float
    gflop: float


def limit(roofline: Roofline, precision: Precision, batch_size: int) -> Limit | None:
    """The limit by the roofline model; None if the device's rate was not measured for this precision.

    A computation cannot be faster than its operations at the device's arithmetic rate, nor than its bytes at the
    device's memory rate (Williams, Waterman & Patterson, CACM 52(4), 2009). Assumes that all weights and activations
    have the variant's precision.
    """
    rate = device_rate(roofline, precision)
    if rate is None:
        return None
    gflop = roofline.gflop_per_sample * batch_size
    mb = (roofline.weights_mb + roofline.mb_per_sample * batch_size) * _BYTES_RELATIVE_TO_FP32[precision]
    arithmetic_ms, memory_ms = 1e3 * gflop / rate, mb / roofline.device_gb_per_s
    return Limit(
        least_ms=max(arithmetic_ms, memory_ms),
        bound_by="arithmetic" if arithmetic_ms >= memory_ms else "memory",
        flop_per_byte=1e3 * gflop / mb,
        gflop=gflop,
    )


def device_rate(roofline: Roofline, precision: Precision) -> float | None:
    """The measured arithmetic rate of the device in 10^9 operations per second; None if it was not measured."""
    return {"fp32": roofline.device_gflop_per_s, "int8": roofline.device_int8_gop_per_s}.get(precision)


def share_of_limit(roofline: Roofline, precision: Precision, point: LatencyPoint) -> float | None:
    """The least time divided by the measured time, at most 1; None if the limit is unknown."""
    least = limit(roofline, precision, point.batch_size)
    return least.least_ms / point.median_ms if least else None
