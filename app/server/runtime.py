"""What a process of the server asks of the system before it serves: files, memory, an event loop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from convoy.app.server import logs

Result = TypeVar("Result")
_M_MMAP_THRESHOLD = -3  # from malloc.h
_LARGE_BYTES = 8 << 20


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


def give_freed_memory_back() -> None:
    """What the C library keeps of what was freed in small pieces; takes some milliseconds, and is for much of it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def collect_only_what_comes() -> None:
    """Exempt whatever exists from garbage collection, and collect from now on.

    A process that serves keeps a hundred thousand objects from its start. Looking through all of them takes a tenth
    of a second, in which nobody is answered, every few thousand requests.
    """
    gc.freeze()
    gc.enable()


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """To its end, on the fastest event loop there is, and to the end of what it has said."""
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(work)
    finally:
        logs.flush()


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


# A third of the weight that Linux gives to the others. With 3 and with 10 less was answered in time.
_NICER = 5


def give_way() -> None:
    """This thread, and those that it starts, leave the cores to those that answer.

    Not to be taken back. Nothing where it would be the whole process that gives way, or where the system forbids it, as
    hardened services may have it.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _NICER)
