"""Environments of their own for libraries of others. Ultralytics' licence is the AGPL: nothing of the project imports
it, and it is never installed beside the project."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.stores import ROOT

# Without what they depend on: torch, torchvision, onnx and ONNX Runtime are those of the tests.
REQUIREMENTS = (
    "ultralytics==8.4.190",
    "ultralytics-thop==2.2.3",
    "opencv-python-headless==5.0.0.93",
    "polars==2.1.0",
    "polars-runtime-32==2.1.0",
    "py-cpuinfo==9.0.0",
    "onnxslim==0.1.98",
)
# Those that the environment of the tests may lack.
ALSO = ("requests", "pyyaml")


def ultralytics_python() -> Path:
    """The interpreter of that environment. Skips the test, with the reason, where it cannot be made."""
    return interpreter("ultralytics", REQUIREMENTS, ALSO, with_needs=False)


def interpreter(name: str, requirements: Sequence[str], also: Sequence[str] = (), *, with_needs: bool = True) -> Path:
    """The interpreter of an environment with these packages, made in build/NAME, where it is kept for the next run.

    It sees what the tests' own environment has, behind its own. Skips the test, with the reason, where it cannot be
    made."""
    folder = ROOT / "build" / name
    python, done = folder / "bin" / "python", folder / "made-of.txt"
    wanted = "\n".join((sys.version, *requirements))
    if done.exists() and done.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    # At the end of its path, so that what is installed here comes first.
    (site / "zz-of-the-tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _pip(python, *(() if with_needs else ("--no-deps",)), *requirements)
    if also:
        _pip(python, *also)
    done.write_text(wanted)
    return python


def make_models(folder: Path, *words: str, timeout_s: float = 600.0) -> None:
    """Runs make_models.py there, with these further words of its command line."""
    command = [str(ultralytics_python()), str(ROOT / "tests" / "yolo" / "make_models.py"), str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def _pip(python: Path, *packages: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"no environment for {packages[-1]}, for which a package index is needed: {done.stderr[-500:]}")
