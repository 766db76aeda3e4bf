"""The store: whole versions or none, numbered upwards."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from convoy.models.errors import JobError, UsageError
from convoy.models.store import Store


def publish(store: Store, name: str = "m") -> int:
    with store.writing(name) as folder:
        (folder / "file").write_text("x")
    return store.versions(name)[0].version


def test_versions_count_upwards_and_removing_the_newest_rolls_back(tmp_path: Path) -> None:
    store = Store.at(tmp_path)
    assert [publish(store), publish(store)] == [1, 2]
    (tmp_path / "m" / "2" / "file").unlink()
    (tmp_path / "m" / "2").rmdir()
    assert [version.version for version in store.versions("m")] == [1]


def test_numbers_not_names_order_versions(tmp_path: Path) -> None:
    for name in ("1", "2", "10", "010", "v3", ".writing-x", "0"):
        (tmp_path / "m" / name).mkdir(parents=True)
    assert [version.version for version in Store.at(tmp_path).versions("m")] == [10, 2, 1]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_what_does_not_finish_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    store = Store.at(tmp_path)

    def interrupted() -> None:
        with store.writing("m") as folder:
            (folder / "half").write_text("x")
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="full; free some space"), Store.at(tmp_path).writing("m"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "a b", "x" * 200])
def test_a_name_must_be_a_folder_and_a_part_of_a_url(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="model's name"), Store.at(tmp_path).writing(name):
        pass


def test_a_store_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="create the folder"):
        Store.at(tmp_path / "nope")


def one_model(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x")
    return root


@pytest.mark.parametrize("file", ["manifest.json", "model.onnx"])
def test_one_version_alone_counts_as_the_first(tmp_path: Path, file: str) -> None:
    store = Store.at(one_model(tmp_path, file, "labels/1/model.onnx"), "m")
    assert store.names() == ["m"]
    (found,) = store.versions("m")
    assert (found.version, found.folder, found.model_folder) == (1, tmp_path, tmp_path)
    assert store.versions("other") == []
    (tmp_path / file).unlink()
    assert store.versions("m") == []


@pytest.mark.parametrize("file", ["manifest.json", "model.onnx"])
def test_the_versions_of_one_model_keep_their_numbers(tmp_path: Path, file: str) -> None:
    store = Store.at(one_model(tmp_path, f"2/{file}", f"10/{file}", "config.pbtxt", "labels/en.txt"), "m")
    assert [(one.version, one.folder, one.model_folder) for one in store.versions("m")] == [
        (10, tmp_path / "10", tmp_path),
        (2, tmp_path / "2", tmp_path),
    ]
    assert (store.names(), store.versions("2")) == (["m"], [])


def test_the_versions_of_one_model_may_have_files_of_another_name(tmp_path: Path) -> None:
    store = Store.at(one_model(tmp_path, "2/weights.onnx", "config.pbtxt"), "m")
    assert [(one.version, one.is_bundle) for one in store.versions("m")] == [(2, False)]


@pytest.mark.parametrize("paths", [["manifest.json"], ["1/model.onnx"]])
def test_one_model_needs_a_name_and_is_told_how(tmp_path: Path, paths: list[str]) -> None:
    one_model(tmp_path, *paths)
    with pytest.raises(UsageError, match="give it one with --model-name NAME"):
        Store.at(tmp_path)
    with pytest.raises(UsageError, match="cannot be a model's name"):
        Store.at(tmp_path, "../up")


def test_what_lies_wrong_in_a_folder_of_models_does_not_make_it_one(tmp_path: Path) -> None:
    one_model(tmp_path, "7/model.onnx", "digits/1/manifest.json")
    assert Store.at(tmp_path).names() == ["7", "digits"]
    assert [one.version for one in Store.at(tmp_path, "unused").versions("digits")] == [1]


def test_one_model_that_is_away_is_no_model_that_was_removed(tmp_path: Path) -> None:
    store = Store.at(one_model(tmp_path / "m", "1/model.onnx"), "m")
    (tmp_path / "m").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="No such file"):
        store.names()
