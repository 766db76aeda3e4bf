"""The core: engines, scheduler, metrics and statistics in one object. No HTTP, no globals, no signals.

Any host can run it: it needs one asyncio event loop, `start`, `submit` and `stop`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from app.catalog import Catalog, Served
from app.health import Health, HealthOptions
from app.lane_runner import lane_runner
from app.loading import LoadedModel, LoadOptions, load
from app.metrics import Metrics, TritonMetrics
from app.model_control import ControlOptions, ModelControl
from app.outcomes import refused
from app.scheduling.latency import LatencyModel
from app.scheduling.policy import Dispatch
from app.scheduling.queues import Lane
from app.scheduling.request import BatchAnswers, Done, ModelKey, Outcome, Request
from app.scheduling.scheduler import Scheduler
from app.scheduling.slab import Slab, Slot
from app.shared_memory import SharedMemory
from app.version import VERSION
from models.errors import Overloaded, Unavailable
from models.store import Store, StoredVersion

_log = logging.getLogger("convoy")
DEMO_STORE = Path(__file__).parent.parent / "models" / "demo"


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """What a core is told. `max_queue` in samples."""

    store: Path
    load: LoadOptions
    control: ControlOptions = field(default_factory=ControlOptions)
    max_queue: int = 1024
    max_inflight_bytes: int = 256 << 20
    health: HealthOptions = field(default_factory=HealthOptions)
    allow_shared_memory: bool = False


class Core:
    """Loads what is in a store, answers requests, and knows whether it is well.

    `load_version` can be replaced by tests and simulations. `on_fatal` is told when only a new process
    can help.
    """

    def __init__(
        self,
        options: CoreOptions,
        *,
        load_version: Callable[[StoredVersion, LoadOptions], LoadedModel] = load,
        on_fatal: Callable[[str], None] | None = None,
    ) -> None:
        self.options = options
        self.catalog = Catalog()
        self.metrics = Metrics(VERSION)
        self.shared_memory = SharedMemory(is_allowed=options.allow_shared_memory)
        self.started_s = time.monotonic()
        self.initial_load_done = False
        self.listeners_opening = 0  # ports that will take requests, but do not yet
        self.leaving = False  # said to be not ready, but still serving
        self.draining = False  # taking no new calls
        self.load_failure: str | None = None
        self.control = ModelControl(self, Store.at(options.store), options.control, options.load, load_version)
        self._load_version = load_version
        self._on_fatal = on_fatal or (lambda reason: _log.critical("%s", reason))
        self._request_ids = count(1)
        self._lane_ids = count(1)
        self._generations = count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self.open_calls = 0
        self._no_call_is_open = asyncio.Event()
        self._no_call_is_open.set()

    # Life

    async def start(self) -> None:
        """Begin to load, and return at once; `ready` turns true when everything that can be loaded is."""
        self.slab = Slab(self.options.max_inflight_bytes)
        self.scheduler = Scheduler(self.slab, self)
        self.scheduler.state.device_slots["cpu"] = 1
        self.health = Health(self, self.options.health)
        self.metrics.watch_inflight_bytes(lambda: self.slab.used_bytes)
        self.metrics.registry.register(TritonMetrics(self.catalog.served, self.waiting_samples))
        self.spawn(self._load_initially())
        self.spawn(self.health.watch())

    async def drain(self, timeout_s: float) -> bool:
        """Take no new call; whether every call that had begun ended within the time."""
        self.leaving = self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._no_call_is_open.wait(), timeout_s)
        return self.open_calls == 0

    async def stop(self) -> None:
        """Stop watching and give the engines' memory back. What still runs is abandoned."""
        self.leaving = self.draining = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for served in self.catalog.all_live():
            if served.lane is not None and not served.lane.in_flight:
                await self.scheduler.stop_lane(served.lane)
                served.loaded.engine.close()
        self.control.close()

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

    def begin_call(self) -> None:
        """From here to `end_call` a client waits, and `drain` waits for it. Raises Unavailable when draining.

        A call begins before its body is read: a client that was still sending when the end was announced
        is as much owed an answer as one that waits in the queue.
        """
        if self.draining:
            raise Unavailable("the server is shutting down; send the request to another one")
        self.open_calls += 1
        self._no_call_is_open.clear()

    def end_call(self) -> None:
        """The client has its answer, or has gone."""
        self.open_calls -= 1
        if not self.open_calls:
            self._no_call_is_open.set()

    def reserve(self, nbytes: int) -> Slot:
        """Memory for a body or a tensor. Raises Overloaded when too many bytes are in flight."""
        slot = self.slab.reserve(nbytes)
        if slot is None:
            self.metrics.rejected("memory")
            raise Overloaded(
                f"no room for {nbytes} bytes, {self.slab.used_bytes} of {self.slab.capacity_bytes} are in flight; "
                "send it again later, or raise --max-inflight-mb",
                reason="memory",
                retry_after_s=1.0,
            )
        return slot

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def submit(self, request: Request) -> asyncio.Future[Done]:
        """Queue the request; the future holds how it ended, answered or not.

        Raises Overloaded, DeadlineExceeded or Unavailable when it is not taken; then its slots stay the
        caller's. `check` says whether a Done is an answer.
        """
        served = self.catalog.live(request.key)
        if served.lane is None or served.lane.stopping:
            raise Unavailable(f"the engine of '{request.key.model}' is being replaced; send the request again")
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()

        def on_done(done: Done) -> None:
            if done.outcome is not Outcome.ANSWERED:
                self._count_failure(served, done)
            if not future.done():
                future.set_result(done)
            elif done.outcome is Outcome.ANSWERED:
                # Whoever waited stopped waiting a moment ago, so nobody else gives the memory back.
                for slot in request.slots():
                    self.slab.free(slot)

        refusal = self.scheduler.submit(request, on_done)
        if refusal is not None:
            served.statistics.record_failure("REJECTED", time.monotonic_ns() - request.arrival_ns)
            self.metrics.rejected(refusal.reason.value)
            raise refused(request, refusal, self.options.max_queue)
        return future

    def cancel(self, request: Request, reason: str) -> None:
        """Nobody waits any more. The request leaves the queue; a run that has begun goes on for the others.

        `reason` is one of the statistics' failures; a request that runs will be counted as a success.
        """
        if request.id in self.scheduler.state.waiting:
            served = self.catalog.live(request.key)
            served.statistics.record_failure(reason, time.monotonic_ns() - request.arrival_ns)
        self.scheduler.cancel(request.id)

    def waiting_samples(self, served: Served) -> int:
        queue = self.scheduler.state.queues.get(served.key)
        return queue.waiting if queue is not None else 0

    def _count_failure(self, served: Served, done: Done) -> None:
        reason = {Outcome.EXPIRED: "REJECTED", Outcome.HOPELESS: "REJECTED", Outcome.STOPPED: "CANCELED"}.get(
            done.outcome, "BACKEND"
        )
        served.statistics.record_failure(reason, time.monotonic_ns() - done.request.arrival_ns)
        if done.outcome in (Outcome.EXPIRED, Outcome.HOPELESS):
            self.metrics.rejected(done.outcome.value)

    # What the scheduler reports

    def batch_ran(self, dispatch: Dispatch, answers: BatchAnswers, done: list[Done]) -> None:
        served = self.catalog.live(dispatch.key)
        now_ns = time.monotonic_ns()
        served.last_success_ns = now_ns
        served.statistics.record_batch(done, dispatch.samples, answers.times, now_ns)
        self.metrics.batch_ran(served, dispatch.samples, dispatch.lane.padded(dispatch.samples), answers.times)
        for one in done:
            self.metrics.stage(served, "queue", one.queue_ns)

    def batch_failed(self, dispatch: Dispatch, reason: str) -> None:
        key = dispatch.key
        self.catalog.live(key).last_failure_ns = time.monotonic_ns()
        _log.warning("a batch of %d for %s version %d failed: %s", dispatch.samples, key.model, key.version, reason)

    def lane_lost(self, key: ModelKey, lane: Lane, reason: str) -> None:
        _log.error("the engine of %s version %d is lost: %s", key.model, key.version, reason)
        served = self.catalog.live(key)
        served.lane = None
        if not served.withdrawn:
            self.spawn(self._replace(served))

    # Loading

    async def _load_initially(self) -> None:
        try:
            await self.control.load_initially()
        except Exception as error:  # a bug, or a store that cannot be read: never a server that waits for ever
            _log.exception("loading the store failed")
            self.load_failure = f"loading {self.options.store} failed: {error}"
        self.initial_load_done = True
        loaded = self.catalog.served()
        if not loaded and not self.control.may_be_empty and self.load_failure is None:
            self.load_failure = (
                f"there is no model in {self.options.store} that can be served; export one with `convoy export`"
            )
        if self.load_failure is not None:
            self._on_fatal(self.load_failure)
            return
        _log.info("ready: %s", ", ".join(f"{s.key.model}/{s.key.version}" for s in loaded) or "no model is loaded")
        await self.control.watch()

    def put_into_service(self, loaded: LoadedModel) -> None:
        """Let requests find an engine that has proved itself; what it replaces answers the rest of its own."""
        stored = loaded.stored
        served = Served(ModelKey(stored.name, stored.version, next(self._generations)), loaded)
        limit = max(1, loaded.spec.max_batch_size)
        self.scheduler.add_queue(served.key, max_batch=limit, max_waiting=self.options.max_queue)
        self._open_lane(served)
        before = self.catalog.add(served)
        if before is not None:
            served.statistics = before.statistics  # readers difference them, so they never begin anew
            self.metrics.forget_engine(before)
            self.spawn(self._retire(before))
        self.metrics.watch_model(served, lambda: self.waiting_samples(served))

    def take_out_of_service(self, name: str, version: int) -> asyncio.Task[None] | None:
        """Let no new request find a version; the task ends when its engine is closed. None: it is not served."""
        served = self.catalog.withdraw(name, version)
        if served is None:
            return None
        self.metrics.forget_engine(served)
        return self.spawn(self._retire(served))

    async def _retire(self, served: Served) -> None:
        """Wait for the last request that has found it, then give the engine's memory back."""
        await served.until_unused()
        if served.lane is not None:
            await self.scheduler.stop_lane(served.lane)
            await asyncio.to_thread(served.loaded.engine.close)
        self.scheduler.remove_queue(served.key, "the model was unloaded")
        self.catalog.forget(served)
        place = served.key.model, served.key.version
        if not any((other.key.model, other.key.version) == place for other in self.catalog.all_live()):
            self.metrics.forget_model(served)
        _log.info("unloaded %s version %d", *place)

    def _open_lane(self, served: Served) -> None:
        loaded = served.loaded
        latency = LatencyModel({point.batch_size: point.median_ms * 1e6 for point in loaded.latency})
        lane_id = next(self._lane_ids)
        served.lane = Lane(lane_id, lane_id, loaded.engine.info.device, loaded.engine.info.batch_sizes, latency)
        served.last_success_ns = time.monotonic_ns()
        served.canary_passed = True
        self.scheduler.add_lane(served.key, served.lane, lane_runner(self.slab, loaded.engine))

    async def _replace(self, served: Served) -> None:
        """Load the same version again beside the lost engine, which may never give its memory back."""
        # The loader's only thread may be stuck with the engine that is lost, so this one has its own.
        replacer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replace")
        loop, options = asyncio.get_running_loop(), self.control.load_options(served.key.model)
        loading = loop.run_in_executor(replacer, self._load_version, served.loaded.stored, options)
        try:
            loaded = await asyncio.wait_for(loading, self.options.health.replace_within_s)
        except Exception as error:  # whatever it is, nobody else will try again
            if served.withdrawn:
                return  # another version took over meanwhile
            reason = str(error) or f"it did not load within {self.options.health.replace_within_s:g} s"
            self._on_fatal(f"the engine of {served.key.model} could not be replaced: {reason}")
            return
        finally:
            replacer.shutdown(wait=False)
        if served.withdrawn:
            loaded.engine.close()
            return
        served.loaded = loaded
        self._open_lane(served)
        _log.warning("the engine of %s version %d was replaced", served.key.model, served.key.version)

    def spawn(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """A task that ends with the core."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
