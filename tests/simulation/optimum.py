"""The best that any rule could do, where the case is small enough to know: value iteration on a slotted clock.

Time passes in slots; in each, one request comes or none does, so what waits is one bit per slot of age. When the
device is free, a rule either starts a batch of the oldest that will be in time or lets a slot pass. Serving the
oldest of those loses nothing, because the younger ones can take their places later. The value is the greatest
long-run share of requests that are answered in time, known only to a rule that sees no more than the past.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.simulation.workload import SINGLE_NS, VirtualDevice, Workload

Floats = npt.NDArray[np.float64]
Masks = npt.NDArray[np.int64]

# Slots, after half of which the value grows evenly.
_HORIZON = 600


@dataclass(frozen=True, slots=True)
class SmallCase:
    """A batch of b takes `fixed + b` slots, an answer is worth something for `within` slots; requests come in a
    `chance` of the slots."""

    fixed: int
    within: int
    chance: float

    @property
    def device(self) -> VirtualDevice:
        return VirtualDevice(kappa=self.fixed, max_batch=self.within)

    @property
    def slot_ns(self) -> float:
        return SINGLE_NS / (self.fixed + 1)

    @property
    def sizes(self) -> range:
        """The batches that can be in time at all."""
        return range(1, self.within - self.fixed + 1)


def best_share(case: SmallCase) -> float:
    """The greatest share in time, from how the value grows over the second half of the horizon."""
    everything = 1 << case.within
    masks = np.arange(everything, dtype=np.int64)
    aged = (masks << 1) & (everything - 1)
    after = [_after_serving(case, size, masks) for size in case.sizes]
    # expected[j]: values j slots after the time at which they will be worth values[t], by j, newest time last.
    history: list[list[Floats]] = []
    values: list[Floats] = []
    for slot in range(_HORIZON + 1):
        value = history[slot - 1][1] if slot else np.zeros(everything)
        for size, left in zip(case.sizes, after, strict=True):
            took = case.fixed + size
            if took <= slot:
                value = np.maximum(value, np.where(left >= 0, size + history[slot - took][took][left], -np.inf))
        values.append(value)
        history.append(_passing(value, aged, case))
        if slot >= case.within:
            history[slot - case.within] = []
    grown = float(values[_HORIZON][0] - values[_HORIZON // 2][0])
    return grown / (_HORIZON - _HORIZON // 2) / case.chance


def _passing(value: Floats, aged: Masks, case: SmallCase) -> list[Floats]:
    """What the value will be expected to be after 0, 1, 2 ... slots in which nothing is decided."""
    expected = [value]
    for _ in range(case.within):
        later = expected[-1]
        expected.append(case.chance * later[aged | 1] + (1 - case.chance) * later[aged])
    return expected


def _after_serving(case: SmallCase, size: int, masks: Masks) -> Masks:
    """What still waits when the oldest `size` that will be in time are taken; -1 where there are not so many."""
    in_time = masks & ((1 << (case.within - case.fixed - size + 1)) - 1)
    left, found = masks.copy(), np.zeros(len(masks), np.int64)
    for age in reversed(range(case.within)):
        take = ((in_time >> age) & 1).astype(bool) & (found < size)
        left[take] &= ~(1 << age)
        found += take
    return np.where(found == size, left, -1)


def small_workload(case: SmallCase, slots: int, seed: int) -> Workload:
    """Arrivals as the value iteration has them. Half a slot is added to the objective: everything ends on a slot, so
    nothing changes but that rules with a margin are not held to it."""
    came = np.flatnonzero(np.random.default_rng(seed).random(slots) < case.chance)
    times: list[int] = np.rint(came * case.slot_ns).astype(np.int64).tolist()
    return Workload((times,), round((case.within + 0.5) * case.slot_ns))
