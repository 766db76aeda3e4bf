"""What several files here have: the bundled model, served without an option, and exports that measure little."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.quick_exports import measure_little
from tests.support.servers import Server, start_server


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """For tests that change nothing of it and leave nothing behind."""
    with start_server(rests=True) as server:
        yield server


@pytest.fixture(scope="session")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same, which asks for the key `open sesame`."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("open sesame\n")
    with start_server("--api-key-file", str(key)) as server:
        yield server


@pytest.fixture
def measures_little(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)
