"""A store behind a URL, without a network: a folder in the place of a bucket, and names that are hostile."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fsspec.registry import _registry

from convoy.app.lifecycle.remote_files import RemoteFiles, RemoteObject
from convoy.app.lifecycle.remote_store import RemoteStore
from convoy.models.errors import BundleError, NotFetched, UsageError
from convoy.models.store import StoredVersion
from tests.support.stores import DEMO, StoreFolder


@pytest.fixture
def far(tmp_path: Path) -> StoreFolder:
    """What is elsewhere."""
    return StoreFolder(tmp_path / "far")


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


def opened(far: StoreFolder, near: Path, model_name: str = "") -> RemoteStore:
    return RemoteStore(f"file://{far.root}", model_name, near)


def versions(store: RemoteStore, name: str) -> list[StoredVersion]:
    return [one.stored for one in store.look(name).values()]


class Downloads:
    """What was downloaded, and what is done to it on its way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        self.spoil = lambda content: content
        self.spoiled_times = 10
        original = RemoteFiles.download

        def download(files: RemoteFiles, path: str, target: Path) -> None:
            original(files, path, target)
            self.paths.append(path)
            if path.endswith("fp32.onnx") and self.spoiled_times > 0:
                self.spoiled_times -= 1
                target.write_bytes(self.spoil(target.read_bytes()))

        monkeypatch.setattr(RemoteFiles, "download", download)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> Downloads:
    return Downloads(monkeypatch)


def left(near: Path) -> list[str]:
    return [path.name for path in near.glob("*/*/*")]


def test_a_spoiled_byte_is_fetched_once_more_and_what_came_short_may_come_whole_another_time(
    far: StoreFolder, near: Path, downloads: Downloads
) -> None:
    far.add_digits()
    store = opened(far, near)
    (stored,) = versions(store, "digits")
    downloads.spoil, downloads.spoiled_times = lambda content: content[:-5], 1
    with pytest.raises(NotFetched, match=r": got \d+ of"):
        store.fetch(stored)
    assert left(near) == []
    downloads.spoil, downloads.spoiled_times = lambda content: content[:-1] + b"\0", 1
    store.fetch(stored)
    assert (stored.folder / "fp32.onnx").read_bytes() == (DEMO / "fp32.onnx").read_bytes()


def test_a_bundle_that_cannot_be_right_is_not_downloaded(far: StoreFolder, near: Path, downloads: Downloads) -> None:
    folder = far.add_digits()
    (folder / "fp32.onnx").write_bytes(b"short")
    store = opened(far, near)
    (stored,) = versions(store, "digits")
    with pytest.raises(BundleError, match="the store has 5 bytes, but the manifest says"):
        store.fetch(stored)
    (folder / "fp32.onnx").unlink()
    (stored,) = versions(store, "digits")
    with pytest.raises(BundleError, match="the store has no such file"):
        store.fetch(stored)
    assert {path.rpartition("/")[2] for path in downloads.paths} <= {path.name for path in DEMO.iterdir()} - {
        "fp32.onnx"
    }


def test_a_bare_model_that_changes_while_it_comes_is_not_used(
    far: StoreFolder, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.add_shift(1.0)
    store = opened(far, near)
    (stored,) = versions(store, "shift")
    original = RemoteFiles.download

    def download(files: RemoteFiles, path: str, target: Path) -> None:
        original(files, path, target)
        far.add_shift(2.0)

    monkeypatch.setattr(RemoteFiles, "download", download)
    with pytest.raises(NotFetched, match="changed while it was downloaded"):
        store.fetch(stored)
    assert left(near) == []


def test_a_manifest_beside_the_versions_makes_no_bundle_of_a_bare_model(far: StoreFolder, near: Path) -> None:
    """A bundle that was put a folder too high, for example."""
    far.add_shift(1.0)
    (far.root / "shift" / "manifest.json").write_text("{}")
    store = opened(far, near)
    (stored,) = versions(store, "shift")
    store.fetch(stored)
    assert (stored.folder / "model.onnx").exists()


def test_what_the_store_has_no_more_is_pruned_at_the_next_start(far: StoreFolder, near: Path) -> None:
    for version in (1, 2):
        far.add_digits(version)
    store = opened(far, near)
    for stored in versions(store, "digits"):
        store.fetch(stored)
    shutil.rmtree(far.root / "digits" / "1")
    versions(store, "digits")
    assert len(left(near)) == 2  # it may serve
    versions(opened(far, near), "digits")
    assert [name.partition("-")[0] for name in left(near)] == ["2"]
    (second,) = versions(store, "digits")
    for folder in (far.root / "digits", near):
        shutil.rmtree(folder)
    assert versions(store, "digits") == []
    with pytest.raises(NotFetched, match="no longer exists"):
        store.fetch(second)


# Names that somebody else has chosen


class Hostile:
    """A bucket with an object of a given name beside an honest model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        self.written: list[Path] = []

        def objects(files: RemoteFiles, below: str = "") -> tuple[RemoteObject, ...]:
            return RemoteObject(path, 4, "a"), RemoteObject("1/model.onnx", 4, "a")

        def download(files: RemoteFiles, path: str, target: Path) -> None:
            self.written.append(target)
            target.write_bytes(b"evil")

        monkeypatch.setattr(RemoteFiles, "objects", objects)
        monkeypatch.setattr(RemoteFiles, "download", download)


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [
        *((path, True) for path in ("1/../../../../evil", "../evil", "/etc/cron.d/convoy", "1/..", "1/a\0b")),
        *((path, False) for path in ("1//etc/cron.d/convoy", "1/./a", "1/model.onnx/below")),
    ],
)
def test_no_name_of_an_object_leads_out_of_its_folder(
    far: StoreFolder, near: Path, monkeypatch: pytest.MonkeyPatch, path: str, is_refused: bool
) -> None:
    far.add_shift(1.0)
    hostile = Hostile(monkeypatch, path)
    store = opened(far, near)
    (stored,) = versions(store, "shift")
    refused = pytest.raises(BundleError, match="is outside its model's folder")
    with refused if is_refused else suppress(BundleError, NotFetched):
        store.fetch(stored)
    assert all(target.resolve().is_relative_to(near.resolve()) for target in hostile.written)
    if is_refused:
        assert all(target.name == "model.onnx" for target in hostile.written)
        assert left(near) == []
    else:
        assert hostile.written


def test_names_that_are_none_are_passed_over(far: StoreFolder, near: Path) -> None:
    for name in (".hidden", "a b", "fine", "x" * 200):
        (far.root / name / "1").mkdir(parents=True)
        (far.root / name / "1" / "model.onnx").write_bytes(b"x")
    store = opened(far, near)
    assert store.names() == ["fine"]
    with pytest.raises(UsageError, match="cannot be a model's name"):
        store.look("../fine")


# What is wrong with the call


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nowhere://x/y", "nowhere"),
        ("s3://", "has no bucket"),
        ("simplecache::s3://a/b", "chained file systems are not supported"),
    ],
)
def test_a_url_that_cannot_be_one_is_a_clear_error(url: str, told: str, near: Path) -> None:
    with pytest.raises(UsageError, match=told):
        RemoteStore(url, "", near)


def test_what_is_not_installed_is_named(near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(UsageError, match=r"pip install .*\[s3\]"):
        RemoteStore("s3://bucket/store", "", near)
