"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stores import StoreFolder


@pytest.fixture
def store(tmp_path: Path) -> StoreFolder:
    """An empty store to fill."""
    return StoreFolder(tmp_path / "store")
