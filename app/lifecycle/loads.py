"""Versions being loaded: in turns, each within a time limit, and none in the way of another.

One at a time is quickest, and what is measured meanwhile is measured in peace. One that takes long lets the next one
begin beside it. One that takes too long is given up; its thread goes on until whatever it waits for lets it go, and
what it brings then is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from convoy.app.host.daemon_threads import begin
from convoy.app.host.priority import give_way
from convoy.app.loading.load import LoadedModel, LoadOptions
from convoy.models.errors import BundleError
from convoy.models.store import StoredVersion

_log = logging.getLogger("convoy")
LoadVersion = Callable[[StoredVersion, LoadOptions], LoadedModel]
# Most models take less. A load that takes more is at work for long, or hangs; what loads beside it is measured in less
# peace, which is better than not at all.
_PATIENCE_S = 6.0


def load_giving_way(load_version: LoadVersion, stored: StoredVersion, options: LoadOptions) -> LoadedModel:
    """Load in a thread that gives way, and so do those by which an engine will compute on the CPU: it starts them.

    For a thread of its own, which ends with the load. With GPUs it does not: their libraries' threads compute nothing,
    and are waited for.
    """
    if not options.machine.gpus:
        give_way()
    return load_version(stored, options)


class Loads:
    """The loads of one core. `on_late` hears of a version whose given-up load has ended after all."""

    def __init__(self, load_version: LoadVersion, limit_s: float, on_late: Callable[[StoredVersion], None]) -> None:
        self._load_version, self._limit_s, self._on_late = load_version, limit_s, on_late
        self._turn = asyncio.Semaphore(1)
        self._hanging: set[tuple[str, int]] = set()

    async def load(self, stored: StoredVersion, options: LoadOptions) -> LoadedModel:
        """Raises BundleError where it takes too long, and whatever loading raises."""
        place = stored.name, stored.version
        if place in self._hanging:
            raise BundleError(f"{stored.folder}: a load that was given up still hangs; see whether its disk answers")
        await self._turn.acquire()
        turn = _Turn(self._turn, min(_PATIENCE_S, self._limit_s / 2))
        work = begin(partial(self._load_version, stored, options), f"load-{stored.name}-{stored.version}")
        try:
            await asyncio.wait({work}, timeout=self._limit_s)
        finally:
            turn.end()
            if not work.done():
                self._hanging.add(place)
                work.add_done_callback(partial(self._came_late, stored))
        if not work.done():
            raise BundleError(
                f"{stored.folder}: did not load within {self._limit_s:g} s; see whether its disk answers, "
                "or give it more with --load-timeout-s"
            )
        return work.result()

    def _came_late(self, stored: StoredVersion, work: asyncio.Future[LoadedModel]) -> None:
        self._hanging.discard((stored.name, stored.version))
        if not work.cancelled() and work.exception() is None:
            begin(partial(_close, work.result()), f"close-{stored.name}")
        _log.warning("the load of %s version %d that was given up has ended", stored.name, stored.version)
        self._on_late(stored)


class _Turn:
    """The turn to load, given on when the load ends or has taken long."""

    def __init__(self, semaphore: asyncio.Semaphore, patience_s: float) -> None:
        self._semaphore: asyncio.Semaphore | None = semaphore
        self._timer = asyncio.get_running_loop().call_later(patience_s, self.end)

    def end(self) -> None:
        """A second time it does nothing."""
        self._timer.cancel()
        if self._semaphore is not None:
            self._semaphore.release()
            self._semaphore = None


def _close(loaded: LoadedModel) -> None:
    for proved in loaded.engines:
        proved.engine.close()
