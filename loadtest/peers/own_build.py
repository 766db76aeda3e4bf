"""Convoy as its image has it: installed from this checkout, with its hot path compiled.

A checkout that is served as it stands is interpreted; every other Convoy that somebody measures should be the one that
is shipped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from convoy import IMPORT_ROOT
from convoy.loadtest.peers.environment import PIP_INSTALL, make_once, run_installer
from convoy.models.errors import JobError

ROOT = IMPORT_ROOT
_PROJECT = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
_PACKAGES = ("app", "convoy", "export", "loadtest", "models")


def ensure_build(home: Path) -> Path:
    """The folder in `home` that Convoy is installed in, built now if this checkout's is not there yet.

    It is made for this interpreter, and imported from where it is: with `-P`, and the folder on PYTHONPATH. Raises
    JobError where there is no checkout, no mypyc or no C compiler.
    """
    folder = (home / "convoy").absolute()
    make_once(folder, _digest(), lambda: _build(folder))
    return folder


def _build(folder: Path) -> None:
    # From a copy: setuptools leaves what it makes beside its sources, and takes it for its own the next time.
    with tempfile.TemporaryDirectory(prefix="convoy-build-") as sources:
        for name in _PROJECT:
            shutil.copy(ROOT / name, sources)
        for package in _PACKAGES:
            shutil.copytree(
                ROOT / package, Path(sources, package), symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        pip = (sys.executable, *PIP_INSTALL, "--no-deps", "--no-build-isolation", "--target", str(folder), sources)
        try:
            run_installer("Convoy, compiled,", pip, os.environ | {"CONVOY_USE_MYPYC": "1"})
        except JobError as error:
            needs = "compiling needs gcc and Python's headers; --interpreted measures Convoy as it stands here"
            raise JobError(f"{error}; {needs}") from error


def _digest() -> str:
    """Of all that the build is made from and with. Raises JobError where that is not here."""
    if not (ROOT / "setup.py").is_file():
        raise JobError(f"{ROOT} is no checkout of Convoy, from which it could be built; measure it with --interpreted")
    try:
        compiler = metadata.version("mypy")
    except metadata.PackageNotFoundError:
        raise JobError("mypy is not installed, which compiles; run pip install -e '.[dev]'") from None
    digest = hashlib.sha256(f"{sys.version} {compiler}".encode())
    files = [path for package in _PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    for path in sorted((*files, *(ROOT / name for name in _PROJECT))):
        if "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
