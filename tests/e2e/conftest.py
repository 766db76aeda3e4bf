"""What several files here have: the bundled model, served without an option, and exports that measure little."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.quick_exports import measure_little
from tests.support.servers import Server, start_server, wait_until


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """For tests that change nothing of it and leave nothing behind."""
    with start_server() as server:
        yield server
        wait_until(server.is_at_rest, "nothing is held after all these requests")


@pytest.fixture
def measures_little(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)
