"""Health that depends on real inferences.

Two checks, a few times a second. If a batch runs far longer than it should, its engine hangs: the stacks are logged,
its requests fail, and the engine is replaced. If no batch has succeeded for a while, because the lane is idle or
because every batch fails, the canary runs outside the queue, so overload never fails health.

Short batches run on the event loop itself. If one hangs, nothing here runs any more, so a thread watches the loop and
ends the process.

A machine may be paused, like a suspended virtual machine. What was running then did not hang, and gets its time again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convoy.app.engines.cuda.device import Device
from convoy.app.lifecycle.catalog import Catalog, Served, ServedLane
from convoy.app.lifecycle.tasks import Tasks
from convoy.app.scheduling.request import SECOND_NS
from convoy.app.scheduling.scheduler import Scheduler
from convoy.app.server.logs import tell_stacks
from convoy.app.telemetry.metrics import Metrics

_log = logging.getLogger("convoy")


@dataclass(frozen=True, slots=True)
class HealthOptions:
    """The limits in seconds; a batch hangs if it runs longer than both."""

    hang_after_s: float = 10.0
    hang_after_predictions: float = 20.0
    canary_after_s: float = 10.0
    replace_within_s: float = 60.0
    watch_every_s: float = 0.25


class _Absence:
    """Detects that the process was suspended: the time since the last look is much longer than usual."""

    def __init__(self, watch_every_s: float) -> None:
        self._most_ns = int((watch_every_s + 1.0) * SECOND_NS)
        self._looked_ns = time.monotonic_ns()
        self._back_ns = 0

    def look(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns > self._most_ns:
            self._back_ns = now_ns
        self._looked_ns = now_ns

    def ran_s(self, since_ns: int) -> float:
        """How long something has run that began then, or since the process resumed."""
        return (self._looked_ns - max(since_ns, self._back_ns)) / SECOND_NS


class Health:
    """Watches the lanes of one core."""

    def __init__(
        self,
        catalog: Catalog,
        scheduler: Scheduler,
        on_fatal: Callable[[str], None],
        options: HealthOptions,
        gpus: Sequence[Device],
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        """`on_fatal` is called for what only a new process can fix, such as the loss of one of the `gpus`; from any
        thread.
        """
        self._catalog, self._scheduler, self._on_fatal, self._gpus = catalog, scheduler, on_fatal, gpus
        self._options, self._metrics, self._tasks = options, metrics, tasks
        self._absence = _Absence(options.watch_every_s)

    async def watch(self) -> None:
        """Run until cancelled, or until a GPU that has served needs a new process."""
        while True:
            await asyncio.sleep(self._options.watch_every_s)
            self._absence.look()
            self._give_up_hung_lanes()
            lost = next((gpu for gpu in self._gpus if gpu.lost and gpu.has_served), None)
            if lost is not None:
                self._on_fatal(f"{lost.name} failed in this process ({lost.lost}); restart the server")
                return
            for served in self._catalog.all_live():
                for lane in list(served.lanes):
                    self._look_at_canary(served, lane)

    def _give_up_hung_lanes(self) -> None:
        for lane, running in list(self._scheduler.running()):
            predicted_s = running.dispatch.predicted_ns / SECOND_NS
            limit_s = max(self._options.hang_after_s, self._options.hang_after_predictions * predicted_s)
            ran_s = self._absence.ran_s(running.started_ns)
            if ran_s > limit_s:
                tell_stacks()
                self._scheduler.give_up_lane(lane, f"a batch has run for {ran_s:.1f} s")

    def _look_at_canary(self, served: Served, lane: ServedLane) -> None:
        """Give up a lane whose canary hangs; start the canary if no batch has succeeded for a while."""
        if lane.canary_began_ns is not None:
            limit_s = self._options.hang_after_s
            if self._absence.ran_s(lane.canary_began_ns) > limit_s:
                self._metrics.canary_ran(served, "hung")
                self._scheduler.give_up_lane(lane, f"the canary has run for {limit_s:g} s")
        elif not (served.withdrawn or lane.stopping) and self._needs_canary(lane):
            self._tasks.spawn(self._ask_canary(served, lane))

    def _needs_canary(self, lane: ServedLane) -> bool:
        # A running lane is given its time, unless its batches fail: then the canary takes its turn among them.
        if lane.in_flight and lane.last_failure_ns <= lane.last_success_ns:
            return False
        return time.monotonic_ns() - lane.last_success_ns > self._options.canary_after_s * SECOND_NS

    async def _ask_canary(self, served: Served, lane: ServedLane) -> None:
        if lane.stopping:
            return  # it was lost or is leaving
        proved, failure = lane.proved, None
        lane.canary_began_ns = time.monotonic_ns()
        try:
            await self._scheduler.probe(lane, lambda: proved.canary.run(proved.engine, samples=1))
        except Exception as error:  # a wrong answer or any exception of an engine: it is not healthy
            failure = error
        lane.canary_began_ns = None
        if lane not in served.lanes:
            return  # it was given up meanwhile
        if failure is None:
            self._metrics.canary_ran(served, "passed")
            lane.last_success_ns = time.monotonic_ns()
        else:
            self._metrics.canary_ran(served, "failed")
            self._scheduler.give_up_lane(lane, f"the canary failed: {failure}")
