"""Threads that decode, so that the event loop never computes.

Bounded twice: in threads by the CPU budget, and in work that waits, because a hundred small files can
hold an hour of decoding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from convoy.models.errors import Overloaded

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class DecodePool:
    """At most `threads` jobs run and `max_waiting` wait."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="decode")
        self._limit = threads + max_waiting
        self._unfinished = 0

    async def run(self, job: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """The job's result. Raises what it raises, and Overloaded when too many jobs wait.

        Returns, even when cancelled, only after the job has ended: it may be writing into a slot.
        """
        if self._unfinished >= self._limit:
            raise Overloaded(
                f"{self._unfinished} uploads already wait to be decoded; send it again later",
                reason="decode_queue",
                retry_after_s=1.0,
            )
        return await self.run_anyway(job, *args, **kwargs)

    async def run_anyway(
        self, job: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The same for a job that must not be turned away, because its request has been answered already."""
        self._unfinished += 1
        future = asyncio.wrap_future(self._executor.submit(job, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise
        finally:
            self._unfinished -= 1
            # A failed job's traceback holds its arguments, a whole upload; through this name it would hold
            # itself as well, until the garbage collector comes by.
            del future

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
