"""The core: engines, scheduler, metrics and statistics in one object. No HTTP, no globals, no signals.

Any host can run it: it needs one asyncio event loop, `start`, `submit` and `stop`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from convoy.app.engines.plan_builder import PlanBuilder
from convoy.app.lifecycle.catalog import Catalog, Served
from convoy.app.lifecycle.control import ControlOptions, ModelControl
from convoy.app.lifecycle.health import Health, HealthOptions
from convoy.app.lifecycle.lanes import Lanes
from convoy.app.lifecycle.upgrades import Upgrades
from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.app.loading.proving import ProvedEngine
from convoy.app.scheduling.policy import Dispatch
from convoy.app.scheduling.queues import Lane
from convoy.app.scheduling.request import BatchAnswers, Done, ModelKey, Outcome, Request, Spent
from convoy.app.scheduling.scheduler import Reach, Scheduler
from convoy.app.scheduling.slab import SharedPart, Slab, Slot
from convoy.app.submission.inference import ServedLike
from convoy.app.submission.open_calls import Reception
from convoy.app.submission.refusals import no_room, refused
from convoy.app.submission.shared_memory import SharedMemory
from convoy.app.telemetry.gpu_metrics import GpuWatch
from convoy.app.telemetry.metrics import EngineMetrics, Metrics, TritonMetrics
from convoy.app.telemetry.tally import Tally
from convoy.app.version import VERSION
from convoy.models.errors import Unavailable
from convoy.models.store import Store, StoredVersion

_log = logging.getLogger("convoy")


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """What a core is told. `max_queue` in samples.

    `shared_memory`: this core's part of the memory that it has in common with edge processes.
    """

    store: Path
    load: LoadOptions
    control: ControlOptions = field(default_factory=ControlOptions)
    max_queue: int = 1024
    max_inflight_bytes: int = 256 << 20
    health: HealthOptions = field(default_factory=HealthOptions)
    allow_shared_memory: bool = False
    shared_memory: SharedPart | None = None


class Core(Reception):
    """Loads what is in a store, answers requests, and knows whether it is well.

    `load_version` and `plan_builder` can be replaced by tests and simulations. `on_loaded` is told when everything
    has been loaded that can be, just before the core is ready; `on_fatal` when only a new process can help.
    """

    def __init__(
        self,
        options: CoreOptions,
        *,
        load_version: Callable[[StoredVersion, LoadOptions], LoadedModel] = load,
        on_loaded: Callable[[], None] = lambda: None,
        on_fatal: Callable[[str], None] | None = None,
        plan_builder: PlanBuilder | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.catalog = Catalog()
        self.metrics = Metrics(VERSION)
        self.tally = Tally(self.metrics, self.catalog.live)
        self.shared_memory = SharedMemory(is_allowed=options.allow_shared_memory)
        self.started_s = time.monotonic()
        self.initial_load_done = False
        self.listeners_opening = 0  # ports that will take requests, but do not yet
        self.load_failure: str | None = None
        self.control = ModelControl(self, Store.at(options.store), options.control, options.load, load_version)
        self.lanes = Lanes(self, load_version)
        self.upgrades = Upgrades(self, plan_builder or PlanBuilder())
        self.gpus = GpuWatch(options.load.machine.gpus)
        self._on_loaded = on_loaded
        self.on_fatal = on_fatal or (lambda reason: _log.critical("%s", reason))
        self._request_ids = count(1)
        self._generations = count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self.bytes_elsewhere = 0  # in flight in edge processes

    # Life

    async def start(self) -> None:
        """Begin to load, and return at once; `ready` turns true when everything that can be loaded is."""
        self.slab = Slab(self.options.max_inflight_bytes, self.options.shared_memory)
        if self.options.load.machine.gpus:
            self.slab.keep_pages()  # before an edge is told anything, which may give back pages of its own accord
        self.scheduler = Scheduler(self.slab, self)
        self.health = Health(self, self.options.health)
        self.metrics.watch_inflight_bytes(lambda: self.inflight_bytes)
        self.metrics.registry.register(EngineMetrics(self.catalog.served))
        self.metrics.registry.register(TritonMetrics(self.catalog.served, self.scheduler.waiting_samples))
        self.metrics.registry.register(self.gpus)
        self.gpus.start()
        self.spawn(self._load_initially())
        self.spawn(self.health.watch())

    async def stop(self) -> None:
        """Stop watching and give the engines' memory back. What still runs is abandoned."""
        self.leaving = self.draining = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for served in self.catalog.all_live():
            if not any(one.lane.in_flight for one in served.lanes):
                await self.lanes.close_all(served)
        self.gpus.stop()

    @property
    def inflight_bytes(self) -> int:
        """Bytes of memory that requests hold, here and in edge processes."""
        return self.slab.used_bytes + self.bytes_elsewhere

    @property
    def ready(self) -> bool:
        """Initial load ended, every loaded model's canary passed, no engine hangs, not draining."""
        served = self.catalog.served()
        is_open = self.initial_load_done and not self.listeners_opening and not self.leaving
        return is_open and (bool(served) or self.control.may_be_empty) and all(s.ready for s in served)

    def not_ready_reason(self) -> str:
        """What keeps the core from being ready, for whoever is paged."""
        if self.leaving:
            return "the server is shutting down"
        if not self.initial_load_done:
            return "the models are being loaded"
        if self.listeners_opening:
            return "a port is being opened"
        unwell = [f"'{s.key.model}' version {s.key.version}" for s in self.catalog.served() if not s.ready]
        return f"not ready: {', '.join(unwell)}" if unwell else "no model is loaded"

    # Requests

    def reserve(self, nbytes: int) -> Slot:
        """Memory for a body or a tensor. Raises Overloaded when too many bytes are in flight."""
        slot = self.slab.reserve(nbytes)
        if slot is None:
            self.metrics.rejected("memory")
            raise no_room(nbytes, self.slab)
        return slot

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def take(self, request: Request, on_done: Callable[[Done], None]) -> None:
        """Queue the request. Raises Overloaded, DeadlineExceeded or Unavailable when it is not taken.

        Then its slots stay the caller's.
        """
        served = self.catalog.live(request.key)
        if not served.takes_requests:
            raise Unavailable(f"the engine of '{request.key.model}' is being replaced; send the request again")

        refusal = self.scheduler.submit(request, on_done)
        if refusal is not None:
            served.statistics.record_failure("REJECTED", time.monotonic_ns() - request.arrival_ns)
            self.metrics.rejected(refusal.reason.value)
            raise refused(request, refusal, self.options.max_queue)

    def cancel(self, request: Request, reason: str) -> None:
        """Nobody waits any more. The request leaves the queue; a run that has begun goes on for the others.

        `reason` is one of the statistics' failures; a request that runs will be counted as a success.
        """
        if request.id in self.scheduler.state.waiting:
            served = self.catalog.live(request.key)
            served.statistics.record_failure(reason, time.monotonic_ns() - request.arrival_ns)
        self.scheduler.cancel(request.id)

    def stage_took(self, key: ModelKey, stage: str, ns: int) -> None:
        """A stage of one request that runs at the edge has ended: `decode` or `encode`."""
        self.tally.stage(key, stage, ns)

    def call_ended(self, key: ModelKey | None, protocol: str, outcome: str, ns: int) -> None:
        """A call has its answer, or nobody waits for one. `key` is None where no model was found."""
        self.tally.call(key, protocol, outcome, ns)

    def call_answered(self, key: ModelKey, protocol: str, spent: Spent) -> None:
        """Both at once, for a call that ended well."""
        self.tally.answered(key, protocol, spent)

    def waiting_samples(self, served: ServedLike) -> int:
        return self.scheduler.waiting_samples(served.key)

    @property
    def max_queue(self) -> int:
        """How many samples may wait for a version."""
        return self.options.max_queue

    # What the scheduler reports

    def batch_ran(self, dispatch: Dispatch, answers: BatchAnswers, done: list[Done]) -> None:
        served = self.catalog.live(dispatch.key)
        now_ns = time.monotonic_ns()
        if (lane := served.lane_of(dispatch.lane)) is not None:
            lane.last_success_ns = now_ns
        samples, queued_ns = dispatch.samples, [one.queue_ns for one in done]
        total_ns = len(done) * now_ns - sum([one.request.arrival_ns for one in done])
        served.statistics.record_batch(samples, answers.times, total_ns, queued_ns)
        self.metrics.of(served).batch_ran(samples, dispatch.lane.padded(samples), answers.times, queued_ns)

    def batch_failed(self, dispatch: Dispatch, reason: str) -> None:
        key = dispatch.key
        if (lane := self.catalog.live(key).lane_of(dispatch.lane)) is not None:
            lane.last_failure_ns = time.monotonic_ns()
        _log.warning("a batch of %d for %s version %d failed: %s", dispatch.samples, key.model, key.version, reason)

    def request_failed(self, done: Done) -> None:
        served = self.catalog.live(done.request.key)
        reason = {Outcome.EXPIRED: "REJECTED", Outcome.HOPELESS: "REJECTED", Outcome.STOPPED: "CANCELED"}.get(
            done.outcome, "BACKEND"
        )
        served.statistics.record_failure(reason, time.monotonic_ns() - done.request.arrival_ns)
        if done.outcome in (Outcome.EXPIRED, Outcome.HOPELESS):
            self.metrics.rejected(done.outcome.value)

    def lane_lost(self, key: ModelKey, lane: Lane, reason: str, reach: Reach) -> None:
        self.lanes.lost(key, lane, reason, reach)

    # Loading

    async def _load_initially(self) -> None:
        try:
            await self.control.load_initially()
        except Exception as error:  # a bug, or a store that cannot be read: never a server that waits for ever
            _log.exception("loading the store failed")
            self.load_failure = f"loading {self.options.store} failed: {error}"
        self.initial_load_done = self.catalog.is_complete = True
        self.listeners_opening += 1  # those that must hear first what there is
        self.catalog.changed()
        await self.catalog.until_known()
        self._on_loaded()
        self.listeners_opening -= 1
        loaded = self.catalog.served()
        if not loaded and not self.control.may_be_empty and self.load_failure is None:
            self.load_failure = (
                f"there is no model in {self.options.store} that can be served; export one with `convoy export`"
            )
        if self.load_failure is not None:
            self.on_fatal(self.load_failure)
            return
        _log.info("ready: %s", ", ".join(f"{s.key.model}/{s.key.version}" for s in loaded) or "no model is loaded")

    def put_into_service(self, loaded: LoadedModel) -> None:
        """Let requests find engines that have proved themselves; what they replace answers the rest of its own."""
        stored = loaded.stored
        served = Served(ModelKey(stored.name, stored.version, next(self._generations)), loaded)
        before = self.catalog.add(served)
        if before is not None:
            served.statistics = before.statistics  # readers difference them, so they never begin anew
            self._retire(before)
        limit = max(1, loaded.spec.max_batch_size)
        self.scheduler.add_queue(served.key, max_batch=limit, max_waiting=self.options.max_queue)
        for proved in loaded.engines:
            self.lanes.open(served, proved)
        self.metrics.watch_model(served, lambda: self.waiting_samples(served))
        self.upgrades.begin(served)

    def take_out_of_service(self, name: str, version: int) -> asyncio.Task[None] | None:
        """Let no new request find a version; the task ends when its engine is closed. None: it is not served."""
        served = self.catalog.withdraw(name, version)
        if served is None:
            return None
        return self._retire(served)

    async def swap_engine(self, served: Served, proved: ProvedEngine) -> bool:
        """Let a warm engine that has passed its canary take over from those of the version on its device or the CPU.

        Returns when these have answered what they had and have been closed. No request waits for that, fails or
        is answered by both. False: the version has been withdrawn meanwhile, and the new engine is closed unused.
        """
        return await self.lanes.swap(served, proved)

    def _retire(self, served: Served) -> asyncio.Task[None]:
        self.upgrades.end(served)
        self.lanes.unlist(served)
        return self.spawn(self._run_dry(served))

    async def _run_dry(self, served: Served) -> None:
        """Wait for the last request that has found it, then give the engines' memory back."""
        await served.until_unused()
        await self.lanes.close_all(served)
        self.scheduler.remove_queue(served.key, "the model was unloaded")
        self.tally.count()
        self.catalog.forget(served)
        self.metrics.forget_meters(served)
        place = served.key.model, served.key.version
        if not any((other.key.model, other.key.version) == place for other in self.catalog.all_live()):
            self.metrics.forget_model(served)
        _log.info("unloaded %s version %d", *place)

    def spawn(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """A task that ends with the core."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
