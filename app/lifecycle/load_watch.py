"""Measures how loaded a core is, twice a second, from what is recorded anyway, so that no request pays for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from convoy.app.lifecycle.catalog import Catalog, Served
from convoy.app.scheduling.request import SECOND_NS
from convoy.app.scheduling.routing import BatchSpeed
from convoy.app.scheduling.scheduler import Scheduler
from convoy.app.telemetry.statistics import ModelStatistics

_LOOK_EVERY_S = 0.5


class CoreLoad(NamedTuple):
    """How loaded a core is, for balancers that choose between several: over the last seconds; 0 in the first second.

    `utilisation` is the part of what the core could do at most that it does: the time that its samples would take in
    full batches, or the CPU time of its event loop, whichever is more. The time that engines are busy would be no
    measure: a few requests keep one busy with batches of one, and it could still do many times as much.
    `waiting_s` is how long what waits would keep all engines busy.
    """

    utilisation: float = 0.0
    requests_per_s: float = 0.0
    waiting_s: float = 0.0


class _Look(NamedTuple):
    """What had happened by a time: seconds of work in full batches, of the loop's CPU, and requests answered."""

    at_s: float
    work_s: float
    loop_s: float
    requests: int


class LoadWatch:
    """Belongs to one event loop. `clock` and `loop_clock` never go back, the latter is the loop's thread's own."""

    def __init__(
        self,
        catalog: Catalog,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
        loop_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._catalog, self._scheduler = catalog, scheduler
        self._clock, self._loop_clock = clock, loop_clock
        self._looks: deque[_Look] = deque(maxlen=1 + round(5.0 / _LOOK_EVERY_S))  # over five seconds
        self._counted: dict[ModelStatistics, tuple[int, int]] = {}  # which go on where a version is loaded again
        self._work_s, self._requests = 0.0, 0
        self.load = CoreLoad()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_EVERY_S)

    def look(self) -> None:
        """Find out how loaded it is now."""
        counted, waiting_s = self._counted, 0.0
        self._counted = {}
        for served in self._catalog.served():
            statistics, per_s = served.statistics, _samples_per_s(served)
            samples, requests = statistics.inference_count, statistics.success.count
            samples_before, requests_before = counted.get(statistics, (0, 0))
            self._counted[statistics] = samples, requests
            if per_s:  # else its only engine is being replaced
                self._requests += requests - requests_before
                self._work_s += (samples - samples_before) / per_s
                waiting_s += self._scheduler.waiting_samples(served.key) / per_s
        self._looks.append(_Look(self._clock(), self._work_s, self._loop_clock(), self._requests))
        first, last = self._looks[0], self._looks[-1]
        took_s = last.at_s - first.at_s
        if took_s > 0:
            busy_s = max(last.work_s - first.work_s, last.loop_s - first.loop_s)
            self.load = CoreLoad(busy_s / took_s, (last.requests - first.requests) / took_s, waiting_s)


def _samples_per_s(served: Served) -> float:
    """What all devices of a version could do together, in its engines' largest batches; 0 where there is no engine."""
    best: dict[str, float] = {}
    for lane in served.at_work:
        size = lane.batch_sizes[-1]
        takes_ns = max(1, lane.expect_ns(size) - lane.hidden_ns(size))
        best[lane.device] = max(best.get(lane.device, 0.0), size * SECOND_NS / takes_ns)
    return sum(best.values(), 0.0)


def batch_speed(catalog: Catalog) -> BatchSpeed | None:
    """How fast this core is, by its slowest version; None where no engine is at work."""
    found: list[BatchSpeed] = []
    for served in catalog.served():
        lanes = {lane.device: lane for lane in served.at_work}
        if lanes:
            lane = next(iter(lanes.values()))
            size = lane.batch_sizes[-1]
            one_s, full_s = lane.expect_ns(1) / SECOND_NS, lane.expect_ns(size) / SECOND_NS
            per_sample_s = (full_s - one_s) / (size - 1) if size > 1 else full_s
            # Several devices take as many samples in the same time.
            found.append(BatchSpeed(max(0.0, one_s - per_sample_s), per_sample_s / len(lanes), size * len(lanes)))
    return max(found, key=lambda speed: speed.batch_s(speed.max_batch), default=None)
