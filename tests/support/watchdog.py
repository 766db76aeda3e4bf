"""A test that hangs is named and ended, even where no exception reaches it.

`pytest-timeout` raises in a test that takes too long. That is of no use in a library that keeps the interpreter's lock,
in a finaliser, which may not raise, and at the end of the process. So another process watches this one: shortly before
the limit it writes the test's name and has every thread's stack written, and once a fifth more is gone it ends the
process and all that it has started. Under `pytest-xdist` each worker has its own.

A test with a longer limit of its own is named at the limit of all others, too, unless it is `long` or of an `image`.

A plugin of pytest's, and the program of the other process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import time
from collections.abc import Generator
from contextlib import suppress

import pytest

_SHOW_STACKS = signal.SIGUSR1
_NAMED_AT, _ENDED_AT = 0.98, 1.2  # shares of the limit; what a test takes to clean up after itself lies between
_WRITING_S = 5.0  # of the stacks, by a thread that has to get its turn on a busy machine
_COLLECTION = 5.0  # the limits of one test


def pytest_configure(config: pytest.Config) -> None:
    is_controller = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not is_controller and not config.getoption("usepdb") and config.pluginmanager.hasplugin("timeout"):
        config.pluginmanager.register(_Watched(config))


class _Watched:
    """The side of the tests: tells the other process what begins, and how long it may take."""

    def __init__(self, config: pytest.Config) -> None:
        self._limit_s = float(config.getoption("timeout") or config.getini("timeout") or 0.0)
        self._stderr = os.dup(2)  # nothing is captured now
        faulthandler.register(_SHOW_STACKS, file=self._stderr, all_threads=True)
        told, self._tell = os.pipe()
        # Not as a Popen, which would complain that it outlives this process: at the end of the pipe it ends.
        os.posix_spawn(
            sys.executable,
            [sys.executable, __file__, str(os.getpid())],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, told, 0), (os.POSIX_SPAWN_DUP2, self._stderr, 2)],
        )
        os.close(told)
        self._begins("the collection of the tests", self._limit_s * _COLLECTION)

    def _begins(self, what: str, limit_s: float, *, may_be_long: bool = True) -> None:
        named_s = _NAMED_AT * (limit_s if may_be_long else min(limit_s, self._limit_s))
        os.write(self._tell, json.dumps([what, limit_s, named_s]).encode() + b"\n")

    def _item_begins(self, what: str, item: pytest.Item) -> None:
        marker = item.get_closest_marker("timeout")
        is_long = any(item.get_closest_marker(name) for name in ("long", "image"))
        limit_s = self._limit_s if marker is None else float(marker.kwargs.get("timeout", (*marker.args, 0.0)[0]))
        self._begins(what, limit_s, may_be_long=is_long)

    def _rests(self) -> None:
        self._begins("", 0.0)

    def pytest_collection_finish(self) -> None:
        self._rests()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._item_begins(item.nodeid, item)
        try:
            return (yield)
        finally:
            self._rests()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._item_begins(f"the teardown of {item.nodeid}", item)

    def pytest_enter_pdb(self) -> None:
        self._rests()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """From here on to the end of the process."""
        self._begins("the end of the tests", self._limit_s)


class _Watch:
    """The other process: one thing at a time, since when, how long it may take, and when it is named."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._what, self._limit_s, self._named_s, self._since = "", 0.0, 0.0, 0.0
        self._is_named = False

    def run(self) -> None:
        unread = b""
        while True:
            ready, _, _ = select.select([0], [], [], self._patience_s())
            if not ready:
                self._hangs()
                continue
            text = os.read(0, 1 << 16)
            if not text:
                return  # the process has ended
            *lines, unread = (unread + text).split(b"\n")
            if lines:
                self._what, self._limit_s, self._named_s = json.loads(lines[-1])
                self._since, self._is_named = time.monotonic(), False

    def _patience_s(self) -> float | None:
        if not self._limit_s:
            return None
        until_s = _ENDED_AT * self._limit_s if self._is_named else self._named_s
        return max(0.0, self._since + until_s - time.monotonic())

    def _hangs(self) -> None:
        import psutil  # not where tests of a GPU alone are run, without this process

        since_s = time.monotonic() - self._since
        does = "and is ended now" if self._is_named else f"and may take {self._limit_s:g} s"
        print(f"\n{self._what} has taken {since_s:.0f} s {does}; every thread's stack:", file=sys.stderr, flush=True)
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._pid)
            process.send_signal(_SHOW_STACKS)
            if self._is_named:
                time.sleep(_WRITING_S)
                for one in [process, *process.children(recursive=True)]:
                    if one.pid != os.getpid():
                        with suppress(psutil.NoSuchProcess):
                            one.kill()
                self._limit_s = 0.0
        self._is_named = True


if __name__ == "__main__":
    # Ctrl-C is for the tests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Watch(int(sys.argv[1])).run()
