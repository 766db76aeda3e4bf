"""How a version goes into service with its engines, is withdrawn, and is drained.

Manages a version in the catalog, the scheduler and the metrics, and records the scheduler's reports on batches and
requests. Loads only to replace a lost engine. Decides nothing about requests: they wait in the version's queue,
whatever its lanes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from convoy.app.engines.base import Engine, is_cpu
from convoy.app.engines.batch import BatchResult, EngineFailure, FailureScope
from convoy.app.engines.parts import Part, check_answer
from convoy.app.engines.plan_builder import PlanBuilder
from convoy.app.lifecycle.catalog import Catalog, Served, ServedLane
from convoy.app.lifecycle.loads import LoadVersion
from convoy.app.lifecycle.tasks import Tasks, to_its_end
from convoy.app.lifecycle.upgrades import Upgrades
from convoy.app.loading.load import LoadedModel, LoadOptions, ServedBefore
from convoy.app.loading.proving import ProvedEngine
from convoy.app.scheduling.latency import LatencyModel
from convoy.app.scheduling.queues import Dispatch, Lane
from convoy.app.scheduling.request import Done, ModelKey, Outcome, Request
from convoy.app.scheduling.scheduler import Runner, Scheduler
from convoy.app.scheduling.slab import Slab
from convoy.app.server.runtime import begin
from convoy.app.telemetry.ledger import Ledger
from convoy.app.telemetry.metrics import Metrics
from convoy.app.telemetry.statistics import BatchRecord
from convoy.models.priorities import Priorities

_log = logging.getLogger("convoy")
# The threads of a failed device return at once; those that take longer hang and are not waited for.
_RETURN_WITHIN_S = 5.0
# At the end of the process no request is running; an engine that still runs is in its canary, or hangs.
_ENDS_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """The options of one model. `max_waiting` is in samples. None means the server's value, or the model's own."""

    max_waiting: int | None = None
    levels: int | None = None
    default_level: int | None = None

    def priorities(self, own: Priorities) -> Priorities:
        """The priorities of a model with its `own`; a default level beyond the last becomes the last."""
        levels = own.levels if self.levels is None else self.levels
        default = own.default if self.default_level is None else self.default_level
        return Priorities(levels, min(default, levels))


@dataclass(frozen=True, slots=True)
class QueueRules:
    """The rules of all models: `max_waiting` samples for each, and the options of some, by name."""

    max_waiting: int = 1024
    by_model: Mapping[str, QueueOptions] = field(default_factory=dict)


# The kinds of failures in the statistics; others are the model's or its engine's.
_FAILURES = {Outcome.EXPIRED: "REJECTED", Outcome.HOPELESS: "REJECTED", Outcome.STOPPED: "CANCELED"}


def lane_runner(slab: Slab, engine: Engine) -> Runner:
    """Makes the function with which a lane runs a batch: slots become views, and the engine does the rest.

    Only answers that match the model's declaration leave this place, whatever the engine: readers rely on their shapes,
    and behind a short answer are bytes of another request.
    """
    outputs = engine.outputs

    def batch_of(request: Request) -> tuple[int, ...]:
        """The batch dimension of the request's tensors, if they have one."""
        return (request.samples,) if engine.batched else ()

    def part(request: Request) -> Part:
        batch = batch_of(request)
        shapes = tuple([(*batch, *shape) for shape in request.shapes])
        inputs = tuple([slab.tensor(ref) for ref in request.inputs])
        places = tuple([None if ref is None else slab.tensor(ref) for ref in request.outputs])
        return Part(request.samples, shapes, inputs, request.wanted, places)

    def run(requests: tuple[Request, ...]) -> BatchResult:
        result = engine.run([part(request) for request in requests])
        if [len(answers) for answers in result.answers] != [len(request.wanted) for request in requests]:
            raise EngineFailure("the engine did not return the requested outputs for every request; this is a bug")
        for request, answers in zip(requests, result.answers, strict=True):
            batch = batch_of(request)
            for index, answer in zip(request.wanted, answers, strict=True):
                check_answer(outputs[index], (*batch, *outputs[index].shape), answer)
        return result

    return run


class ModelLifecycle:
    """The versions of one core, and the scheduler of their engines; it is its `Observer`."""

    def __init__(
        self,
        catalog: Catalog,
        slab: Slab,
        ledger: Ledger,
        metrics: Metrics,
        tasks: Tasks,
        rules: QueueRules,
        load_version: LoadVersion,
        replace_within_s: float,
        plan_builder: PlanBuilder,
        on_fatal: Callable[[str], None],
    ) -> None:
        """`on_fatal` gets the reason why an engine could not be replaced."""
        self._catalog, self._slab, self._ledger, self._metrics = catalog, slab, ledger, metrics
        self._tasks, self._rules, self._on_fatal = tasks, rules, on_fatal
        self._load_version, self._replace_within_s = load_version, replace_within_s
        self.scheduler = Scheduler(slab, self)
        self.upgrades = Upgrades(plan_builder, self.scheduler.probe, self.swap, tasks, metrics)
        self._generations, self._lane_ids = count(1), count(1)
        self._lost: dict[ModelKey, list[asyncio.Task[None]]] = {}
        self._replacing = asyncio.Lock()
        self._page_locker: Engine | None = None  # it has the slab's pages locked, or is about to

    # Versions

    def put_into_service(self, loaded: LoadedModel, options: LoadOptions) -> None:
        """Let requests find proved engines; the version that they replace finishes its requests."""
        stored = loaded.stored
        key = ModelKey(stored.name, stored.version, next(self._generations))
        served = Served(key, loaded, loaded.spec, options, self._ledger.count)
        before = self._catalog.add(served)
        if before is not None:
            served.go_on_from(before)
            self._retire(before)
        limit = max(1, loaded.spec.max_batch_size)
        self.scheduler.add_queue(key, max_batch=limit, max_waiting=self._rules.max_waiting)
        self._apply_rules(served)
        for proved in loaded.engines:
            self._open(served, proved)
        self._metrics.watch_model(served, lambda: self.scheduler.waiting_samples(served.key))
        self.upgrades.begin(served)

    def change_rules(self, rules: QueueRules) -> None:
        """Apply other rules to all queues, present and future."""
        self._rules = rules
        for served in self._catalog.served():
            self._apply_rules(served)

    def _apply_rules(self, served: Served) -> None:
        model = served.key.model
        asked = self._rules.by_model.get(model, QueueOptions())
        priorities = asked.priorities(served.loaded.spec.priorities)
        if asked.default_level is not None and asked.default_level > priorities.levels:
            _log.warning(
                "models.%s.default_priority is %d, but %s has %d levels: requests without a priority get level %d; "
                "lower it, or set priority_levels",
                *(model, asked.default_level, model, priorities.levels, priorities.default),
            )
        served.spec = replace(served.spec, priorities=priorities)
        self.scheduler.change_queue(
            served.key,
            max_waiting=self._rules.max_waiting if asked.max_waiting is None else asked.max_waiting,
            levels=priorities.levels,
            default_level=priorities.default,
        )

    def take_out_of_service(self, name: str, version: int) -> asyncio.Task[None] | None:
        """Hide a version from new requests; the task ends when its engine is closed. None if it is not served."""
        served = self._catalog.withdraw(name, version)
        return None if served is None else self._retire(served)

    async def close(self) -> None:
        """Free all engines, except those that still run something after a moment."""
        await asyncio.gather(*(self._close_all(served, _ENDS_WITHIN_S) for served in self._catalog.all_live()))
        engine, self._page_locker = self._page_locker, None
        if engine is not None:
            # Before the memory of requests is freed: other memory at this address later is not locked.
            unlocking = begin(partial(engine.page_unlock, self._slab.keep_pages()), "unlock pages")
            await asyncio.wait([unlocking], timeout=_RETURN_WITHIN_S)

    async def _close_all(self, served: Served, within_s: float | None = None) -> None:
        """Let every engine of a version finish its work, then free it.

        An engine that has not finished `within_s` keeps its memory.
        """
        await asyncio.gather(*(self._close(served, lane, within_s) for lane in served.lanes))
        if served.loaded.copy is not None:
            await asyncio.to_thread(served.loaded.copy.close)

    def _retire(self, served: Served) -> asyncio.Task[None]:
        self.upgrades.end(served)
        return self._tasks.spawn(self._run_dry(served))

    async def _run_dry(self, served: Served) -> None:
        """Wait for the last request that has found it, then free its engines."""
        await served.until_unused()
        await self._close_all(served)
        self.scheduler.remove_queue(served.key, "the model was unloaded")
        self._ledger.count()
        self._catalog.forget(served)
        place = served.key.model, served.key.version
        if not any((other.key.model, other.key.version) == place for other in self._catalog.all_live()):
            self._metrics.forget_model(served)
        _log.info("unloaded %s version %d", *place)

    # Engines

    def _open(self, served: Served, proved: ProvedEngine) -> None:
        """Let a proved engine work for a version."""
        info = proved.engine.info
        latency = LatencyModel({point.batch_size: point.median_ms * 1e6 for point in proved.latency})
        shape = (next(self._lane_ids), info.device, info.batch_sizes, latency, info.slots)
        lane = ServedLane(*shape, proved=proved, last_success_ns=time.monotonic_ns())
        slots = self.scheduler.state.device_slots
        slots[info.device] = max(info.slots, slots.get(info.device, 1))
        if not info.is_on_cpu and self._page_locker is None:
            self._page_locker = proved.engine
            self._tasks.spawn(self._lock_pages(proved.engine, self._slab.keep_pages()))
        served.lanes.append(lane)
        proved.engine.enter_service()
        self.scheduler.add_lane(served.key, lane, lane_runner(self._slab, proved.engine))

    async def _lock_pages(self, engine: Engine, memory: memoryview) -> None:
        """Runs in a thread, because it takes long for large memory. Until then the host gathers."""
        if not await to_its_end(asyncio.to_thread(engine.page_lock, memory)):
            self._page_locker = None

    async def swap(self, served: Served, proved: ProvedEngine) -> bool:
        """Let an engine take over from those that it replaces. Returns, when these are closed, whether it did."""
        if served.withdrawn:
            await asyncio.to_thread(proved.engine.close)
            return False
        device = proved.engine.info.device
        # The CPU serves only if no GPU can.
        before = [lane for lane in served.at_work if lane.device == device or is_cpu(lane.device)]
        for lane in before:
            # In the same loop iteration in which its successor begins, so that all waiting requests go there.
            lane.stopping = True
        self._open(served, proved)
        by_device = {own.engine.info.device: own for own in served.loaded.engines} | {device: proved}
        kept = tuple(own for other, own in by_device.items() if other == device or not is_cpu(other))
        served.loaded = replace(served.loaded, engines=kept)
        await asyncio.gather(*(self._close(served, lane) for lane in before))
        return True

    def _close(self, served: Served, lane: ServedLane, within_s: float | None = None) -> asyncio.Task[None]:
        """All callers that close a lane wait for the same task."""
        if lane.closing is None or lane.closing.done():
            lane.closing = self._tasks.spawn(self._let_go(served, lane, within_s))
        return lane.closing

    async def _let_go(self, served: Served, lane: ServedLane, within_s: float | None) -> None:
        if await self.scheduler.stop_lane(lane, within_s):  # otherwise it was lost meanwhile
            await asyncio.to_thread(lane.proved.engine.close)
            served.lanes.remove(lane)

    # Reports of the scheduler, on lanes that were opened here

    def batch_ran(self, dispatch: Dispatch, answers: BatchResult, done: list[Done], now_ns: int) -> None:
        lane, samples = dispatch.lane, dispatch.samples
        assert isinstance(lane, ServedLane)
        lane.last_success_ns = now_ns
        queued_ns = [one.queue_ns for one in done]
        total_ns = len(done) * now_ns - sum([one.request.arrival_ns for one in done])
        padded = lane.padded(samples)
        record = BatchRecord(lane.device, samples, padded, answers.times, queued_ns, total_ns, now_ns)
        self._ledger.batch(dispatch.key, record)

    def batch_failed(self, dispatch: Dispatch, reason: str) -> None:
        key, lane = dispatch.key, dispatch.lane
        assert isinstance(lane, ServedLane)
        lane.last_failure_ns = time.monotonic_ns()
        _log.warning(
            "a batch of %d samples for %s version %d failed: %s", dispatch.samples, key.model, key.version, reason
        )

    def request_failed(self, done: Done) -> None:
        failure = _FAILURES.get(done.outcome, "BACKEND")
        self._ledger.failed(done.request.key, failure, time.monotonic_ns() - done.request.arrival_ns)

    def lane_lost(self, key: ModelKey, lane: Lane, reason: str, scope: FailureScope) -> None:
        """An engine is lost. It is loaded again, unless it was leaving."""
        assert isinstance(lane, ServedLane)
        _log.error(
            "an engine of %s version %d on %s failed and will be replaced: %s",
            key.model,
            key.version,
            lane.device,
            reason,
        )
        served = self._catalog.live(key)
        self._metrics.engine_lost(served)
        served.lanes.remove(lane)
        closing = self._tasks.spawn(self._close_lost(lane))
        if served.withdrawn or lane.closing is not None:
            return
        served.recovers |= scope is FailureScope.DEVICE
        if key not in self._lost:
            self._lost[key] = []
            self._tasks.spawn(self._replace(served))
        if scope is FailureScope.DEVICE or self.scheduler.has_returned(lane):
            self._lost[key].append(closing)

    async def _close_lost(self, lane: ServedLane) -> None:
        """Its memory is freed when its threads return, which may never happen."""
        await self.scheduler.until_returned(lane)
        await asyncio.to_thread(lane.proved.engine.close)

    async def _replace(self, served: Served) -> None:
        """Load the version again for the devices on which it has lost its engine.

        A lost engine may never free its memory, so it is waited for only briefly.
        """
        # One version at a time, because a lost device takes the engines of several versions with it.
        async with self._replacing:
            returning = self._lost.pop(served.key)
            if returning:
                await asyncio.wait(returning, timeout=_RETURN_WITHIN_S)
            if served.withdrawn:
                return
            options = replace(served.options, before=tuple(map(ServedBefore.of, served.loaded.engines)))
            loading = begin(partial(self._load_version, served.loaded.stored, options), "replace")
            try:
                loaded = await asyncio.wait_for(loading, self._replace_within_s)
            except Exception as error:  # whatever it is, nothing else would try again
                if not served.withdrawn:  # else another version took over meanwhile
                    reason = str(error) or f"it did not load within {self._replace_within_s:g} s"
                    self._on_fatal(f"the engine of {served.key.model} could not be replaced: {reason}")
                return
            await self._take_over(served, loaded)
            served.recovers = served.key in self._lost
            self._metrics.engine_replaced(served)
            self.upgrades.begin(served)
            _log.warning("an engine of %s version %d was replaced", served.key.model, served.key.version)

    async def _take_over(self, served: Served, loaded: LoadedModel) -> None:
        """Use the new engines for devices that have none; the others are not needed."""
        has_one = {lane.device for lane in served.at_work}
        surplus: list[ProvedEngine] = []
        for proved in loaded.engines:
            if served.withdrawn or proved.engine.info.device in has_one:
                surplus.append(proved)
            else:
                self._open(served, proved)
        if not served.withdrawn:
            served.spec = replace(loaded.spec, priorities=served.spec.priorities)
            served.loaded = replace(loaded, engines=tuple(lane.proved for lane in served.at_work))
        for proved in surplus:
            await asyncio.to_thread(proved.engine.close)
