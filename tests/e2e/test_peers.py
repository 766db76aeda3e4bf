"""The whole comparison with peers, against peers of the standard library that are installed in no time."""

from __future__ import annotations

import json
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
QUICK = [
    "--rounds=1",
    "--duration=0.3",
    "--sweep=0.2",
    "--sweep-rounds=1",
    "--warm-up=0.1",
    "--generator=own",
]

pytestmark = pytest.mark.slow


def start(folder: Path, peers: str, *options: str) -> subprocess.Popen[str]:
    network = identity(folder / "identity.onnx", dims=("batch", 12))
    where = ["--home", str(folder / "home"), "--model", str(network), "--json", str(folder / "peers.json")]
    command = [sys.executable, "-m", "convoy.loadtest.peers", "--peers", peers, "--peers-from", str(PEERS), *where]
    return subprocess.Popen(
        [*command, *QUICK, *options], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def read(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "peers.json").read_text())
    return document


def test_a_peer_is_swept_and_paired_with_convoy_and_the_page_shows_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# By hand\n\n<!-- measured: peers -->\nold\n<!-- end of peers -->\n\nand more\n")
    process = start(tmp_path, "echo", "--page", str(page))
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    document = read(tmp_path)
    assert [trial["setting"]["max_batch"] for trial in document["trials"]].count(8) == 2
    assert [pair["round"] for pair in document["pairs"]] == [0]
    for pair in document["pairs"]:
        for reading in (pair["ours"], pair["theirs"]):
            assert reading["answered"] > 0
            assert reading["failed"] == 0
            assert reading["server_cpu_us"] > 0
    text = page.read_text()
    assert text.startswith("# By hand\n")
    assert text.endswith("and more\n")
    assert "| Echo |" in text
    assert "old" not in text


def test_peers_that_fail_are_named_with_their_reasons(tmp_path: Path) -> None:
    process = start(tmp_path, "absent,broken,wrong")
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    failures = {failure["peer"]: failure for failure in read(tmp_path)["failures"]}
    assert failures["absent"]["stage"] == "environment"
    assert "needs Python 2.99" in failures["absent"]["reason"]
    assert failures["broken"]["stage"] == "start"
    assert "the port is in use by somebody else" in failures["broken"]["reason"]
    assert failures["wrong"]["stage"] == "answers"
    for title in ("Absent", "Broken", "Wrong"):
        assert f"- {title} (" in output


def test_ctrl_c_writes_what_there_is_and_leaves_nobody_behind(tmp_path: Path) -> None:
    process = start(tmp_path, "echo", "--rounds", "1000")
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("round 1"):
        assert line, "it ended before the first round"
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    document = read(tmp_path)
    assert document["interrupted"]
    assert document["pairs"]
    # multiprocessing's own helper sees that its pipe is closed a moment after its parent has ended.
    _, left = psutil.wait_procs(family, timeout=60)
    assert not left


def test_a_load_that_is_not_known_is_refused_with_those_that_are(tmp_path: Path) -> None:
    process = start(tmp_path, "echo", "--loads", "json-16,json-99")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "must be some of binary-1, binary-16, binary-64, json-16, grpc-1" in " ".join(
        output.replace("│", " ").split()
    )
    assert not (tmp_path / "peers.json").exists()


def test_loads_for_which_no_peer_has_a_body_are_refused(tmp_path: Path) -> None:
    process = start(tmp_path, "echo", "--loads", "binary-1,binary-64")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "none of these peers has a body for any of these loads" in output
    assert not (tmp_path / "peers.json").exists()
