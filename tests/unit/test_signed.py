"""What a server with `--require-signature` takes for signed, and that what was checked is what is loaded."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.app.lifecycle.catalog import Served
from convoy.app.lifecycle.upgrades import _job
from convoy.app.loading import load as loading
from convoy.app.loading.load import LoadOptions, load
from convoy.app.loading.signed import SignedOnly
from convoy.app.scheduling.request import ModelKey
from convoy.export.assemble import BundleSigner
from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.models.bundle import MANIFEST, SIGNATURE, open_bundle
from convoy.models.errors import BundleError, UsageError
from convoy.models.store import Store, StoredVersion
from tests.support import onnx_models
from tests.support.signing_keys import KeyPair, model_signing, sign
from tests.support.stores import StoreFolder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def own(folder: Path) -> KeyPair:
    return KeyPair(folder, "own")


@pytest.fixture(scope="module")
def other(folder: Path) -> KeyPair:
    return KeyPair(folder, "other")


@pytest.fixture
def store(tmp_path: Path) -> StoreFolder:
    return StoreFolder(tmp_path / "store")


@pytest.fixture
def options(own: KeyPair, tmp_path: Path) -> LoadOptions:
    return LoadOptions("auto", 1, None, signed=SignedOnly.by((own.public,), tmp_path / "cache" / "signed"))


def stored(store: StoreFolder, name: str = "digits") -> StoredVersion:
    return Store.at(store.root).version(name, 1)


def copies(options: LoadOptions) -> list[Path]:
    return [one for own in options.signed.folder.glob("*") for one in own.iterdir()]


def refusal(store: StoreFolder, options: LoadOptions, name: str = "digits") -> str:
    with pytest.raises(BundleError) as caught:
        load(stored(store, name), options)
    assert not copies(options), "nothing is left of what was refused"
    return str(caught.value)


def test_a_signed_bundle_is_loaded_from_a_copy_that_goes_with_it(
    store: StoreFolder, own: KeyPair, options: LoadOptions
) -> None:
    folder = store.add_digits()
    sign(folder, own)
    loaded = load(stored(store), options)
    assert loaded.stored == stored(store)
    (copy,) = copies(options)
    assert (copy / "1" / MANIFEST).read_bytes() == (folder / MANIFEST).read_bytes()
    assert copy.stat().st_mode & 0o077 == 0
    later = replace(loaded, skipped=())  # as when an engine takes another's place
    for proved in loaded.engines:
        proved.engine.close()
    del loaded
    gc.collect()
    assert copies(options) == [copy]
    del later, proved
    gc.collect()
    assert not copies(options)


def test_an_upgrade_is_made_of_the_copy_that_was_checked(
    store: StoreFolder, own: KeyPair, options: LoadOptions
) -> None:
    folder = store.add_digits()
    sign(folder, own)
    loaded = load(stored(store), options)
    shutil.rmtree(folder)
    (copy,) = copies(options)
    served = Served(ModelKey("digits", 1), loaded, loaded.spec, options, lambda: None)
    assert _job(served).folder.is_relative_to(copy)
    for proved in loaded.engines:
        proved.engine.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "more.onnx").write_bytes(b""), "the signature is not valid"),
        (lambda folder: (folder / "fp32.onnx").write_bytes(b"\0"), "the signature is not valid"),
        (lambda folder: (folder / "labels.txt").unlink(), "the signature is not valid"),
        (lambda folder: (folder / SIGNATURE).unlink(), "not signed"),
        (lambda folder: os.truncate(folder / SIGNATURE, 100), "the signature is not valid"),
        (
            lambda folder: (folder / SIGNATURE).write_text('{"verificationMaterial": [], "dsseEnvelope": 7}'),
            "the signature is not valid",
        ),
    ],
)
def test_what_is_not_as_it_was_signed_is_refused_with_the_folder_in_the_store(
    store: StoreFolder, own: KeyPair, options: LoadOptions, spoil: Callable[[Path], object], words: str
) -> None:
    folder = store.add_digits()
    sign(folder, own)
    spoil(folder)
    assert refusal(store, options).startswith(f"{folder}: {words}")


def test_a_seal_alone_and_another_key_are_not_enough_and_one_of_several_is(
    store: StoreFolder, own: KeyPair, other: KeyPair, options: LoadOptions, tmp_path: Path
) -> None:
    folder = store.add_digits()
    assert "not signed" in refusal(store, options)
    sign(folder, other)
    assert "Key mismatch" in refusal(store, options)
    both = SignedOnly.by((own.public, other.public), tmp_path / "cache" / "signed")
    assert load(stored(store), replace(options, signed=both)).engines
    sign(store.add_digits(name="cats"), own)
    gc.collect()
    assert "was signed as model 'digits', but its folder is named 'cats'" in refusal(store, options, "cats")


def test_what_the_store_becomes_after_the_check_is_not_loaded(
    store: StoreFolder, own: KeyPair, options: LoadOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.add_digits()
    sign(folder, own)
    opened: list[Path] = []

    def open_after_a_change(place: Path) -> object:
        opened.append(place)
        shutil.rmtree(folder)
        folder.symlink_to("/")
        return open_bundle(place)

    monkeypatch.setattr(loading, "open_bundle", open_after_a_change)
    assert load(stored(store), options).engines
    assert not opened[0].is_relative_to(store.root)


def test_links_are_followed_before_the_check_and_what_is_no_file_is_refused(
    store: StoreFolder, own: KeyPair, options: LoadOptions, tmp_path: Path
) -> None:
    folder = store.add_digits()
    sign(folder, own)
    elsewhere = tmp_path / "elsewhere"
    (folder / "fp32.onnx").rename(elsewhere)
    (folder / "fp32.onnx").symlink_to(elsewhere)
    assert load(stored(store), options).engines
    gc.collect()
    os.mkfifo(folder / "pipe")
    assert "replace it with a regular file" in refusal(store, options)
    (folder / "pipe").unlink()
    with elsewhere.open("ab") as file:
        file.write(b"\0")
    assert "is not valid" in refusal(store, options)


def test_what_git_leaves_and_what_the_signer_left_out_is_not_there(
    store: StoreFolder, own: KeyPair, options: LoadOptions
) -> None:
    folder = store.add_digits()
    (folder / "notes").write_text("not signed")
    line = ("sign", "key", folder, "--private_key", own.private, "--signature", folder / SIGNATURE)
    assert model_signing(*line, "--ignore-paths", folder / "notes").returncode == 0
    (folder / ".gitattributes").write_text("no signature is about this one")
    loaded = load(stored(store), options)
    (copy,) = copies(options)
    names = {one.name for one in (copy / "1").iterdir()}
    assert MANIFEST in names
    assert not names & {"notes", ".gitattributes"}
    assert loaded.engines


def test_a_folder_where_others_write_keeps_no_copies(store: StoreFolder, own: KeyPair, options: LoadOptions) -> None:
    options.signed.folder.mkdir(parents=True)
    options.signed.folder.chmod(0o777)
    with pytest.raises(BundleError, match="other users can write to it"):
        load(stored(store), options)


def test_keys_that_are_none_are_told_at_once(own: KeyPair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--require-signature .* is not an elliptic-curve public key"):
        SignedOnly.by((own.private,), tmp_path)
    with pytest.raises(UsageError, match=r"^--require-signature \S*/not-there: no such file") as caught:
        SignedOnly.by((tmp_path / "not-there",), tmp_path)
    assert "openssl" not in str(caught.value)
    for wrong in (own.public, tmp_path / "not-there"):
        with pytest.raises(UsageError, match=r"--sign .* is not an unencrypted PEM private key of an elliptic curve"):
            BundleSigner(wrong)


def test_export_signs_what_it_publishes_and_others_can_verify_it(
    own: KeyPair, options: LoadOptions, tmp_path: Path
) -> None:
    model = onnx_models.shift(tmp_path / "theirs" / "model.onnx", 1.0)
    asked = ExportOptions(str(model), "shift", store=tmp_path / "store", sign=own.private)
    folder = export_bundle(asked)
    assert open_bundle(folder).manifest.spec.name == "shift"
    assert load(Store.at(tmp_path / "store").version("shift", 1), options).engines
    line = ("verify", "key", folder, "--public_key", own.public, "--signature", folder / SIGNATURE)
    told = model_signing(*line)
    assert told.returncode == 0, told.stderr
    assert not (export_bundle(replace(asked, sign=None)) / SIGNATURE).exists()
