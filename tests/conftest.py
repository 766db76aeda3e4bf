"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stores import StoreFolder


@pytest.fixture
def store(tmp_path: Path) -> StoreFolder:
    """An empty store to fill."""
    return StoreFolder(tmp_path / "store")


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> StoreFolder:
    """An empty store for all tests of a module."""
    return StoreFolder(tmp_path_factory.mktemp("store"))
