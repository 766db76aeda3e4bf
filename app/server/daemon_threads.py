"""Work that may never end, such as reading from a file system that is away: a thread each, which nobody waits for.

A pool would not do: what hangs in it holds up what comes behind it, and Python waits for a pool's threads when the
process ends.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


class _LooseThread(threading.Thread):
    """Known by its kind, so that those at work can be counted."""


def begin(work: Callable[[], Result], name: str) -> asyncio.Future[Result]:
    """Do it in a thread of its own; what it gives, or raises. Cancelling ends the waiting and not the work."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(how: Callable[[Any], None], what: object) -> None:
        if not future.done():
            how(what)

    def run() -> None:
        how: Callable[[Any], None] = future.set_result
        what: object
        try:
            what = work()
        except BaseException as error:  # whoever waits is to hear of it, whatever it is
            how, what = future.set_exception, error
        with suppress(RuntimeError):  # the loop has been closed, and nobody waits any more
            loop.call_soon_threadsafe(settle, how, what)

    _LooseThread(target=run, name=name, daemon=True).start()
    return future


def own_clock() -> int | None:
    """The clock of what this thread computes, which `cpu_s_of` reads; None where there is none."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.pthread_getcpuclockid(threading.get_ident())


def cpu_s_of(clock: int) -> float | None:
    """What a thread has computed; None where it has ended. Comes from any thread."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return None


def at_work(within_s: float = 0.0) -> list[str]:
    """The names of those that have not ended, when they were given so long to end."""
    latest_s = time.monotonic() + within_s
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _LooseThread)]
    for thread in threads:
        thread.join(max(0.0, latest_s - time.monotonic()))
    return sorted(thread.name for thread in threads if thread.is_alive())
