"""Bundles: sealed, checked to the last byte, readable when they are older than a field."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.models.bundle import MANIFEST, open_bundle, read_manifest, seal
from convoy.models.errors import BundleError

DEMO = Path(__file__).parents[2] / "models" / "demo" / "digits" / "1"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "1"))


def test_the_demo_is_sound() -> None:
    opened = open_bundle(DEMO)
    assert opened.manifest.spec.name == "digits"
    assert 8 <= opened.canary().samples <= 32


@pytest.mark.parametrize("name", sorted(path.name for path in DEMO.iterdir()))
def test_one_flipped_bit_in_any_file_is_refused(bundle: Path, name: str) -> None:
    content = (bundle / name).read_bytes()
    for position in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
        damaged = bytearray(content)
        damaged[position] ^= 1
        (bundle / name).write_bytes(damaged)
        with pytest.raises(BundleError):
            open_bundle(bundle)
    (bundle / name).write_bytes(content)
    open_bundle(bundle)


@pytest.mark.parametrize("name", sorted(path.name for path in DEMO.iterdir()))
def test_a_missing_file_is_refused(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=name):
        open_bundle(bundle)


def test_a_manifest_written_again_is_the_same_manifest() -> None:
    manifest = read_manifest(DEMO)
    changed = replace(manifest, spec=replace(manifest.spec, labels=("Ü", *manifest.spec.labels[1:])))
    assert seal(changed) != seal(manifest)


def test_an_edited_manifest_is_refused_even_when_it_says_the_same(bundle: Path) -> None:
    path = bundle / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    with pytest.raises(BundleError, match="changed after it was written"):
        open_bundle(bundle)


def test_a_manifest_may_not_name_files_outside_its_folder(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    record = manifest.files["labels.txt"]
    (bundle / MANIFEST).write_bytes(seal(replace(manifest, files={**manifest.files, "../labels.txt": record})))
    with pytest.raises(BundleError, match="outside the bundle"):
        open_bundle(bundle)


def test_a_manifest_of_another_schema_says_so(bundle: Path) -> None:
    (bundle / MANIFEST).write_bytes(seal(replace(read_manifest(bundle), schema_version=99)))
    with pytest.raises(BundleError, match="schema_version is 99"):
        open_bundle(bundle)
