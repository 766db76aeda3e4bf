"""The oracle with real builds: one answers as it does itself, and one whose words were changed is found out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import check_ended
from tests.support.stores import ROOT

# Words that clients are told, changed each in one letter, and the servers that are asked for them.
CHANGED = {
    "errors": ("top_k must be a whole number of classes", "top-k must be a whole number of classes"),
    "grpc": ("is not supported by this server", "is not supported by that server"),
    "framing": ("this is not an HTTP/1.1 request", "this is not an HTTP/1.0 request"),
    "commands": ("max_inflight_mb must be at least max_body_mb", "max_inflight_mb must be at most max_body_mb"),
}


def compare(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.oracle", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_build_answers_as_it_does_itself() -> None:
    ended = compare("--before", str(ROOT), timeout_s=1400)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # A broken request's answer may race with the client's end; no other may.
    unsteady = [line for line in ended.stdout.splitlines() if line.startswith("unsteady")]
    assert all(" shot " in line for line in unsteady), unsteady


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_build_that_says_something_else_is_found_out(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "convoy", tmp_path / "convoy", ignore=shutil.ignore_patterns("__pycache__"))
    for words, others in CHANGED.values():
        places = [path for path in tmp_path.rglob("*.py") if words in path.read_text()]
        assert places, f"nothing in the build says {words!r} any more; change other words"
        for path in places:
            path.write_text(path.read_text().replace(words, others))
    chosen = ("--setups", ",".join(CHANGED), "--show", "1000")
    ended = compare("--after", str(tmp_path), "--before", str(ROOT), *chosen, timeout_s=800)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    for setup, (words, others) in CHANGED.items():
        of_setup = [part for part in ended.stdout.split("\n=== ") if part.startswith(f"{setup}/")]
        assert any(words in part and others in part for part in of_setup), f"{setup}: {words!r} was not found out"


def test_what_cannot_be_compared_is_an_error() -> None:
    check_ended(compare("--before", "no-such-revision", timeout_s=60), 2, "neither a folder nor a revision")
