"""Measures how loaded a core is, twice a second, from existing counters, so that requests pay nothing for it."""

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
    """The load of a core over the last seconds, for balancers; 0 in the first second.

    `utilisation` is the share of its capacity that is used: the time that its samples would take in full batches, or
    the CPU time of its event loop, whichever is larger. The busy time of engines would be misleading: a few requests
    keep an engine busy with batches of one, although it could do many times as much. `waiting_s` is how long the
    waiting requests would keep all engines busy.
    """

    utilisation: float = 0.0
    requests_per_s: float = 0.0
    waiting_s: float = 0.0


class _Look(NamedTuple):
    """Counters at one time: seconds of work in full batches, CPU seconds of the loop, and answered requests."""

    at_s: float
    work_s: float
    loop_s: float
    requests: int


class LoadWatch:
    """Used on one event loop. `loop_clock` is the CPU time of the loop's thread."""

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
        """Run until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_EVERY_S)

    def look(self) -> None:
        """Measure the load now."""
        counted, waiting_s = self._counted, 0.0
        self._counted = {}
        for served in self._catalog.served():
            statistics, per_s = served.statistics, _samples_per_s(served)
            samples, requests = statistics.inference_count, statistics.success.count
            samples_before, requests_before = counted.get(statistics, (0, 0))
            self._counted[statistics] = samples, requests
            if per_s:  # otherwise its only engine is being replaced
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
    """The rate of all devices of a version together, with their largest batches; 0 without an engine."""
    best: dict[str, float] = {}
    for lane in served.at_work:
        size = lane.batch_sizes[-1]
        takes_ns = max(1, lane.expect_ns(size) - lane.hidden_ns(size))
        best[lane.device] = max(best.get(lane.device, 0.0), size * SECOND_NS / takes_ns)
    return sum(best.values(), 0.0)


def batch_speed(catalog: Catalog) -> BatchSpeed | None:
    """The speed of this core, by its slowest version; None if no engine is at work."""
    found: list[BatchSpeed] = []
    for served in catalog.served():
        lanes = {lane.device: lane for lane in served.at_work}
        if lanes:
            lane = next(iter(lanes.values()))
            size = lane.batch_sizes[-1]
            one_s, full_s = lane.expect_ns(1) / SECOND_NS, lane.expect_ns(size) / SECOND_NS
            per_sample_s = (full_s - one_s) / (size - 1) if size > 1 else full_s
            # Several devices handle as many more samples in the same time.
            found.append(BatchSpeed(max(0.0, one_s - per_sample_s), per_sample_s / len(lanes), size * len(lanes)))
    return max(found, key=lambda speed: speed.batch_s(speed.max_batch), default=None)
