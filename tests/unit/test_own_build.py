"""The Convoy that is measured beside peers: built once from a checkout, and again when that changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.loadtest.peers import own_build
from convoy.loadtest.peers.own_build import ensure_build
from convoy.models.errors import JobError
from tests.support.stores import ROOT

pytestmark = pytest.mark.slow

SETUP = """import os
from setuptools import setup
setup(name="small", version="1", packages=["convoy", "convoy.app"], description=os.environ["CONVOY_USE_MYPYC"])
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that has no more than a build needs, in the place of this one."""
    root = tmp_path / "checkout"
    for package in ("app", "convoy", "export", "loadtest", "models"):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
    (root / "convoy" / "app").symlink_to("../app")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (root / name).touch()
    (root / "setup.py").write_text(SETUP)
    monkeypatch.setattr(own_build, "ROOT", root)
    return root


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_it_is_built_once_and_again_when_the_checkout_changes(checkout: Path, tmp_path: Path) -> None:
    before = files(checkout)
    build = ensure_build(tmp_path / "home")
    assert (build / "convoy" / "app" / "__init__.py").is_file()
    (metadata,) = build.glob("small-1*.dist-info/METADATA")
    assert "Summary: 1\n" in metadata.read_text()  # it was asked to compile
    assert files(checkout) == before  # nothing is left beside the sources
    (build / "mark").touch()
    assert ensure_build(tmp_path / "home") == build
    assert (build / "mark").exists()
    (checkout / "app" / "new.py").touch()
    ensure_build(tmp_path / "home")
    assert not (build / "mark").exists()
    assert (build / "convoy" / "app" / "new.py").exists()


def test_what_cannot_be_compiled_is_told_with_what_to_do(checkout: Path, tmp_path: Path) -> None:
    (checkout / "setup.py").write_text("raise SystemExit('error: command gcc failed: No such file or directory')")
    with pytest.raises(JobError, match=r"command gcc failed.*needs gcc and Python's headers; --interpreted"):
        ensure_build(tmp_path / "home")
    (checkout / "setup.py").write_text(SETUP)
    assert (ensure_build(tmp_path / "home") / "convoy" / "app").is_dir()


def test_without_a_checkout_there_is_nothing_to_build_from(checkout: Path, tmp_path: Path) -> None:
    (checkout / "setup.py").unlink()
    with pytest.raises(JobError, match=r"no checkout of Convoy.*--interpreted"):
        ensure_build(tmp_path / "home")


def test_without_the_compiler_it_is_named(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise own_build.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(own_build.metadata, "version", missing)
    with pytest.raises(JobError, match="mypy is not installed"):
        ensure_build(tmp_path / "home")


def test_what_is_editable_is_not_compiled() -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "editable_wheel"],
        cwd=ROOT,
        env=os.environ | {"CONVOY_USE_MYPYC": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "unset CONVOY_USE_MYPYC" in done.stderr
