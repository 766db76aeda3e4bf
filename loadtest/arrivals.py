"""The schedule of an open loop, computed before the first request is sent. Pure.

A fixed schedule does not adapt to the speed of the server, so latencies measured from it are free of coordinated
omission.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.units import NS_PER_S

Offsets = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RateStep:
    """Part of a schedule with one rate (requests/s, on average), in seconds from the start."""

    rate: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """Due times as ascending offsets from the start in int64 nanoseconds, and at least one step."""

    offsets_ns: Offsets
    steps: tuple[RateStep, ...]

    def share(self, index: int, count: int) -> Offsets:
        """The part of process `index` of `count`. Processes take turns, so that each has the shape of the whole run."""
        return self.offsets_ns[index::count]


def schedule_of(options: LoadTestOptions) -> Schedule:
    """The schedule of the open loop. Steps follow each other without a pause."""
    steps = tuple(
        RateStep(rate, index * options.duration_s, (index + 1) * options.duration_s)
        for index, rate in enumerate(options.rates)
    )
    parts_s = [step.start_s + _one_step_s(options, step.rate, options.seed + index) for index, step in enumerate(steps)]
    offsets_ns = (np.concatenate(parts_s) * NS_PER_S).astype(np.int64)
    return Schedule(offsets_ns[offsets_ns < int(options.total_s * NS_PER_S)], steps)


def _one_step_s(options: LoadTestOptions, rate: float, seed: int) -> Seconds:
    if options.arrivals == "constant":
        return constant_s(rate, options.duration_s)
    if options.arrivals == "bursts":
        return bursts_s(rate, options.duration_s, options.burst_on_s, options.burst_off_s, seed)
    return poisson_s(rate, options.duration_s, seed)


def constant_s(rate: float, duration_s: float) -> Seconds:
    """One request every 1/rate seconds, the first at 0."""
    due_s = np.arange(math.ceil(rate * duration_s), dtype=np.float64) / rate
    return due_s[due_s < duration_s]


def poisson_s(rate: float, duration_s: float, seed: int) -> Seconds:
    """A Poisson process, as of many independent users. Gaps are exponential with mean 1/rate.

    The same seed at another rate gives the same pattern at another speed, so that rates can be compared with common
    random numbers.
    """
    generator = np.random.default_rng(seed)
    expected = rate * duration_s
    chunk = math.ceil(expected + 6 * math.sqrt(expected) + 16)
    due_s = np.cumsum(generator.exponential(1 / rate, chunk))
    while due_s[-1] < duration_s:  # six standard deviations short: practically never
        due_s = np.concatenate([due_s, due_s[-1] + np.cumsum(generator.exponential(1 / rate, chunk))])
    return due_s[due_s < duration_s]


def bursts_s(rate: float, duration_s: float, on_s: float, off_s: float, seed: int) -> Seconds:
    """Poisson arrivals for `on_s`, then none for `off_s`, repeatedly. `rate` is the mean over both.

    The arrivals are drawn without the pauses, which are inserted afterwards.
    """
    cycle_s = on_s + off_s
    whole, rest_s = divmod(duration_s, cycle_s)
    working_s = whole * on_s + min(rest_s, on_s)
    due_s = poisson_s(rate * cycle_s / on_s, working_s, seed)
    due_s = due_s + np.floor(due_s / on_s) * off_s
    return due_s[due_s < duration_s]
