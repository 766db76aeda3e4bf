"""The process: system settings before it serves, threads for work that may never end, and how it ends."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from convoy.app.server import logs

_log = logging.getLogger("convoy")

Result = TypeVar("Result")


def raise_file_limit() -> None:
    """Raise the limit of open files: the usual soft limit of 1,024 is too low for a server's connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def give_large_allocations_back() -> None:
    """Let the C library return a freed upload to the system at once.

    glibc adapts to such sizes after the first one and keeps the next ones in heaps per thread; after some large uploads
    the process would stay several times larger than `--max-inflight-mb` allows.
    """
    with suppress(OSError, AttributeError):  # another C library behaves differently
        m_mmap_threshold = -3  # from malloc.h
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 8 << 20)


def give_freed_memory_back() -> None:
    """Return memory that was freed in small pieces and that the C library keeps; takes some milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def collect_only_what_comes() -> None:
    """Exempt existing objects from garbage collection, and collect from now on.

    A server keeps a hundred thousand objects from its start. Scanning them would stop it for a tenth of a second every
    few thousand requests.
    """
    gc.freeze()
    gc.enable()


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end, on the fastest available event loop."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


def give_way() -> None:
    """Lower the priority of this thread, and of those that it starts, for good.

    Does nothing if it would affect the whole process, or if the system forbids it, as for hardened services.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            # A third of the weight that Linux gives to others. With 3 and with 10, fewer requests were answered in
            # time.
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 5)


class _LooseThread(threading.Thread):
    """A class of its own, so that running ones can be counted."""


def begin(work: Callable[[], Result], name: str) -> asyncio.Future[Result]:
    """Run a function in its own thread. Cancelling ends the waiting and not the work."""
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # the caller gets it, whatever it is
            done.set_exception(error)

    waiting = asyncio.wrap_future(done)
    _LooseThread(target=run, name=name, daemon=True).start()
    return waiting


def own_clock() -> int | None:
    """The CPU clock of this thread, for `cpu_s_of`; None if there is none."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.pthread_getcpuclockid(threading.get_ident())


def cpu_s_of(clock: int) -> float | None:
    """The CPU time of a thread in seconds; None if it has ended. Called from any thread."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return None


def at_work(within_s: float = 0.0) -> list[str]:
    """The names of those that have not ended within that time."""
    latest_s = time.monotonic() + within_s
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _LooseThread)]
    for thread in threads:
        thread.join(max(0.0, latest_s - time.monotonic()))
    return sorted(thread.name for thread in threads if thread.is_alive())


_WELL_MEANT_S = 0.5  # what is about to end anyway needs less


def handle_signals(stop: Callable[[], Coroutine[None, None, None]], read_again: Callable[[], None]) -> None:
    """SIGTERM and SIGINT: run `stop` in a task; a second signal ends the process at once.

    SIGHUP: `read_again`, unless the process is ending.
    """
    loop, stopping = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def stop_once(number: int) -> None:
        if stopping:
            _log.warning("second signal: exiting now")
            logs.flush(_WELL_MEANT_S)
            os._exit(128 + number)
        stopping.add(loop.create_task(stop()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_once, number)
    loop.add_signal_handler(signal.SIGHUP, lambda: None if stopping else read_again())


def end_if_held_up(code: int) -> None:
    """End the process here and now if threads are still running that may never end; otherwise do nothing.

    Python would not wait for them, but the libraries that they use would be torn down.
    """
    if stuck := at_work(within_s=_WELL_MEANT_S):
        _log.warning("exiting although these threads are still running: %s", ", ".join(stuck))
        end_now(code)


def end_for(reason: str, stop: Callable[[int], None], *, is_lost: bool) -> None:
    """Log why nothing can be served any more, and `stop` with that exit code; at once if an engine `is_lost`.

    Then a thread hangs inside the engine, so an orderly end might hang as well.
    """
    _log.critical("%s", reason)
    if is_lost:
        end_now(70)  # only a new process helps
    stop(1)


def end_within(seconds: float, code: Callable[[], int]) -> None:
    """Make sure that the process ends, even if its orderly end never does."""

    def end() -> None:
        _log.error("the shutdown took longer than %g s; exiting now", seconds)
        end_now(code())

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def end_now(code: int) -> NoReturn:
    """End the process without waiting for anything except its log."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
