"""Looks at the store that end, whatever the store does: a model whose folder does not answer is left out, and told.

Knows threads and patience; what a look sees is `app.store_scan`'s.
"""

from __future__ import annotations

import asyncio
from functools import partial

from app.loose_threads import begin
from app.store_scan import ModelLook, Sweep, look_at_model
from models.store import Store

# So long may the look at one model take. It is a few calls to the file system, each of microseconds or a few
# milliseconds; what takes a thousand times as long is away.
_PATIENCE_S = 5.0


class StoreWatch:
    """Looks at one store."""

    def __init__(self, store: Store, patience_s: float = _PATIENCE_S) -> None:
        self._store, self._patience_s = store, patience_s
        self._hanging: dict[str, asyncio.Future[None]] = {}

    async def names(self) -> list[str]:
        """The models' names. Raises OSError where the store cannot be read or does not answer."""
        try:
            return await asyncio.wait_for(begin(self._store.names, "look-at-store"), self._patience_s)
        except TimeoutError:
            raise OSError(f"{self._store.root} does not answer within {self._patience_s:g} s") from None

    async def look(self) -> dict[str, ModelLook]:
        """Every model. Raises OSError where the store cannot be read or does not answer."""
        names = await self.names()
        return await self._look_at(names)

    async def look_at(self, name: str) -> ModelLook:
        """One model. Raises UsageError where the name is none."""
        return (await self._look_at([name]))[name]

    async def _look_at(self, names: list[str]) -> dict[str, ModelLook]:
        found = {name: ModelLook(trouble=self._told(name)) for name in names if name in self._hanging}
        rest: Sweep | None = Sweep([name for name in names if name not in found], partial(look_at_model, self._store))
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
        del self._hanging[name]
        if not work.cancelled():
            work.exception()  # it would have been told

    def _told(self, name: str) -> str:
        return (
            f"{self._store.root / name}: does not answer within {self._patience_s:g} s; see whether its disk is there"
        )
