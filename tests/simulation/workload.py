"""What a device can do and when requests come: everything that all contenders of one comparison share.

A load is given as rho, the offered rate times the cost of one sample more in a batch: 1.0 would keep a device busy
whose batches had no fixed cost. One seed gives the same arrivals at every load, only closer together, so that two
loads and two contenders can be compared on common random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from convoy.app.scheduling.request import MILLISECOND_NS

Arrivals = Literal["poisson", "steps"]
Floats = npt.NDArray[np.float64]

# What one sample takes alone. Any figure would do: every result is a ratio to it.
SINGLE_NS = 10 * MILLISECOND_NS
# Enough requests that one per cent of them is a number, and enough objectives that queues come and go.
_REQUESTS = 3000
_OBJECTIVES = {"poisson": 30, "steps": 120}
# In objectives. A step triples the rate for a tenth of the time.
_STEP_PERIOD, _STEP_SHARE, _STEP_FACTOR = 30.0, 0.1, 3.0


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """Runs one batch at a time; b samples take `SINGLE_NS * (kappa + b) / (kappa + 1)`.

    `kappa` is a batch's fixed cost in units of what one sample more costs.
    """

    kappa: float
    max_batch: int = 1024

    @property
    def slope_ns(self) -> float:
        """What one sample more costs."""
        return SINGLE_NS / (self.kappa + 1)

    def batch_ns(self, samples: int) -> int:
        return round(self.slope_ns * (self.kappa + samples))

    @property
    def capacity(self) -> float:
        """The load at which full batches keep the device busy."""
        return self.max_batch / (self.kappa + self.max_batch)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One device, the models on it, and how their requests come. `shares` of the rate add up to one.

    `objective` is in units of what one sample takes alone.
    """

    device: VirtualDevice
    objective: float
    shares: tuple[float, ...] = (1.0,)
    arrivals: Arrivals = "poisson"

    @property
    def within_ns(self) -> int:
        """The objective: how soon after its arrival an answer is worth something."""
        return round(self.objective * SINGLE_NS)

    @property
    def bound(self) -> float:
        """The highest load at which a cycle over all models still fits before the oldest request's deadline.

        A fluid argument: every job waits for a cycle and runs in the next batch, and a cycle of m batches lasts
        m * a / (1 - rho). At loads so small that requests rarely meet, it bounds nothing.
        """
        fixed_ns = self.device.kappa * self.device.slope_ns
        return max(0.0, 1 - (len(self.shares) + 1) * fixed_ns / self.within_ns)

    @property
    def until_ns(self) -> int:
        """How long requests come."""
        for_requests = _REQUESTS * self.device.slope_ns / max(0.3, min(self.bound, self.device.capacity))
        return round(max(for_requests, _OBJECTIVES[self.arrivals] * self.within_ns))


@dataclass(frozen=True, slots=True)
class Workload:
    """When requests come, by model, ascending; each is one sample and wants its answer `within_ns`."""

    times_ns: tuple[list[int], ...]
    within_ns: int

    @property
    def offered(self) -> int:
        return sum(map(len, self.times_ns))


def zipf(models: int) -> tuple[float, ...]:
    """Shares of the rate that fall as 1, 1/2, 1/3 ..."""
    weights = [1 / (rank + 1) for rank in range(models)]
    return tuple(weight / sum(weights) for weight in weights)


def equal(models: int) -> tuple[float, ...]:
    return (1 / models,) * models


def draw(scenario: Scenario, rho: float, seed: int) -> Workload:
    """The arrivals of one run at one load."""
    per_ns = rho / scenario.device.slope_ns
    times = [
        _times_ns(scenario, per_ns * share, np.random.default_rng([seed, model]))
        for model, share in enumerate(scenario.shares)
    ]
    return Workload(tuple(times), scenario.within_ns)


def _times_ns(scenario: Scenario, per_ns: float, chance: np.random.Generator) -> list[int]:
    ends_ns, passed = _profile(scenario)
    expected = per_ns * float(passed[-1])
    gaps = chance.standard_exponential(int(expected + 8 * expected**0.5 + 30))
    due = np.cumsum(gaps) / per_ns
    times = np.interp(due[due < passed[-1]], passed, ends_ns)
    found: list[int] = np.rint(times).astype(np.int64).tolist()
    return found


def _profile(scenario: Scenario) -> tuple[Floats, Floats]:
    """Corners of the time that a mean rate of one would have needed, as a function of the time that passed."""
    until, within = float(scenario.until_ns), float(scenario.within_ns)
    if scenario.arrivals == "steps":
        periods = int(until / within / _STEP_PERIOD) + 1
        calm = 1 / (1 + _STEP_SHARE * (_STEP_FACTOR - 1))
        lengths = np.tile(np.array([1 - _STEP_SHARE, _STEP_SHARE]) * _STEP_PERIOD * within, periods)
        rates = np.tile([calm, calm * _STEP_FACTOR], periods)
    else:
        lengths, rates = np.array([until]), np.array([1.0])
    ends = np.concatenate([[0.0], np.cumsum(lengths)])
    passed = np.concatenate([[0.0], np.cumsum(lengths * rates)])
    inside = int(np.searchsorted(ends, until))
    last = np.interp(until, ends, passed)
    return np.append(ends[:inside], until), np.append(passed[:inside], last)
