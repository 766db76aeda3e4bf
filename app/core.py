"""The core: engines, scheduler, metrics and statistics in one object, without HTTP, globals or signals.

A host needs one asyncio event loop, and calls `start` and `stop`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from convoy.app.calls.open_calls import OpenCalls
from convoy.app.calls.shared_memory import SharedMemory
from convoy.app.engines.plan_builder import PlanBuilder
from convoy.app.lifecycle.catalog import Catalog
from convoy.app.lifecycle.health import Health, HealthOptions
from convoy.app.lifecycle.load_watch import CoreLoad, LoadWatch
from convoy.app.lifecycle.loads import LoadVersion, load_giving_way
from convoy.app.lifecycle.model_control import ControlOptions, ModelControl
from convoy.app.lifecycle.model_lifecycle import ModelLifecycle, QueueRules
from convoy.app.lifecycle.remote_store import RemoteStore
from convoy.app.lifecycle.served_metrics import engine_metrics, shape_metrics, triton_metrics
from convoy.app.lifecycle.tasks import Tasks
from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.app.scheduling.request import ModelKey
from convoy.app.scheduling.slab import Slab
from convoy.app.server import logs
from convoy.app.telemetry.gpu_metrics import GpuWatch
from convoy.app.telemetry.ledger import Ledger
from convoy.app.telemetry.metrics import Metrics, process_metrics
from convoy.app.telemetry.tracing import Tracing
from convoy.app.version import VERSION
from convoy.models.errors import ConvoyError, UsageError
from convoy.models.store import Store, StoredVersion
from convoy.models.version_policy import allows

_log = logging.getLogger("convoy")


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """The options of a core. `load` applies to models that are not in `load_by_model`.

    `model_name` is the name of the model if the store is a single model.
    """

    store: Path | RemoteStore
    load: LoadOptions
    control: ControlOptions = field(default_factory=ControlOptions)
    load_by_model: Mapping[str, LoadOptions] = field(default_factory=dict)
    queues: QueueRules = field(default_factory=QueueRules)
    max_inflight_bytes: int = 256 << 20
    health: HealthOptions = field(default_factory=HealthOptions)
    allow_shared_memory: bool = False
    model_name: str = ""


class Core:
    """Loads the models of a store, answers requests, and reports its health.

    Tests and simulations can replace `load_version` and `plan_builder`. `on_loaded` is called when everything that can
    be loaded is, just before the core is ready; `on_fatal` when only a new process can help.
    """

    def __init__(
        self,
        options: CoreOptions,
        *,
        load_version: LoadVersion = load,
        on_loaded: Callable[[], None] = lambda: None,
        on_fatal: Callable[[str], None] = lambda reason: _log.critical("%s", reason),
        plan_builder: PlanBuilder | None = None,
    ) -> None:
        self.leaving = False  # not ready, but still serving
        self.calls = OpenCalls()
        self.waiting_to_decode: Callable[[], int] = lambda: 0
        self.tracing: Tracing | None = None  # None: tracing is off
        self._store, self.load_options = _open(options), options.load
        self._on_loaded, self._on_fatal = on_loaded, on_fatal
        self.started_s = time.monotonic()
        self.listeners_opening = 0  # listeners that have not started yet
        self.load_failure: str | None = None
        self.next_request_id = count(1).__next__
        self._tasks = tasks = Tasks()
        if isinstance(self._store, RemoteStore):
            load_version = partial(_load_fetched, self._store, load_version)
        load_version = partial(load_giving_way, load_version)
        gpus = options.load.machine.gpus
        try:
            self.slab = Slab(options.max_inflight_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise UsageError(f"cannot allocate memory for requests ({error}); lower --max-inflight-mb") from error
        if gpus:
            self.slab.keep_pages()
        self.shared_memory = SharedMemory(is_allowed=options.allow_shared_memory)
        self.catalog = catalog = Catalog()
        self.metrics = metrics = Metrics(VERSION)
        ledger = Ledger(metrics, catalog.live)
        self.stage_took, self.call_ended = ledger.stage, ledger.call
        self.exemplify, self.request_failed = ledger.exemplify, ledger.failed
        self.turned_away = ledger.turned_away
        self.gpus = GpuWatch(gpus)
        self.lifecycle = ModelLifecycle(
            *(catalog, self.slab, ledger, metrics, tasks, options.queues, load_version),
            *(options.health.replace_within_s, plan_builder or PlanBuilder(), on_fatal),
        )
        self.scheduler = scheduler = self.lifecycle.scheduler
        self.control = ModelControl(
            *(catalog, self.lifecycle, tasks, self._store, options.control, load_version, metrics),
            *(options.load, options.load_by_model),
            is_leaving=lambda: self.leaving,
        )
        self.load_watch = LoadWatch(catalog, scheduler)
        self._health = Health(catalog, scheduler, on_fatal, options.health, gpus, metrics, tasks)
        self._watch_whole()
        metrics.collect(partial(engine_metrics, catalog))
        metrics.collect(partial(shape_metrics, catalog))
        metrics.collect(partial(triton_metrics, catalog, scheduler.waiting_samples))
        metrics.collect(self.gpus.collect)
        metrics.collect(partial(process_metrics, logs.dropped_lines))

    # Lifecycle

    async def start(self) -> None:
        """Begin to load and return at once. `ready` becomes true when everything that can be loaded is."""
        self.gpus.start()
        self._tasks.spawn(self._load_initially())
        self._tasks.spawn(self._health.watch())
        self._tasks.spawn(self.load_watch.watch())

    async def stop(self) -> None:
        """Stop watching the store, free the engines and send the last spans. Running batches are abandoned."""
        self.leaving = self.calls.draining = True
        await self._tasks.cancel()
        await self.lifecycle.close()
        self.gpus.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close, 2.0)

    async def _load_initially(self) -> None:
        try:
            await self.control.load_initially()
        except Exception as error:  # a bug or an unreadable store: the server must not wait for ever
            if not isinstance(error, OSError | ConvoyError):
                _log.exception("loading the store failed")
            self.load_failure = f"loading {self._store.root} failed: {error}"
        self.catalog.is_complete = True
        self._on_loaded()
        loaded = self.catalog.served()
        if not loaded and not self.control.may_be_empty and self.load_failure is None:
            self.load_failure = f"no model in {self._store.root} can be served; export one with `convoy export`"
        if self.load_failure is not None:
            self._on_fatal(self.load_failure)
            return
        _log.info("ready: %s", ", ".join(f"{s.key.model}/{s.key.version}" for s in loaded) or "no model is loaded")

    def _watch_whole(self) -> None:
        watch = self.metrics.watch
        watch("convoy_ready", "1 while the server answers requests", lambda: self.ready)
        watch("convoy_open_calls", "Calls in progress", lambda: self.open_calls)
        watch("convoy_inflight_bytes", "Bytes of memory held by requests", lambda: self.slab.used_bytes)
        watch("convoy_inflight_limit_bytes", "Bytes of memory for requests", lambda: self.slab.capacity_bytes)
        told = "Share of the server's capacity in use, over five seconds"
        watch("convoy_utilization_ratio", told, lambda: self.current_load().utilisation)

    @property
    def ready(self) -> bool:
        """Whether the initial load has ended, all canaries passed, no engine hangs and the core is not draining."""
        return not self.not_ready_reason()

    def not_ready_reason(self) -> str:
        """Why the core is not ready, for the operator; empty if it is."""
        if self.leaving:
            return "the server is shutting down"
        if not self.catalog.is_complete:
            return "models are being loaded"
        if self.listeners_opening:
            return "a port is being opened"
        served = self.catalog.served()
        if unwell := [f"'{s.key.model}' version {s.key.version}" for s in served if not s.ready]:
            return f"not ready: {', '.join(unwell)}"
        return "" if served or self.control.may_be_empty else "no model is loaded"

    def max_waiting(self, key: ModelKey) -> int:
        """The queue limit of a served version, in samples."""
        return self.scheduler.state.queues[key].max_waiting

    def current_load(self) -> CoreLoad:
        """The load over the last seconds."""
        return self.load_watch.load

    def trace_with(self, tracing: Tracing | None) -> None:
        """Trace calls and batches from now on. The core closes the tracer."""
        self.tracing = tracing
        self.scheduler.trace_batch = None if tracing is None else tracing.batch_ended

    @property
    def open_calls(self) -> int:
        """The number of open calls."""
        return len(self.calls)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for open ones. Returns whether all ended in time."""
        self.leaving = True
        return await self.calls.drain(timeout_s)


def _load_fetched(
    store: RemoteStore, load_version: LoadVersion, stored: StoredVersion, options: LoadOptions
) -> LoadedModel:
    store.fetch(stored)
    return load_version(stored, options)


def _open(options: CoreOptions) -> Store | RemoteStore:
    """Raises UsageError."""
    if isinstance(options.store, RemoteStore):
        return options.store
    store = Store.at(options.store, options.model_name)
    if options.model_name and store.only is None:
        _log.warning("%s is a folder of models; --model-name is ignored", store.root)
    wanted = options.control.versions
    if store.is_flat and not allows(wanted, 1):
        raise UsageError(f"{store.root} is a single version, number 1; remove --version-policy")
    return store
