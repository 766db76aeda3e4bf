"""A store that is one model: what a storage initialiser leaves in a container, served under a name that is given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.servers import check_ended, run_convoy, start_server, wait_until
from tests.support.stores import DEMO, StoreFolder, digit

pytestmark = pytest.mark.slow
NAMED = ("--model-name", "flowers", "--host", "127.0.0.1")
POLL = ("--model-control", "poll", "--poll-interval-s", "0.05")


def bundle(root: Path, place: str) -> Path:
    shutil.copytree(DEMO, root / place)
    return root


@pytest.mark.parametrize("place", ["", "1/"])
def test_one_bare_model_has_its_configuration_beside_it_and_none_from_outside(tmp_path: Path, place: str) -> None:
    """Around a store that is one version lies what is not the store's."""
    StoreFolder(tmp_path).add_shift(2.0, name="models")
    root = tmp_path / "models"
    if not place:
        (root / "1" / "model.onnx").rename(root / "model.onnx")
        (root / "1").rmdir()
    (tmp_path / "config.pbtxt").write_text("this is no configuration")
    (root / "config.pbtxt").write_text("max_batch_size: 7")
    with start_server(*NAMED, store=root) as server:
        assert server.shift("flowers") == ("1", 2.0)
        assert "max_batch_size is 7" in server.log


def test_while_polling_versions_of_the_one_model_come_and_go(tmp_path: Path) -> None:
    outside = StoreFolder(tmp_path)
    outside.add_shift(1.0, name="models")
    with start_server(*NAMED, *POLL, store=tmp_path / "models") as server:
        assert server.shift("flowers") == ("1", 1.0)
        outside.add_shift(2.0, version=2, name="models")
        wait_until(lambda: server.shift("flowers") == ("2", 2.0), "the new version serves")
        shutil.rmtree(tmp_path / "models" / "2")
        wait_until(lambda: server.shift("flowers") == ("1", 1.0), "it is rolled back")


def test_while_polling_one_version_alone_is_loaded_again_when_its_files_change(tmp_path: Path) -> None:
    outside = StoreFolder(tmp_path)
    (tmp_path / "models").mkdir()
    outside.add_shift(1.0, name="x").rename(tmp_path / "models" / "model.onnx")
    with start_server(*NAMED, *POLL, store=tmp_path / "models") as server:
        assert server.shift("flowers") == ("1", 1.0)
        outside.add_shift(2.0, name="x").replace(tmp_path / "models" / "model.onnx")
        wait_until(lambda: server.shift("flowers") == ("1", 2.0), "the new file serves")
        (tmp_path / "models").rename(tmp_path / "away")
        wait_until(lambda: "cannot read the store" in server.log_so_far, "it is missed")
        assert server.shift("flowers") == ("1", 2.0)


def test_loaded_explicitly_it_answers_to_its_name_alone(tmp_path: Path) -> None:
    with start_server(*NAMED, "--model-control", "explicit", store=bundle(tmp_path / "models", ".")) as server:
        assert server.index() == {"flowers": ("", "")}
        for name, status in (("digits", 404), ("1", 404), ("flowers", 200)):
            assert server.post(f"/v2/repository/models/{name}/load", json={}).status_code == status, name
        assert server.index() == {"flowers/1": ("READY", "")}
        assert server.post("/predictions/flowers", content=digit("seven")).json()["predictions"][0]["label"] == "7"
        assert server.post("/v2/repository/models/flowers/unload").status_code == 200
        assert server.post("/predictions/flowers", content=digit("seven")).status_code != 200


def test_without_a_name_it_is_one_line_and_2(tmp_path: Path) -> None:
    ended = run_convoy("serve", "--store", str(bundle(tmp_path / "models", "3")), "--port", "0")
    check_ended(ended, 2, "is one model, not a folder of models", "--model-name NAME")


def test_numbers_that_it_cannot_have_are_refused(tmp_path: Path) -> None:
    store = str(bundle(tmp_path / "models", "."))
    ended = run_convoy("serve", *NAMED, "--store", store, "--version-policy", "2,3", "--port", "0", "--grpc-port", "-1")
    check_ended(ended, 2, "remove --version-policy")


def test_a_folder_of_models_keeps_its_names_and_says_so(tmp_path: Path) -> None:
    store = StoreFolder(tmp_path / "store")
    store.add_digits()
    with start_server(*NAMED, store=store.root) as server:
        assert server.index() == {"digits/1": ("READY", "")}
        assert "--model-name is ignored" in server.log


@pytest.mark.parametrize(("place", "shown"), [(".", "flowers version 1"), ("4", "flowers version 4")])
def test_inspect_shows_it_by_its_folders_name_or_the_given_one(tmp_path: Path, place: str, shown: str) -> None:
    root = bundle(tmp_path / "flowers", place)
    for name, words in ((None, shown), ("tulips", shown.replace("flowers", "tulips"))):
        check_ended(run_convoy("inspect", *([name] if name else []), "--store", str(root)), 0, words)
    # A version's folder has no name of its own.
    assert "flowers version 1" in run_convoy("inspect", "--store", str(root / place)).stdout
