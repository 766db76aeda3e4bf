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
