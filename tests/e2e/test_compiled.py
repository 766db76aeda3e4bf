"""Convoy with its hot path compiled, as its image has it: what the tests of these modules say holds there, too."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from convoy.loadtest.peers.own_build import ensure_build
from tests.support.stores import ROOT

HEADER = Path(sysconfig.get_path("include"), "Python.h")

# A compiler has much to do for a minute, and then come hundreds of tests and a short campaign.
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler; run apt-get install gcc"),
    pytest.mark.skipif(not HEADER.is_file(), reason=f"{HEADER} is missing; run apt-get install python3-dev"),
]
# Of the compiled modules, and of the servers that are made of them.
TESTS = (
    *("tests/simulation/test_policy_properties.py", "tests/simulation/test_policy_over_time.py"),
    "tests/simulation/test_decoding_policy.py",
    *("tests/unit/test_scheduler.py", "tests/unit/test_policy.py", "tests/unit/test_early_drop.py"),
    *("tests/unit/test_slab.py", "tests/unit/test_extents.py", "tests/unit/test_latency.py"),
    *("tests/unit/test_lane_runner.py", "tests/unit/test_direct.py", "tests/unit/test_garbage.py"),
    *("tests/unit/test_direct_pictures.py", "tests/unit/test_scores.py", "tests/unit/test_ledger.py"),
    "tests/unit/test_decoder.py",
    *("tests/contract", "tests/e2e/test_direct_way.py", "tests/e2e/test_decoding.py"),
    *("tests/e2e/test_tracing.py", "tests/e2e/test_campaign.py", "tests/e2e/test_python_engine.py"),
)
WHERE = "import importlib, sys; print(*(importlib.import_module(name).__file__ for name in sys.argv[1:]), sep='\\n')"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the compiled Convoy is installed, with the tests and what they serve beside it."""
    folder = ensure_build(tmp_path_factory.mktemp("compiled"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "models" / "demo", folder / "models" / "demo")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def ask_python(build: Path, *words: str) -> str:
    """What this interpreter prints when it imports from `build`. The checkout is not on its path."""
    environment = os.environ | {"PYTHONPATH": str(build)}
    done = subprocess.run([sys.executable, "-P", *words], capture_output=True, text=True, env=environment, cwd=build)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_compiled_is_what_the_project_says(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONVOY_USE_MYPYC", raising=False)
    monkeypatch.setattr("setuptools.setup", lambda: None)
    compiled = runpy.run_path(str(ROOT / "setup.py"))["COMPILED"]
    names = [path.removesuffix(".py").replace("/", ".") for path in compiled]
    files = ask_python(build, "-c", WHERE, *names, "convoy.app.core").split()
    assert {Path(file).parents[len(name.split(".")) - 1] for file, name in zip(files, names, strict=False)} == {build}
    assert all(file.endswith(".so") for file in files[:-1])
    assert files[-1] == str(build / "convoy" / "app" / "core.py")


def test_doctor_says_so(build: Path) -> None:
    assert '"compiled": true' in ask_python(build, "-m", "convoy", "doctor", "--json")


def test_the_tests_of_these_modules_hold(build: Path) -> None:
    ask_python(build, "-m", "pytest", "-m", "not gpu and not image", "-p", "no:cacheprovider", "-x", *TESTS)
