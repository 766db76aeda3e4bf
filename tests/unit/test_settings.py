"""What settings make of a call: where the server keeps what it can make again, and whom it asks for engines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from convoy.app.config.settings import read_settings
from convoy.app.core import Core
from convoy.models.errors import UsageError


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "CONVOY_PLAN_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that is a mere number, as in a container: no HOME, no line in the list of users."""
    monkeypatch.delenv("HOME", raising=False)

    def unknown(uid: int) -> object:
        raise KeyError(f"uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_plans_are_kept_in_the_users_cache_folder_or_where_they_should_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value, folder in (
        ("HOME", "/somewhere", "/somewhere/.cache/convoy"),
        ("XDG_CACHE_HOME", "/elsewhere", "/elsewhere/convoy"),
        ("CONVOY_PLAN_CACHE", "/cache", "/cache"),
    ):
        monkeypatch.setenv(name, value)
        assert read_settings({}).plan_folder() == Path(folder)


@pytest.mark.usefixtures("nobody")
def test_a_user_without_a_home_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert read_settings({}).plan_folder() == tmp_path / f"convoy-cache-{os.geteuid()}"
    with pytest.raises(UsageError, match="give the whole path"):
        read_settings({"plan_cache": Path("~/plans")}).plan_folder()


@pytest.mark.parametrize("engine", ["cpu", "openvino"])
def test_who_asks_for_a_cpus_engine_touches_no_gpu(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> NoReturn:
        raise AssertionError("the GPUs were asked")

    monkeypatch.setattr("convoy.app.config.settings.find_machine", ask)
    settings = read_settings({"engine": engine})
    assert not settings.core_options().load.machine.gpus


@pytest.mark.parametrize("given", ["-1", "two", "1.5", "", "65"])
def test_what_never_was_a_number_of_edge_processes_is_refused_as_before(given: str) -> None:
    with pytest.raises(UsageError, match="edges must be auto or a number"):
        read_settings({"edges": given})


def test_memory_that_cannot_be_had_is_a_wrong_call() -> None:
    with pytest.raises(UsageError, match="lower --max-inflight-mb"):
        Core(read_settings({"engine": "cpu", "max_inflight_mb": 1 << 40}).core_options())
