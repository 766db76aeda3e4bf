"""The whole comparison with peers, against peers of the standard library that are installed in no time."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.onnx_models import identity
from tests.support.stores import ROOT

PEERS = ROOT / "tests" / "support" / "peers"
QUICK = ["--starts=1", "--pairs=1", "--seconds=1", "--sweep=1", "--warm-up=1"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed: apt-get install wrk"),
]


def start(folder: Path, against: str, loads: str, *options: str) -> subprocess.Popen[str]:
    network = identity(folder / "identity.onnx", dims=("batch", 12))
    where = ["--home", str(folder / "home"), "--model", str(network), "--json", str(folder / "peers.json")]
    what = ["--against", against, "--loads", loads, "--peers-from", str(PEERS)]
    return subprocess.Popen(
        [sys.executable, "-m", "convoy.loadtest.peers", *what, *where, *QUICK, *options],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(folder: Path, against: str, loads: str, *options: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    process = start(folder, against, loads, *options)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def read(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "peers.json").read_text())
    return document


def test_convoy_is_paired_with_a_peer_at_its_best_setting_and_with_a_sketch(tmp_path: Path) -> None:
    code, output = run(tmp_path, "echo,sketch", "tensor-1,json-16")
    assert code == 0, output
    found = {(one["load"], one["against"]): one for one in read(tmp_path)["comparisons"]}
    assert found.keys() == {("tensor-1", "sketch"), ("json-16", "echo")}
    for (_, against), one in found.items():
        assert one["setting"][0] in ((1, 8) if against == "echo" else (1,))
        (pair,) = one["pairs"]
        for reading in pair:
            assert reading["answers/s"] > 0
            assert reading["CPU us/answer"] > 0
    assert "| tensor-1 | sketch | CPU us/answer |" in output


def test_convoy_is_paired_with_an_earlier_one_over_grpc_and_in_its_starts(tmp_path: Path) -> None:
    """The earlier one has the interpreter of this very checkout."""
    base = tmp_path / "base" / ".venv" / "bin"
    base.mkdir(parents=True)
    # No link: an interpreter finds its packages beside the path by which it was called.
    (base / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (base / "python").chmod(0o755)
    code, output = run(tmp_path, "", "grpc-1,start", "--base", str(tmp_path / "base"))
    assert code == 0, output
    calls, starts = (one["pairs"][0] for one in read(tmp_path)["comparisons"])
    assert all(reading["answers/s"] > 0 for reading in calls)
    assert all(reading["start to first answer s"] > 0 and reading["idle MiB"] > 10 for reading in starts)


def test_peers_that_fail_are_named_with_their_reasons(tmp_path: Path) -> None:
    code, output = run(tmp_path, "absent,broken,wrong", "json-1")
    assert (code, output.count("not measured")) == (1, 3)
    problems = {one["against"]: one["problem"] for one in read(tmp_path)["comparisons"]}
    words = {"absent": "needs python2.99", "broken": "the port is in use by somebody else", "wrong": "is right"}
    assert all(words[peer] in problems[peer] for peer in words), problems


def test_ctrl_c_writes_what_there_is_and_leaves_no_process(tmp_path: Path) -> None:
    process = start(tmp_path, "echo", "json-1", "--starts", "1000")
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("json-1: 1 pairs"):
        assert line, "it ended before the first pair"
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert read(tmp_path)["comparisons"][0]["pairs"]
    _, left = psutil.wait_procs(family, timeout=120)
    assert not left


@pytest.mark.parametrize(
    ("against", "loads", "told"),
    [("echo", "json-1,json-99", "must be some of tensor-1, tensor-16"), ("echo", "tensor-1", "takes none of")],
)
def test_loads_that_cannot_be_sent_are_refused(tmp_path: Path, against: str, loads: str, told: str) -> None:
    code, output = run(tmp_path, against, loads)
    assert (code, told in output) == (2, True)
    assert not (tmp_path / "peers.json").exists()
