"""Folders of models and the files in them: what is read, what is refused, what is left behind."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.models import files
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.files import check_only_files, check_regular, is_file_name, open_regular, read_small, stays_inside
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
    for name in ("2", "10", "010", "v3", ".writing-x", "0"):
        (tmp_path / "m" / name).mkdir()
    assert [version.version for version in store.versions("m")] == [10, 2, 1]  # numbers, not names


@pytest.mark.parametrize(
    ("error", "seen", "words"),
    [
        (RuntimeError("broken"), RuntimeError, "broken"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (OSError(errno.ENOSPC, "No space left on device"), JobError, "full; free some space"),
    ],
)
def test_what_does_not_finish_leaves_nothing(
    tmp_path: Path, error: BaseException, seen: type[BaseException], words: str | None
) -> None:
    store = Store.at(tmp_path)

    def interrupted() -> None:
        with store.writing("m") as folder:
            (folder / "half").write_text("x")
            raise error

    with pytest.raises(seen, match=words):
        interrupted()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "a b", "x" * 200])
def test_a_name_must_be_a_folder_and_a_part_of_a_url(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="model's name"), Store.at(tmp_path).writing(name):
        pass


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


@pytest.mark.parametrize("file", ["manifest.json", "model.onnx", "weights.onnx"])
def test_the_versions_of_one_model_keep_their_numbers(tmp_path: Path, file: str) -> None:
    store = Store.at(one_model(tmp_path, f"2/{file}", f"10/{file}", "config.pbtxt", "labels/en.txt"), "m")
    assert [(one.version, one.folder, one.model_folder) for one in store.versions("m")] == [
        (10, tmp_path / "10", tmp_path),
        (2, tmp_path / "2", tmp_path),
    ]
    assert (store.names(), store.versions("2")) == (["m"], [])
    assert {one.is_bundle for one in store.versions("m")} == {file == "manifest.json"}


@pytest.mark.parametrize("paths", [["manifest.json"], ["1/model.onnx"]])
def test_one_model_needs_a_name_and_is_told_how(tmp_path: Path, paths: list[str]) -> None:
    one_model(tmp_path, *paths)
    with pytest.raises(UsageError, match="set one with --model-name NAME"):
        Store.at(tmp_path)
    with pytest.raises(UsageError, match="cannot be a model's name"):
        Store.at(tmp_path, "../up")


def test_what_lies_wrong_in_a_folder_of_models_does_not_make_it_one(tmp_path: Path) -> None:
    one_model(tmp_path, "7/model.onnx", "digits/1/manifest.json")
    assert Store.at(tmp_path).names() == ["7", "digits"]
    assert [one.version for one in Store.at(tmp_path, "unused").versions("digits")] == [1]


def test_one_model_that_is_away_is_no_model_that_was_removed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="create the folder"):
        Store.at(tmp_path / "m")
    store = Store.at(one_model(tmp_path / "m", "1/model.onnx"), "m")
    (tmp_path / "m").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="No such file"):
        store.names()


def make(kind: str, path: Path) -> None:
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a socket":
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(path))
        case "a device":
            path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a socket", "a device"])
def test_what_is_no_file_is_named_and_not_opened(kind: str) -> None:
    with tempfile.TemporaryDirectory() as short:  # a socket's path may have 107 bytes
        path = Path(short) / "x"
        make(kind, path)
        for look in (check_regular, open_regular, read_small):
            with pytest.raises(BundleError, match=f"is {kind}"):
                look(path)
        if kind != "a folder":
            with pytest.raises(BundleError, match=f"is {kind}"):
                check_only_files(path.parent)


def test_a_file_that_is_exchanged_for_a_pipe_meanwhile_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "x")
    monkeypatch.setattr(files, "check_regular", lambda _: None)
    with pytest.raises(BundleError, match="is a pipe"):
        open_regular(tmp_path / "x")


def test_files_and_links_to_files_are_read_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("deep/file")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "elsewhere").symlink_to("/dev")  # a folder whose contents are nobody's business here
    check_only_files(tmp_path)
    assert read_small(tmp_path / "link") == b"abc"
    monkeypatch.setattr(files, "MOST_TEXT_BYTES", 2)
    with pytest.raises(BundleError, match="which is too large"):
        read_small(tmp_path / "link")
    os.mkfifo(tmp_path / "deep" / "pipe")
    with pytest.raises(BundleError, match="pipe"):
        check_only_files(tmp_path)


@given(st.text(alphabet="ab./\0\\ ", max_size=12))
def test_a_name_that_is_let_through_stays_in_its_folder(name: str) -> None:
    folder = "/a/folder"
    if is_file_name(name):
        assert str(Path(os.path.normpath(f"{folder}/{name}")).parent) == folder
    if stays_inside(name):
        assert os.path.normpath(name if name.startswith("/") else f"{folder}/{name}").startswith(f"{folder}/")
        assert "\0" not in name


def test_plain_names_are_let_through() -> None:
    assert is_file_name("fp32.onnx")
    assert stays_inside("labels/en.txt")
