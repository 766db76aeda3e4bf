"""Looks at the store that end, whatever the store does: a model whose folder does not answer is left out, and told.

Knows threads and patience; what a look sees is `convoy.app.lifecycle.store_scan`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from weakref import WeakValueDictionary

from convoy.app.lifecycle.remote_store import RemoteStore
from convoy.app.lifecycle.store_scan import ModelLook, StoreLook, Sweep, look_at_model, names_in
from convoy.app.server.daemon_threads import begin
from convoy.models.store import Store

# So long may the look at one model take. It is a few calls to the file system, each of microseconds or a few
# milliseconds; what takes a thousand times as long is away.
_PATIENCE_S = 5.0
# A library that speaks to a store elsewhere has time-outs and retries of its own, which end before that.
_PATIENCE_WITH_NETWORKS_S = 120.0


class StoreWatch:
    """Looks at one store."""

    def __init__(
        self,
        store: Store | RemoteStore,
        on_answer: Callable[[str], None] = lambda name: None,
        patience_s: float | None = None,
    ) -> None:
        """`on_answer` hears the name of a model whose folder had not answered, and now has."""
        default_s = _PATIENCE_WITH_NETWORKS_S if isinstance(store, RemoteStore) else _PATIENCE_S
        self._store, self._on_answer, self._patience_s = store, on_answer, patience_s or default_s
        self._hanging: dict[str, asyncio.Future[None]] = {}
        self._naming: asyncio.Future[tuple[list[str], tuple[str, ...]]] | None = None
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def names(self) -> list[str]:
        """The models' names. Raises OSError where the store cannot be read or does not answer."""
        return (await self._names())[0]

    async def _names(self) -> tuple[list[str], tuple[str, ...]]:
        # All who ask meanwhile share one thread: there may be many of them, and it may never end.
        if self._naming is None:
            self._naming = begin(partial(names_in, self._store), "look-at-store")
            self._naming.add_done_callback(self._named)
        work = self._naming
        await asyncio.wait([work], timeout=self._patience_s)
        if not work.done():
            raise OSError(f"{self._store.root} does not answer within {self._patience_s:g} s")
        return work.result()

    def _named(self, work: asyncio.Future[tuple[list[str], tuple[str, ...]]]) -> None:
        self._naming = None
        if not work.cancelled():
            work.exception()  # there may be nobody left to hear of it

    async def look(self) -> StoreLook:
        """Every model. Raises OSError where the store cannot be read or does not answer."""
        names, misplaced = await self._names()
        return StoreLook(await self._look_at(names), misplaced)

    async def look_at(self, name: str) -> ModelLook:
        """One model. Raises UsageError where the name is none."""
        lock = self._asking.setdefault(name, asyncio.Lock())
        async with lock:  # those who come while it hangs hear of that, and begin no thread each
            return (await self._look_at([name]))[name]

    async def _look_at(self, names: list[str]) -> dict[str, ModelLook]:
        found = {name: ModelLook(trouble=self._told(name)) for name in names if name in self._hanging}
        asked = [name for name in names if name not in found]
        rest = Sweep(asked, partial(look_at_model, self._store)) if asked else None
        while rest is not None:
            sweep, work = rest, begin(rest.run, "look-at-models")
            seen = -1
            while not work.done() and len(sweep.found) > seen:  # it gets on
                seen = len(sweep.found)
                await asyncio.wait({work}, timeout=self._patience_s)
            if work.done():
                work.result()
                return found | sweep.found
            at, rest = sweep.give_up()
            found |= sweep.found
            if at is not None and at not in found:
                found[at] = ModelLook(trouble=self._told(at))
                self._hanging[at] = work
                work.add_done_callback(partial(self._answers_again, at))
        return found

    def _answers_again(self, name: str, work: asyncio.Future[None]) -> None:
        if not work.cancelled():
            work.exception()  # it would have been told
        if self._hanging.get(name) is work:
            del self._hanging[name]
            self._on_answer(name)

    def _told(self, name: str) -> str:
        return (
            f"{self._store.root}/{name}: does not answer within {self._patience_s:g} s; see whether its disk is there"
        )
