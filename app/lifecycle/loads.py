"""Loads versions in turn, each within a time limit, so that none blocks another.

One load at a time is fastest and measures undisturbed. If one takes long, the next begins beside it, as long as there
are cores and memory for both. A load that computes nothing, because its disk does not answer, occupies neither and is
counted separately. A load that exceeds the limit is given up; if it ends later, its engines are closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.memory import available_bytes, give_back_freed, peak_resident_bytes, resident_bytes
from convoy.app.loading.load import LoadedModel, LoadOptions
from convoy.app.server.runtime import begin, cpu_s_of, give_way, own_clock
from convoy.models.errors import BundleError
from convoy.models.store import StoredVersion

_log = logging.getLogger("convoy")
LoadVersion = Callable[[StoredVersion, LoadOptions], LoadedModel]
# Most models take less. A load beside a longer one measures less exactly, which is better than waiting.
_PATIENCE_S = 6.0


def load_giving_way(load_version: LoadVersion, stored: StoredVersion, options: LoadOptions) -> LoadedModel:
    """Load at a lower priority, which the engine's compute threads inherit; for a thread that ends with the load.

    With GPUs the priority stays, because their libraries' threads only wait.
    """
    if not options.machine.gpus:
        give_way()
    try:
        return load_version(stored, options)
    finally:
        give_back_freed()


@dataclass(slots=True, eq=False)
class _Running:
    """A load that has begun. `cpu_s` is the CPU time of its thread at the last look, from `clock`.

    `resident_bytes` and `peak_bytes` are the process's at its beginning; `is_alone` means that nothing else has loaded
    meanwhile.
    """

    resident_bytes: int
    peak_bytes: int
    is_alone: bool
    clock: int | None = None
    cpu_s: float = 0.0
    is_young: bool = True
    is_idle: bool = False


class Loads:
    """The loads of one core. `on_late` gets a version whose given-up load has ended after all."""

    def __init__(
        self,
        load_version: LoadVersion,
        limit_s: float,
        on_late: Callable[[StoredVersion], None],
    ) -> None:
        self._load_version, self._limit_s, self._on_late = load_version, limit_s, on_late
        self._largest_bytes = 0  # the most memory that a load has taken
        self._patience_s = min(_PATIENCE_S, limit_s / 2)
        self._turns = asyncio.Lock()  # held by the load whose turn is next
        self._changed = asyncio.Event()  # another load may be allowed to begin now
        self._running: set[_Running] = set()
        self._hanging: set[tuple[str, int]] = set()

    async def load(self, stored: StoredVersion, options: LoadOptions) -> LoadedModel:
        """Raises BundleError if it takes too long, and whatever loading raises."""
        place = stored.name, stored.version
        if place in self._hanging:
            raise BundleError(f"{stored.folder}: an earlier load still hangs; check whether its disk responds")
        own = await self._turn()
        work = begin(partial(self._begun, own, stored, options), f"load-{stored.name}-{stored.version}")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limit_s):
                    await self._watch(own, work)
        finally:
            self._running.discard(own)
            self._learn(own)
            self._changed.set()
            if not work.done():
                self._hanging.add(place)
                work.add_done_callback(partial(self._came_late, stored))
        if not work.done():
            raise BundleError(
                f"{stored.folder}: did not load within {self._limit_s:g} s; check whether its disk responds, "
                "or raise --load-timeout-s"
            )
        return work.result()

    def _begun(self, own: _Running, stored: StoredVersion, options: LoadOptions) -> LoadedModel:
        own.clock = own_clock()
        return self._load_version(stored, options)

    async def _turn(self) -> _Running:
        """Wait until one more load may run, in the order of the calls."""
        async with self._turns:
            while not self._may_begin():
                self._changed.clear()
                await self._changed.wait()
            own = _Running(resident_bytes(), peak_resident_bytes(), is_alone=not self._at_work())
            for other in self._running:
                other.is_alone = other.is_idle
            self._running.add(own)
            return own

    def _may_begin(self) -> bool:
        at_work = self._at_work()
        if not at_work:
            return len(self._running) < 32  # idle threads cost little, but a store may have thousands of models
        if any(one.is_young for one in at_work) or len(at_work) >= cpu_budget():
            return False
        # Each may need as much as the largest so far. The other half of the memory is for what is served meanwhile.
        free = available_bytes()
        return free is None or (len(at_work) + 1) * self._largest_bytes <= free / 2

    def _at_work(self) -> list[_Running]:
        return [one for one in self._running if not one.is_idle]

    async def _watch(self, own: _Running, work: asyncio.Future[LoadedModel]) -> None:
        """Watch a load until it ends."""
        while not (await asyncio.wait({work}, timeout=self._patience_s))[0]:
            own.is_young = False
            own.is_idle = self._was_idle(own)
            self._learn(own)
            self._changed.set()

    def _learn(self, own: _Running) -> None:
        """Learn from the memory of a load that had the process to itself."""
        if own.is_alone and not own.is_idle:
            peak = peak_resident_bytes()
            # If an earlier peak is higher, this one's is unknown.
            highest = peak if peak > own.peak_bytes else resident_bytes()
            self._largest_bytes = max(self._largest_bytes, highest - own.resident_bytes)

    def _was_idle(self, own: _Running) -> bool:
        """Whether its thread has computed nothing since the last look. Without a clock it counts as busy."""
        cpu_s = None if own.clock is None else cpu_s_of(own.clock)
        if cpu_s is None:
            return False
        before, own.cpu_s = own.cpu_s, cpu_s
        # On a busy machine, a load that computes still gets a few hundredths of a core.
        return cpu_s - before < 0.01 * self._patience_s

    def _came_late(self, stored: StoredVersion, work: asyncio.Future[LoadedModel]) -> None:
        self._hanging.discard((stored.name, stored.version))
        if not work.cancelled() and work.exception() is None:
            begin(partial(_close, work.result()), f"close-{stored.name}")
        _log.warning("the load of %s version %d that had timed out has ended", stored.name, stored.version)
        self._on_late(stored)


def _close(loaded: LoadedModel) -> None:
    for proved in loaded.engines:
        proved.engine.close()
