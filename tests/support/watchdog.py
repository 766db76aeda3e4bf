"""A test that hangs is ended and every thread's stack written, even where no exception reaches it.

`pytest-timeout` raises in a test that takes too long. That is of no use in a library that keeps the interpreter's lock,
in a finaliser, which may not raise, and at the end of the process. The thread of `faulthandler` needs no lock: once a
fifth more than the limit is gone, it writes the stacks and ends the process. A plugin of pytest's.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator

import pytest

# In limits of one test.
_ENDED_AT, _COLLECTION = 1.2, 5.0


def pytest_configure(config: pytest.Config) -> None:
    is_controller = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not is_controller and not config.getoption("usepdb") and config.pluginmanager.hasplugin("timeout"):
        config.pluginmanager.register(_Watched(config))


class _Watched:
    def __init__(self, config: pytest.Config) -> None:
        self._limit_s = float(config.getoption("timeout") or config.getini("timeout") or 0.0)
        self._stderr = os.dup(2)  # nothing is captured now
        self._begins(self._limit_s * _COLLECTION)

    def _begins(self, limit_s: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        if limit_s:
            faulthandler.dump_traceback_later(limit_s * _ENDED_AT, file=self._stderr, exit=True)

    def _item_begins(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker("timeout")
        self._begins(self._limit_s if marker is None else float(marker.kwargs.get("timeout", (*marker.args, 0.0)[0])))

    def pytest_collection_finish(self) -> None:
        self._begins(0.0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._item_begins(item)
        try:
            return (yield)
        finally:
            self._begins(0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._item_begins(item)

    def pytest_enter_pdb(self) -> None:
        self._begins(0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """From here on to the end of the process."""
        self._begins(self._limit_s)
