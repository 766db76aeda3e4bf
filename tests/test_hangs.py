"""A hang has an end and every thread's stack, wherever it is: see `tests/support/watchdog.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each starts a run of its own.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# Swallows what is raised in it, as a finaliser does.
DEAF = """
import ctypes, pytest, threading, time

def wait():
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            pass
"""
IN_PYTHON = f"{DEAF}\ndef test_hangs():\n    wait()"
# In C, with the interpreter's lock: locks what it has locked.
IN_C = f"""{DEAF}
def test_hangs():
    libc, lock = ctypes.PyDLL(None), (ctypes.c_char * 64)()
    while True:
        libc.pthread_mutex_lock(lock)
"""
IN_A_SETUP = f"{DEAF}\n@pytest.fixture\ndef one():\n    wait()\n\ndef test_hangs(one): pass"
IN_A_TEARDOWN = (
    f"{DEAF}\n@pytest.fixture(scope='module')\ndef one():\n    yield\n    wait()\n\ndef test_hangs(one): pass"
)
IN_A_THREAD = f"{DEAF}\ndef test_hangs():\n    threading.Thread(target=wait).start()"


def hanging(folder: Path, text: str, *options: str) -> str:
    """What is written about a file of tests of which one does not end; and that the run has failed."""
    (folder / "test_one.py").write_text(text)
    (folder / "test_other.py").write_text("def test_other(): pass")
    # No others: most of what such a run takes is to load them, in each of its processes.
    named = ("timeout", "xdist", "tests.support.watchdog", "no:cacheprovider")
    plugins = [word for name in named for word in ("-p", name)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--rootdir", str(folder), "--timeout", "3", *options, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2", "--max-worker-restart=0")], ids=["alone", "workers"])
@pytest.mark.parametrize("text", [IN_PYTHON, IN_C, IN_A_SETUP], ids=["python", "c", "setup"])
def test_a_test_that_hangs_is_ended_with_its_stack(tmp_path: Path, text: str, options: tuple[str, ...]) -> None:
    shown = hanging(tmp_path, text, *options)
    assert "Timeout (0:00:03" in shown
    assert f'File "{tmp_path / "test_one.py"}", line' in shown
    if options:
        assert "crashed while running 'test_one.py::test_hangs'" in shown


@pytest.mark.parametrize("text", [IN_A_TEARDOWN, IN_A_THREAD], ids=["teardown", "thread"])
def test_so_is_what_the_process_waits_for_behind_its_tests(tmp_path: Path, text: str) -> None:
    shown = hanging(tmp_path, text)
    assert "Timeout (0:00:03" in shown
    assert f'File "{tmp_path / "test_one.py"}", line' in shown


def test_a_test_that_an_exception_reaches_fails_and_the_others_run(tmp_path: Path) -> None:
    shown = hanging(tmp_path, "import time\ndef test_hangs():\n    time.sleep(3600)")
    assert "Timeout (>3.0s)" in shown
    assert "1 failed, 1 passed" in shown
