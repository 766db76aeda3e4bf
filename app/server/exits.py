"""How a server ends: its exit codes, the signals that ask for it, and what is done where no orderly end comes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import NoReturn

from convoy.app.server import logs
from convoy.app.server.daemon_threads import at_work

# Beside 0 (drained after a signal) and 2 (called wrongly).
NOTHING_TO_SERVE = 1
ENGINE_LOST = 70  # it hung and could not be replaced; only a new process helps
_log = logging.getLogger("convoy")
_WELL_MEANT_S = 0.5  # what is about to end anyway needs less


class StopSignals:
    """Heeds SIGTERM and SIGINT from now on: `stop` runs in a task; a second signal ends the process at once."""

    def __init__(self, stop: Callable[[], Coroutine[None, None, None]]) -> None:
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._stopping: asyncio.Task[None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled, number)

    def heed_hangup(self, read_again: Callable[[], None]) -> None:
        """On SIGHUP, unless the process ends."""
        self._loop.add_signal_handler(signal.SIGHUP, lambda: None if self._stopping else read_again())

    def _signalled(self, number: int) -> None:
        if self._stopping is not None:
            _log.warning("second signal: stopping at once")
            logs.flush(_WELL_MEANT_S)
            os._exit(128 + number)
        self._stopping = self._loop.create_task(self._stop())


def end_if_held_up(code: int) -> None:
    """End the process here and now where threads are still at work that may never end; else do nothing.

    Python would not wait for them, but the libraries that they are in would be taken down around them.
    """
    if stuck := at_work(within_s=_WELL_MEANT_S):
        _log.warning("ending beside work that does not end: %s", ", ".join(stuck))
        end_now(code)


def end_for(reason: str, stop: Callable[[int], None], *, is_lost: bool) -> None:
    """Say why there is nothing to serve any more and `stop` with the code for that; at once where an engine `is_lost`.

    Then a thread hangs inside the engine, so an orderly end might hang as well.
    """
    _log.critical("%s", reason)
    if is_lost:
        end_now(ENGINE_LOST)
    stop(NOTHING_TO_SERVE)


def end_within(seconds: float, code: Callable[[], int]) -> None:
    """See to it that the process ends, even if what ends it in good order never does."""

    def end() -> None:
        _log.error("the orderly end took longer than %g s; ending without it", seconds)
        end_now(code())

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def end_now(code: int) -> NoReturn:
    """End the process without waiting for anything, but for what it has said."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
