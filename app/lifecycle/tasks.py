"""Background work that ends with the core: loads, builds, leaving engines, looks at the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Tasks:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def cancel(self) -> None:
        """Cancel everything that has begun, and wait for its end."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


def ignore_error(done: asyncio.Future[Any]) -> None:
    """A callback for tasks whose error may be ignored: it is not reported as never retrieved."""
    if not done.cancelled():
        done.exception()


async def to_its_end(work: Awaitable[Result]) -> Result:
    """Wait for the result. Cancellation takes effect after it, because a thread cannot be stopped."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
