"""Files that somebody else wrote."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.models import files
from convoy.models.errors import BundleError
from convoy.models.files import check_only_files, check_regular, is_file_name, open_regular, read_small, stays_inside


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
    with pytest.raises(BundleError, match="no such file needs"):
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
    assert not stays_inside("/etc/passwd")
