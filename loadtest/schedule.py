"""When the requests of an open loop are due: computed whole, before the first is sent.

Pure: no clock, no network. A schedule that is fixed beforehand cannot bend to the server's pace, which is
what makes the latencies counted from it free of coordinated omission.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from loadtest.options import Arrivals

NS_PER_S = 1_000_000_000

Offsets = npt.NDArray[np.int64]


def arrival_offsets_ns(arrivals: Arrivals, rate: float, duration_s: float, seed: int) -> Offsets:
    """Due times as offsets from the start, int64 nanoseconds, never falling, all within [0, duration)."""
    if arrivals == "constant":
        return constant_offsets_ns(rate, duration_s)
    return poisson_offsets_ns(rate, duration_s, seed)


def constant_offsets_ns(rate: float, duration_s: float) -> Offsets:
    """One request every 1/rate seconds, the first at once."""
    count = math.ceil(rate * duration_s)
    return _within(np.arange(count, dtype=np.float64) / rate, duration_s)


def poisson_offsets_ns(rate: float, duration_s: float, seed: int) -> Offsets:
    """A Poisson process: what many independent users make. Gaps are exponential with mean 1/rate."""
    generator = np.random.default_rng(seed)
    expected = rate * duration_s
    chunk = math.ceil(expected + 6 * math.sqrt(expected) + 16)
    arrivals_s = np.cumsum(generator.exponential(1 / rate, chunk))
    while arrivals_s[-1] < duration_s:  # six standard deviations short: all but never, and then simply longer
        more_s = arrivals_s[-1] + np.cumsum(generator.exponential(1 / rate, chunk))
        arrivals_s = np.concatenate([arrivals_s, more_s])
    return _within(arrivals_s, duration_s)


def _within(offsets_s: npt.NDArray[np.float64], duration_s: float) -> Offsets:
    offsets_ns = (offsets_s * NS_PER_S).astype(np.int64)
    return offsets_ns[offsets_ns < int(duration_s * NS_PER_S)]
