"""Fixtures that every test may use."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import no_forks, watchdog
from tests.support.stores import StoreFolder

# Threads of torch wait for each other in a spin, which takes many times as long where several pytest processes share
# the cores. Torch reads this when it is loaded, here and in what a test starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

# How long an example takes says more about the machine's other work than about the code.
hypothesis.settings.register_profile("ours", deadline=None)
hypothesis.settings.load_profile("ours")
# For a test that is long by nature and sets no limit of its own.
LONG_S = 900


def pytest_configure(config: pytest.Config) -> None:
    for plugin in (no_forks, watchdog):
        config.pluginmanager.register(plugin)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_S))


@pytest.fixture
def store(tmp_path: Path) -> StoreFolder:
    """An empty store to fill."""
    return StoreFolder(tmp_path / "store")


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> StoreFolder:
    """An empty store for all tests of a module."""
    return StoreFolder(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session", autouse=True)
def _own_step_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees what an export of the developer's left behind, nor leaves anything itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _own_log_levels() -> Iterator[None]:
    """A command run in this process sets the level of our logger; the next test starts with the default again."""
    loggers = logging.getLogger(), logging.getLogger("convoy")
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def forks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The export's torch step need not import torch, which is most of what it takes for a small network."""
    from tests.support.forked import torch_child

    monkeypatch.setattr("convoy.export.sources.torch_process.child_process", torch_child)
