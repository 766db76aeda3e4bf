"""A store in S3 (moto's, on this machine): what is wanted comes here whole, or what served before serves on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.object_store import CREDENTIALS, URL, Gate, ObjectStore, start_object_store
from tests.support.played_http import playing
from tests.support.servers import check_ended, run_convoy, start_server, wait_until
from tests.support.stores import DEMO, StoreFolder

pytestmark = pytest.mark.slow
POLL = ("--model-control", "poll", "--poll-interval-s", "0.2")


@pytest.fixture
def remote() -> Iterator[ObjectStore]:
    with start_object_store() as store:
        yield store


def serve(remote: ObjectStore, cache: Path, *options: str, url: str = URL, **given: Any) -> Any:
    return start_server("--store", url, "--store-cache", str(cache), *options, **{"env": remote.env, **given})


def fetched(cache: Path) -> list[str]:
    """Name and version of all that is in the cache."""
    return sorted(f"{path.parent.name}/{path.name.partition('-')[0]}" for path in cache.glob("*/*/*"))


def test_only_what_the_policy_wants_is_fetched_and_a_restart_fetches_nothing(
    remote: ObjectStore, tmp_path: Path
) -> None:
    for version in (1, 2):
        remote.upload(DEMO, f"digits/{version}")
    with serve(remote, tmp_path) as server:
        assert server.seven() == ("2", "7")
        assert "verified against its manifest" in server.log
    assert fetched(tmp_path) == ["digits/2"]
    with serve(remote, tmp_path) as server:
        assert server.seven() == ("2", "7")
        assert "fetched" not in server.log


def test_one_bundle_is_served_under_the_given_name(remote: ObjectStore, tmp_path: Path) -> None:
    remote.upload(DEMO, "3")
    with serve(remote, tmp_path, "--model-name", "flowers") as server:
        assert server.seven("flowers") == ("3", "7")
    with serve(remote, tmp_path, exit_code=1, wait_ready=False) as server:
        assert server.wait() == 1
        assert "set one with --model-name NAME" in server.log


def test_a_models_configuration_decides_what_is_fetched(remote: ObjectStore, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        remote.upload(DEMO, f"digits/{version}")
    store = StoreFolder(tmp_path / "store")
    for version in (1, 2):
        store.add_shift(float(version), version=version)
    remote.upload(store.root, "")
    remote.put("digits/config.pbtxt", b"version_policy { specific { versions: [ 1 ] } }")
    remote.put("shift/config.pbtxt", b"version_policy { specific { versions: [ 1 ] } }")
    with serve(remote, tmp_path / "cache", *POLL) as server:
        assert server.seven() == ("1", "7")
        assert fetched(tmp_path / "cache") == ["digits/1", "shift/1"]
        remote.put("digits/config.pbtxt", b"version_policy { specific { versions: [ 2 ] } }")
        wait_until(lambda: server.seven() == ("2", "7"), "the other version serves")
        remote.put("digits/config.pbtxt", b"version_policy { specific { versions: [ 9 ] } }")
        wait_until(lambda: "asks for version 9" in server.log_so_far, "it is told")
        assert server.seven() == ("2", "7")


def test_while_polling_versions_come_and_go_and_a_broken_one_never_serves(remote: ObjectStore, tmp_path: Path) -> None:
    remote.upload(DEMO, "digits/1")
    with serve(remote, tmp_path, *POLL) as server:
        assert server.seven() == ("1", "7")
        model = (DEMO / "fp32.onnx").read_bytes()
        remote.upload(DEMO, "digits/2")
        wait_until(lambda: server.seven() == ("2", "7"), "the new version serves")
        # One byte is another; then a file is cut off.
        for version, broken, told in ((3, model[:-1] + b"\0", "does not match its sha256"), (4, model[:-1], "bytes")):
            remote.put(f"digits/{version}/fp32.onnx", broken)
            for path in DEMO.iterdir():
                if path.name != "fp32.onnx":
                    remote.put(f"digits/{version}/{path.name}", path.read_bytes())
            wait_until(lambda at=f"digits/{version}", told=told: told in server.index().get(at, ("", ""))[1], told)
            assert f"{URL}/digits/{version}/fp32.onnx" in server.index()[f"digits/{version}"][1]
            assert server.seven() == ("2", "7")
        assert not list(tmp_path.glob("*/digits/3-*")) + list(tmp_path.glob("*/digits/.*"))
        remote.put("digits/3/fp32.onnx", model)
        wait_until(lambda: server.seven() == ("3", "7"), "the mended version serves")
        remote.remove("digits/3/")
        remote.remove("digits/4/")
        wait_until(lambda: server.seven() == ("2", "7"), "it is rolled back")


def test_a_store_that_is_away_is_no_order_to_unload_and_a_restart_serves_what_came_earlier(
    remote: ObjectStore, tmp_path: Path
) -> None:
    remote.upload(DEMO, "digits/1")
    with serve(remote, tmp_path, *POLL) as server:
        assert server.seven() == ("1", "7")
        remote.stop()
        wait_until(lambda: "cannot read the store" in server.log_so_far, "it is missed", 120)
        assert server.seven() == ("1", "7")
        assert "cannot be reached" in server.log
    with serve(remote, tmp_path, wait_ready=False) as server:
        wait_until(server.is_ready, "what is here serves", 120)
        assert server.seven() == ("1", "7")
        assert "serving the models that are already downloaded" in server.log


def test_loaded_explicitly_nothing_is_fetched_before_it_is_asked_for(remote: ObjectStore, tmp_path: Path) -> None:
    remote.upload(DEMO, "digits/1")
    remote.upload(DEMO, "other/1")
    with serve(remote, tmp_path, "--model-control", "explicit", "--host", "127.0.0.1") as server:
        assert fetched(tmp_path) == []
        assert server.post("/v2/repository/models/digits/load", json={}).status_code == 200
        assert server.post("/v2/repository/models/absent/load", json={}).status_code == 404
        assert (server.seven(), fetched(tmp_path)) == (("1", "7"), ["digits/1"])


# Where nobody polls it is tried again after 15 s.
@pytest.mark.parametrize(
    "options", [pytest.param((), id="none", marks=pytest.mark.long), pytest.param(POLL, id="poll")]
)
def test_what_could_not_be_fetched_is_tried_again(
    remote: ObjectStore, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Without a change of its files, which is what a refused version waits for."""
    remote.upload(DEMO, "digits/1")
    remote.upload(DEMO, "other/1")
    gate = Gate(remote)
    gate.closed_for = "other/1/fp32.onnx"
    with (
        playing(gate.answer) as url,
        serve(remote, tmp_path, *options, env={**remote.env, "AWS_ENDPOINT_URL": url}) as server,
    ):
        wait_until(lambda: "access denied" in server.index().get("other/1", ("", ""))[1], "it is told")
        assert server.seven() == ("1", "7")
        if options:
            wait_until(lambda: gate.refused >= 9, "it is tried again")
        gate.closed_for = ""
        wait_until(lambda: server.index()["other/1"] == ("READY", ""), "it comes after all", 60)
        assert server.seven("other") == ("1", "7")
        assert server.log.count("refused other version 1") == 1  # and not at every look


# What can be wrong with the store itself


def test_a_cache_that_was_spoiled_is_fetched_again(remote: ObjectStore, tmp_path: Path) -> None:
    remote.upload(DEMO, "digits/1")
    with serve(remote, tmp_path):
        pass
    (kept,) = tmp_path.glob("*/digits/1-*/1/fp32.onnx")
    kept.write_bytes(kept.read_bytes()[:-1] + b"\0")
    with serve(remote, tmp_path) as server:
        assert server.seven() == ("1", "7")
        assert "does not match its sha256" in server.log


def test_what_is_wrong_with_a_store_at_the_start_is_said(remote: ObjectStore, tmp_path: Path) -> None:
    def said(url: str = URL, **env: str) -> str:
        with serve(remote, tmp_path, url=url, env=env or remote.env, exit_code=1, wait_ready=False) as server:
            assert server.wait(150) == 1
            return str(server.log)

    for url in ("s3://elsewhere/store", "s3://models/nothing/here"):
        assert f"{url}: the bucket or the prefix does not exist" in said(url)
    nobodys = {name: value for name, value in remote.env.items() if name not in CREDENTIALS}
    nobodys |= {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_CONFIG_FILE": "/nowhere"}
    assert re.search("no credentials found|access denied", said(AWS_DEFAULT_REGION="us-east-1", **nobodys))
    remote.stop()
    assert "cannot be reached" in said()


def test_inspect_shows_what_is_there(remote: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in remote.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remote.upload(DEMO, "digits/3")
    shown = run_convoy("inspect", "--store", URL)
    check_ended(shown, 0, "digits version 3")
    assert "--model-name" not in shown.stderr
    check_ended(run_convoy("inspect", "--store", "s3://elsewhere/store"), 1, "the bucket or the prefix does not exist")


def test_export_writes_to_a_folder_and_not_to_a_url() -> None:
    ended = run_convoy("export", "model.onnx", "--name", "digits", "--store", "s3://bucket/store")
    check_ended(ended, 2, "must be a folder")
