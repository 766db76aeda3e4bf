"""How long a batch takes in an engine that nobody else uses, measured."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from app.engines.base import Engine, Part, byte_view
from models.bundle import LatencyPoint

_FEWEST_RUNS = 3
_MOST_RUNS = 200


@dataclass(frozen=True, slots=True)
class Probe:
    """A batch of one size, ready to be run again and again."""

    engine: Engine
    part: Part

    def run_ms(self) -> float:
        """Milliseconds of one run, gather and scatter included."""
        started_ns = time.perf_counter_ns()
        self.engine.run([self.part])
        return (time.perf_counter_ns() - started_ns) / 1e6


def batch_knots(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest batch itself: where latency tables have their points."""
    powers = [1 << bit for bit in range(largest.bit_length()) if 1 << bit < largest]
    return [*powers, largest]


def make_probe(engine: Engine, samples: int, *, seed: int = 0) -> Probe:
    """A batch of `samples` random samples; sizes that are free are drawn as 1."""
    generator = np.random.default_rng(seed)
    arrays = []
    for spec in engine.inputs:
        shape = tuple(1 if size < 0 else size for size in spec.shape)
        whole = (samples, *shape) if engine.batched else shape
        raw = generator.integers(0, 2 if spec.dtype == "BOOL" else 100, whole)
        arrays.append(np.ascontiguousarray(raw.astype(spec.numpy_dtype)))
    destinations = tuple(
        None if spec.sample_bytes is None else memoryview(bytearray(samples * spec.sample_bytes))
        for spec in engine.outputs
    )
    part = Part(
        samples=samples,
        shapes=tuple(array.shape for array in arrays),
        inputs=tuple(byte_view(array) for array in arrays),
        wanted=tuple(range(len(engine.outputs))),
        destinations=destinations,
    )
    return Probe(engine, part)


def summarise(batch_size: int, runs_ms: list[float]) -> LatencyPoint:
    """Median and spread of repeated runs, in milliseconds."""
    p10, median, p90 = (float(value) for value in np.percentile(runs_ms, [10, 50, 90]))
    return LatencyPoint(batch_size, median, p10, p90)


def measure_latency(engine: Engine, *, budget_s: float) -> tuple[LatencyPoint, ...]:
    """The engine's latency at every knot, in about `budget_s` seconds altogether."""
    knots = batch_knots(engine.info.batch_sizes[-1])
    points = []
    for samples in knots:
        probe = make_probe(engine, samples)
        first_ms = probe.run_ms()  # the first run of a shape pays for allocations; it is not counted
        affordable = budget_s * 1e3 / len(knots) / max(first_ms, 1e-3)
        runs = min(_MOST_RUNS, max(_FEWEST_RUNS, math.floor(affordable)))
        points.append(summarise(samples, [probe.run_ms() for _ in range(runs)]))
    return tuple(points)
