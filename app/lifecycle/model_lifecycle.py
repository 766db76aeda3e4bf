"""How a version comes into service, is withdrawn, and is drained.

Knows what a version has in the catalog, in the scheduler and in the metrics. Loads nothing;
`convoy.app.lifecycle.lanes` adds and removes engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from convoy.app.lifecycle.catalog import Catalog, Served
from convoy.app.lifecycle.lanes import Lanes
from convoy.app.lifecycle.tasks import Tasks
from convoy.app.lifecycle.upgrades import Upgrades
from convoy.app.loading.load import LoadedModel, LoadOptions
from convoy.app.scheduling.request import ModelKey
from convoy.app.scheduling.scheduler import Scheduler
from convoy.app.telemetry.ledger import Ledger
from convoy.app.telemetry.metrics import Metrics
from convoy.models.priorities import Priorities

_log = logging.getLogger("convoy")
# At the end of the process no request runs any more; what an engine runs then is a canary, or hangs.
_ENDS_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Of one model. `max_waiting` in samples. None: the server's value, or the model's own."""

    max_waiting: int | None = None
    levels: int | None = None
    default_level: int | None = None

    def priorities(self, own: Priorities) -> Priorities:
        """The priorities of a model whose own are `own`; a default level beyond the last becomes the last."""
        levels = own.levels if self.levels is None else self.levels
        default = own.default if self.default_level is None else self.default_level
        return Priorities(levels, min(default, levels))


@dataclass(frozen=True, slots=True)
class QueueRules:
    """Of all models: `max_waiting` samples for each, and the options of some, by name."""

    max_waiting: int = 1024
    by_model: Mapping[str, QueueOptions] = field(default_factory=dict)

    def of(self, model: str) -> QueueOptions:
        return self.by_model.get(model) or QueueOptions()

    def max_waiting_of(self, model: str) -> int:
        own = self.of(model).max_waiting
        return self.max_waiting if own is None else own


class ModelLifecycle:
    """The versions of one core."""

    def __init__(
        self,
        catalog: Catalog,
        scheduler: Scheduler,
        lanes: Lanes,
        upgrades: Upgrades,
        metrics: Metrics,
        ledger: Ledger,
        tasks: Tasks,
        rules: QueueRules,
    ) -> None:
        self._catalog, self._scheduler, self._lanes, self._upgrades = catalog, scheduler, lanes, upgrades
        self._metrics, self._ledger, self._tasks, self._rules = metrics, ledger, tasks, rules
        self._generations = count(1)

    def put_into_service(self, loaded: LoadedModel, options: LoadOptions) -> None:
        """Let requests find engines that have proved themselves; the version that they replace finishes its own."""
        stored = loaded.stored
        key = ModelKey(stored.name, stored.version, next(self._generations))
        served = Served(key, loaded, options, before_looking=self._ledger.count)
        served.own_priorities = loaded.spec.priorities
        self._put_priorities(served)
        before = self._catalog.add(served)
        if before is not None:
            served.go_on_from(before)
            self._retire(before)
        limit, priorities = max(1, loaded.spec.max_batch_size), served.spec.priorities
        self._scheduler.add_queue(
            served.key,
            max_batch=limit,
            max_waiting=self._rules.max_waiting_of(stored.name),
            levels=priorities.levels,
            default_level=priorities.default,
        )
        for proved in loaded.engines:
            self._lanes.open(served, proved)
        self._metrics.watch_model(served, lambda: self._scheduler.waiting_samples(served.key))
        self._upgrades.begin(served)

    def change_rules(self, rules: QueueRules) -> None:
        """Apply other rules to all queues, present and future."""
        self._rules = rules
        for served in self._catalog.served():
            self._put_priorities(served)
            priorities, max_waiting = served.spec.priorities, rules.max_waiting_of(served.key.model)
            self._scheduler.change_queue(
                served.key, max_waiting=max_waiting, levels=priorities.levels, default_level=priorities.default
            )

    def _put_priorities(self, served: Served) -> None:
        model, asked = served.key.model, self._rules.of(served.key.model)
        priorities = asked.priorities(served.own_priorities)
        if asked.default_level is not None and asked.default_level > priorities.levels:
            _log.warning(
                "models.%s.default_priority is %d, and %s has %d levels: requests that ask for none have level %d; "
                "lower it, or set priority_levels",
                model,
                asked.default_level,
                model,
                priorities.levels,
                priorities.default,
            )
        served.loaded = replace(served.loaded, spec=replace(served.spec, priorities=priorities))

    def take_out_of_service(self, name: str, version: int) -> asyncio.Task[None] | None:
        """Let no new request find a version; the task ends when its engine is closed. None: it is not served."""
        served = self._catalog.withdraw(name, version)
        return None if served is None else self._retire(served)

    async def close(self) -> None:
        """Free the memory of all engines, except those that still run something after a moment."""
        await asyncio.gather(*(self._close(served, _ENDS_WITHIN_S) for served in self._catalog.all_live()))

    async def _close(self, served: Served, within_s: float | None = None) -> None:
        await self._lanes.close_all(served, within_s)
        if served.loaded.copy is not None:
            await asyncio.to_thread(served.loaded.copy.close)

    def _retire(self, served: Served) -> asyncio.Task[None]:
        self._upgrades.end(served)
        self._lanes.unlist(served)
        return self._tasks.spawn(self._run_dry(served))

    async def _run_dry(self, served: Served) -> None:
        """Wait for the last request that has found it, then free the engines' memory."""
        await served.until_unused()
        await self._close(served)
        self._scheduler.remove_queue(served.key, "the model was unloaded")
        self._ledger.count()
        self._catalog.forget(served)
        place = served.key.model, served.key.version
        if not any((other.key.model, other.key.version) == place for other in self._catalog.all_live()):
            self._metrics.forget_model(served)
        _log.info("unloaded %s version %d", *place)
