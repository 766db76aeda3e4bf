"""Background work that ends with the core: loads, builds, engines that leave, looks at the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Tasks:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def cancel(self) -> None:
        """Return when everything has ended that has begun so far."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


def ignore_error(done: asyncio.Future[Any]) -> None:
    """A callback for work that may be left alone: its error is not reported as one that was never retrieved."""
    if not done.cancelled():
        done.exception()


async def to_its_end(work: Awaitable[Result]) -> Result:
    """Its result. Cancelling takes effect when it has ended, because a thread cannot be stopped."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
