"""An event loop in its own thread, which any thread and any other loop can use.

Work ends exactly once, even if the loop hangs or is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from convoy.app.server.runtime import run
from convoy.models.errors import Unavailable, UsageError

Result = TypeVar("Result")
_AT_WORK: weakref.WeakSet[PrivateLoop] = weakref.WeakSet()


class PrivateLoop:
    """Runs from construction to `close`. Any thread of the process that made it may use it."""

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._refusal = ""  # why it takes no more work
        self.failure: str | None = None  # why it was lost
        self._is_last = False
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None
        ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._live, args=(ready,), name=name, daemon=True)
        self._thread.start()
        self._loop = ready.result()
        _AT_WORK.add(self)

    def begin(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """Start a coroutine on the loop; cancelling the future cancels it.

        Raises Unavailable after `close` and `fail`, and UsageError in a forked process.
        """
        if os.getpid() != self._process:
            raise UsageError(
                f"this Engine was created in process {self._process}, before the fork; its threads do not exist in "
                "this process. Create an Engine in each process, such as in the worker initializer"
            )
        with self._lock:
            if self._refusal:
                raise Unavailable(self._refusal)
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def result(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Return or raise the coroutine's result. An interrupt while waiting cancels it."""
        future = self.begin(work)
        try:
            return future.result()
        except CancelledError:
            if not self._refusal:
                raise
            raise Unavailable(self._refusal) from None
        except BaseException:
            future.cancel()  # does nothing if it has ended
            raise

    async def ask(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The same for `await`, on any loop."""
        future, task = self.begin(work), asyncio.current_task()
        assert task is not None, "an awaiting caller is a task"
        cancelled_before = task.cancelling()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._refusal and task.cancelling() == cancelled_before:
                raise Unavailable(self._refusal) from None
            raise

    def fail(self, reason: str) -> None:
        """Fail waiting callers now and later ones at once. From any thread, even while the loop hangs."""
        self.failure = self.failure or reason
        self._refuse(f"the engine failed: {reason}; create a new one, in a new process if that fails too")
        self._give_up()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Take no more work, run `last` on the loop, cancel what has not ended, and end the thread.

        Does nothing the second time, or in a forked process, where the thread does not exist.
        """
        if os.getpid() != self._process:
            return
        self._refuse("the engine is closed; create a new one")
        self._last = self._last or last
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:  # otherwise the garbage collector ran on the loop itself
            # An orderly end needs less; a thread that hangs in an engine is left behind.
            self._thread.join(60.0 if self.failure is None else 5.0)
        self._give_up()

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refusal = self._refusal or reason

    def _give_up(self) -> None:
        for future in [*self._pending]:
            future.cancel()

    def _live(self, ready: Future[asyncio.AbstractEventLoop]) -> None:
        async def until_closed() -> None:
            self._stopping = asyncio.Event()
            ready.set_result(asyncio.get_running_loop())
            await self._stopping.wait()
            if self._last is not None:
                await self._last()

        try:
            run(until_closed())
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            if not self._is_last:  # otherwise the loop started one more thread while it ended
                raise


@atexit.register
def _end_with_program() -> None:
    """No thread may be inside a native library at interpreter shutdown."""
    for loop in [*_AT_WORK]:
        loop._is_last = True
        loop.close()
