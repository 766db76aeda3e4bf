"""What a process of the server asks of the system before it serves: files, memory, an event loop; and how it ends."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from convoy.app.host.daemon_threads import at_work

_log = logging.getLogger("convoy")
_M_MMAP_THRESHOLD = -3  # from malloc.h
_LARGE_BYTES = 8 << 20
_WELL_MEANT_S = 0.5  # what is about to end anyway needs less


def raise_file_limit() -> None:
    """Every connection is a file; the usual soft limit of 1,024 is below what one server should hold."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def give_large_allocations_back() -> None:
    """Let the C library return a freed upload to the system at once.

    It learns from the first one that such sizes come and go, and keeps the next ones in heaps per thread;
    after some large uploads the process would stay several times larger than `--max-inflight-mb` promises.
    """
    with suppress(OSError, AttributeError):  # another C library has other habits
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def collect_only_what_comes() -> None:
    """Exempt whatever exists from garbage collection, and collect from now on.

    A process that serves keeps a hundred thousand objects from its start. Looking through all of them takes a tenth
    of a second, in which nobody is answered, every few thousand requests.
    """
    gc.freeze()
    gc.enable()


def end_if_held_up(code: int) -> None:
    """End the process here and now where threads are still at work that may never end; else do nothing.

    Python would not wait for them, but the libraries that they are in would be taken down around them.
    """
    if stuck := at_work(within_s=_WELL_MEANT_S):
        _log.warning("ending beside work that does not end: %s", ", ".join(stuck))
        _end(code)


def end_within(seconds: float, code: Callable[[], int]) -> None:
    """See to it that the process ends, even if what ends it in good order never does."""

    def end() -> None:
        _log.error("the orderly end took longer than %g s; ending without it", seconds)
        _end(code())

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _end(code: int) -> NoReturn:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def loop_factory() -> Any:
    """How to make the fastest event loop there is, for `asyncio.Runner`."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop
