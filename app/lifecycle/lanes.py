"""How engines come to serve a version, and leave it.

Knows lanes and engines, and records what the scheduler reports of batches and requests. Loads nothing itself except to
replace an engine that was lost, and decides nothing about requests: they wait in the version's queue, whichever lanes
there are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

from convoy.app.engines.base import Engine, is_cpu
from convoy.app.engines.batch import BatchResult, EngineFailure, FailureScope
from convoy.app.engines.parts import Part, check_answer
from convoy.app.lifecycle.catalog import Catalog, Served, ServedLane
from convoy.app.lifecycle.loads import LoadVersion
from convoy.app.lifecycle.tasks import Tasks, to_its_end
from convoy.app.loading.load import LoadedModel, ServedBefore
from convoy.app.loading.proving import ProvedEngine
from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.queues import Dispatch, Lane
from convoy.app.scheduling.request import Done, ModelKey, Outcome, Request
from convoy.app.scheduling.scheduler import Runner, Scheduler
from convoy.app.scheduling.slab import Slab
from convoy.app.server.runtime import begin
from convoy.app.telemetry.ledger import Ledger
from convoy.app.telemetry.metrics import Metrics
from convoy.app.telemetry.ran_batches import BatchRecord

_log = logging.getLogger("convoy")


# Of the statistics' failures; what is not here is the model's or its engine's.
_FAILURES = {Outcome.EXPIRED: "REJECTED", Outcome.HOPELESS: "REJECTED", Outcome.STOPPED: "CANCELED"}


def lane_runner(slab: Slab, engine: Engine) -> Runner:
    """How a lane runs a batch: the requests' slots become views, the engine does the rest.

    Only answers that the model declares leave this place, whatever the engine: readers trust their shapes, and where
    bytes are missing, those of another request would follow.
    """

    def part(request: Request) -> Part:
        batch = _batch(engine, request)
        shapes = tuple([(*batch, *shape) for shape in request.shapes])
        inputs = tuple([slab.tensor(ref) for ref in request.inputs])
        outputs = tuple([None if ref is None else slab.tensor(ref) for ref in request.outputs])
        return Part(request.samples, shapes, inputs, request.wanted, outputs)

    def run(requests: tuple[Request, ...]) -> BatchResult:
        result = engine.run([part(request) for request in requests])
        if [len(answers) for answers in result.answers] != [len(request.wanted) for request in requests]:
            raise EngineFailure(
                "the engine did not answer every request with the outputs that it wanted; this is a bug"
            )
        for request, answers in zip(requests, result.answers, strict=True):
            for index, answer in zip(request.wanted, answers, strict=True):
                spec = engine.outputs[index]
                check_answer(spec, (*_batch(engine, request), *spec.shape), answer)
        return result

    return run


def _batch(engine: Engine, request: Request) -> tuple[int, ...]:
    """The batch dimension of the request's tensors, where they have one."""
    return (request.samples,) if engine.batched else ()


# The threads of a device that failed return at once; those that take longer hang, and are not waited for.
_RETURN_WITHIN_S = 5.0


class Lanes:
    """The engines at work in one core, and the scheduler that gives them work; its `Observer`."""

    def __init__(
        self,
        catalog: Catalog,
        slab: Slab,
        ledger: Ledger,
        tasks: Tasks,
        load_version: LoadVersion,
        replace_within_s: float,
        metrics: Metrics,
        on_replaced: Callable[[Served], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        """`on_replaced` gets a version that was loaded again, `on_fatal` the reason why one could not be."""
        self._catalog, self._slab, self._ledger, self._tasks = catalog, slab, ledger, tasks
        self.scheduler = Scheduler(slab, self)
        self._load_version, self._replace_within_s = load_version, replace_within_s
        self._metrics, self._on_replaced, self._on_fatal = metrics, on_replaced, on_fatal
        self._ids = count(1)
        self._lost: dict[ModelKey, list[asyncio.Task[None]]] = {}
        self._replacing = asyncio.Lock()
        self._page_locker: Engine | None = None  # has the slab's pages locked, or is about to

    def open(self, served: Served, proved: ProvedEngine) -> None:
        """Let an engine that has proved itself work for a version."""
        info, number = proved.engine.info, next(self._ids)
        latency = LatencyModel({point.batch_size: point.median_ms * 1e6 for point in proved.latency})
        lane = Lane(number, info.device, info.batch_sizes, latency, info.slots)
        slots = self.scheduler.state.device_slots
        slots[info.device] = max(info.slots, slots.get(info.device, 1))
        if not info.is_on_cpu and self._page_locker is None:
            self._page_locker = proved.engine
            self._tasks.spawn(self._lock_pages(proved.engine, self._slab.keep_pages()))
        served.lanes.append(ServedLane(lane, proved, last_success_ns=time.monotonic_ns()))
        run = lane_runner(self._slab, proved.engine)
        proved.engine.enter_service()
        self.scheduler.add_lane(served.key, lane, run)

    async def _lock_pages(self, engine: Engine, memory: memoryview) -> None:
        """In a thread: it takes as long as the memory is large. Until then the host gathers what it could read."""
        if not await to_its_end(asyncio.to_thread(engine.page_lock, memory)):
            self._page_locker = None

    async def unlock_pages(self) -> None:
        """Before the requests' memory goes: another program's, at the same address later, is not locked."""
        engine, self._page_locker = self._page_locker, None
        if engine is not None:
            unlocking = begin(partial(engine.page_unlock, self._slab.keep_pages()), "unlock pages")
            await asyncio.wait([unlocking], timeout=_RETURN_WITHIN_S)

    async def swap(self, served: Served, proved: ProvedEngine) -> bool:
        """Let an engine take over from those that give way to it; return when these are closed, whether it did."""
        if served.withdrawn:
            await asyncio.to_thread(proved.engine.close)
            return False
        device = proved.engine.info.device
        before = [one for one in served.at_work if _gives_way(one.lane.device, device)]
        for one in before:
            # In the same turn of the loop as its successor begins: whatever waits goes there.
            one.lane.stopping = True
            one.is_listed = False
        self.open(served, proved)
        by_device = {own.engine.info.device: own for own in served.loaded.engines} | {device: proved}
        by_device = {other: own for other, own in by_device.items() if other == device or not _gives_way(other, device)}
        served.loaded = replace(served.loaded, engines=tuple(by_device.values()))
        await asyncio.gather(*(self._close(served, one) for one in before))
        return True

    def unlist(self, served: Served) -> None:
        """New requests do not find the version any more."""
        for one in served.lanes:
            one.is_listed = False

    async def close_all(self, served: Served, within_s: float | None = None) -> None:
        """Let every engine of a version finish what it has, then give its memory back.

        One that has not finished `within_s` keeps it.
        """
        await asyncio.gather(*(self._close(served, one, within_s) for one in list(served.lanes)))

    def _close(self, served: Served, one: ServedLane, within_s: float | None = None) -> asyncio.Task[None]:
        """All callers that close a lane wait for the same task."""
        if one.closing is None or one.closing.done():
            one.closing = self._tasks.spawn(self._let_go(served, one, within_s))
        return one.closing

    async def _let_go(self, served: Served, one: ServedLane, within_s: float | None) -> None:
        if await self.scheduler.stop_lane(one.lane, within_s):  # else it was lost meanwhile
            await asyncio.to_thread(one.proved.engine.close)
            served.lanes.remove(one)

    # What the scheduler reports

    def batch_ran(self, dispatch: Dispatch, answers: BatchResult, done: list[Done], now_ns: int) -> None:
        key, lane, samples = dispatch.key, dispatch.lane, dispatch.samples
        if (at_work := self._catalog.live(key).lane_of(lane)) is not None:
            at_work.last_success_ns = now_ns
        queued_ns = [one.queue_ns for one in done]
        total_ns = len(done) * now_ns - sum([one.request.arrival_ns for one in done])
        padded = lane.padded(samples)
        self._ledger.batch(key, BatchRecord(lane.device, samples, padded, answers.times, queued_ns, total_ns, now_ns))

    def batch_failed(self, dispatch: Dispatch, reason: str) -> None:
        key = dispatch.key
        if (lane := self._catalog.live(key).lane_of(dispatch.lane)) is not None:
            lane.last_failure_ns = time.monotonic_ns()
        _log.warning("a batch of %d for %s version %d failed: %s", dispatch.samples, key.model, key.version, reason)

    def request_failed(self, done: Done) -> None:
        failure = _FAILURES.get(done.outcome, "BACKEND")
        self._ledger.failed(done.request.key, failure, time.monotonic_ns() - done.request.arrival_ns)

    def lane_lost(self, key: ModelKey, lane: Lane, reason: str, scope: FailureScope) -> None:
        """An engine can run nothing any more. It is loaded again, unless it was leaving."""
        _log.error("an engine of %s version %d on %s is lost: %s", key.model, key.version, lane.device, reason)
        served = self._catalog.live(key)
        one = served.lane_of(lane)
        if one is None:
            return
        self._metrics.engine_lost(served)
        served.lanes.remove(one)
        was_needed = one.is_listed
        one.is_listed = False
        closing = self._tasks.spawn(self._close_lost(one))
        if not was_needed:
            return  # it was leaving anyway
        served.recovers |= scope is FailureScope.DEVICE
        if served.key not in self._lost:
            self._lost[served.key] = []
            self._tasks.spawn(self._replace(served))
        if scope is FailureScope.DEVICE or self.scheduler.has_returned(lane):
            self._lost[served.key].append(closing)

    async def _close_lost(self, one: ServedLane) -> None:
        """Its memory comes back when its threads do, which may be never."""
        await self.scheduler.until_returned(one.lane)
        await asyncio.to_thread(one.proved.engine.close)

    async def _replace(self, served: Served) -> None:
        """Load the version again for the devices where it has lost its engine."""
        # One version at a time: a device that is lost takes engines of several with it.
        async with self._replacing:
            returning = self._lost.pop(served.key)
            if returning:
                await asyncio.wait(returning, timeout=_RETURN_WITHIN_S)
            loaded = None if served.withdrawn else await self._load_again(served)
            if loaded is not None:
                await self._take_over(served, loaded)
                served.recovers = served.key in self._lost
                self._metrics.engine_replaced(served)
                self._on_replaced(served)
                _log.warning("an engine of %s version %d was replaced", served.key.model, served.key.version)

    async def _load_again(self, served: Served) -> LoadedModel | None:
        """The version once more, beside a lost engine that may never give its memory back; None: nothing is left."""
        options = replace(served.options, before=tuple(map(ServedBefore.of, served.loaded.engines)))
        loading = begin(partial(self._load_version, served.loaded.stored, options), "replace")
        try:
            return await asyncio.wait_for(loading, self._replace_within_s)
        except Exception as error:  # whatever it is, nothing else will try again
            if not served.withdrawn:  # else another version took over meanwhile
                reason = str(error) or f"it did not load within {self._replace_within_s:g} s"
                self._on_fatal(f"the engine of {served.key.model} could not be replaced: {reason}")
            return None

    async def _take_over(self, served: Served, loaded: LoadedModel) -> None:
        """Of what was loaded again, take the engines for devices that have none; the others are not needed."""
        has_one = {one.lane.device for one in served.at_work}
        surplus: list[ProvedEngine] = []
        for proved in loaded.engines:
            if served.withdrawn or proved.engine.info.device in has_one:
                surplus.append(proved)
            else:
                self.open(served, proved)
        if not served.withdrawn:
            spec = replace(loaded.spec, priorities=served.spec.priorities)
            served.loaded = replace(loaded, spec=spec, engines=tuple(one.proved for one in served.at_work))
        for proved in surplus:
            await asyncio.to_thread(proved.engine.close)


def _gives_way(device: str, to: str) -> bool:
    """Whether an engine makes room: on the same device, and on the CPU, which serves only where no GPU can."""
    return device == to or is_cpu(device)
