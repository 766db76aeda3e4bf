"""The tests marked `gpu`, in a process of their own: what they break does not break the measuring.

pytest reads the project's own settings but for those that need the developers' plugins: an option that no plugin
knows, or a deprecation in another version of a library, is no reason to prove nothing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

from tests.gpu.proof.records import TestRun
from tests.gpu.proof.subjects import ROOT, NotMade

_NEEDED = ("pytest", "hypothesis")
PATHS = ("tests/gpu", "tests/contract")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")
_NOTE = re.compile(r"^(FAILED|ERROR|SKIPPED) .*", re.MULTILINE)
_MOST_NOTES = 20


def run_tests(limit_s: float, paths: tuple[str, ...] = PATHS, about: str = "") -> TestRun:
    """All of them, or those whose names say what they are `about`.

    Raises NotMade without pytest, or where it does not end in time.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NotMade(f"{' and '.join(missing)} not installed")
    command = (
        *(sys.executable, "-m", "pytest", "-m", "gpu", "-rsfE", "-o", "addopts=--strict-markers", "-W", "default"),
        *("-q", "-p", "no:cacheprovider", *(("-k", about) if about else ()), *paths),
    )
    started_s = time.monotonic()
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise NotMade(f"pytest did not end within {limit_s:.0f} s") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return read_report(said, time.monotonic() - started_s)


def read_report(said: str, seconds: float) -> TestRun:
    """What pytest's last line counts, and what it says of each test that did not pass."""
    last = said.strip().splitlines()[-1] if said.strip() else ""
    counts = {word: int(number) for number, word in _COUNT.findall(last)}
    notes = [line.group(0)[:300] for line in _NOTE.finditer(said)]
    if not counts and not notes:
        notes = [f"pytest said: {last[:300]}"]
    return TestRun(
        passed=counts.get("passed", 0),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        skipped=counts.get("skipped", 0),
        seconds=round(seconds, 1),
        notes=tuple(notes[:_MOST_NOTES]),
    )
