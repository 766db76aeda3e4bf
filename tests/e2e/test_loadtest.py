"""The whole load test against a real server in a process of its own, which behaves as badly as asked."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.command import run
from loadtest.options import LoadOptions
from models.errors import JobError, UsageError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# A generous objective, so that a busy test machine does not void an honest run: late is then over 100 ms.
EASY_SLO_MS = 2000


@pytest.fixture
def url() -> Iterator[str]:
    command = [sys.executable, str(HERE / "loadtest_target.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://localhost:{server.stdout.readline().strip()}"
        finally:
            server.kill()


def load(url: str, model: str | None, tmp_path: Path, **options) -> tuple[int, str, dict]:
    """Exit code, what was printed, and the JSON."""
    console = Console(file=io.StringIO(), width=200)
    file = tmp_path / "report.json"
    options = {"duration_s": 0.6, "slo_ms": EASY_SLO_MS, "json_file": file, "timeout_s": 1.0, **options}
    code = run(LoadOptions(url=url, model=model, **options), console)
    return code, console.file.getvalue(), json.loads(file.read_text())


@pytest.mark.parametrize("body", ["auto", "binary", "json"])
def test_closed_loop(url, tmp_path, body):
    code, printed, found = load(url, "steady", tmp_path, concurrency=4, body=body)
    assert code == 0
    assert "4 clients" in printed
    assert "p99.9" in printed or "needs" in printed
    assert found["good"] == found["offered"] > 0
    assert found["goodput"] > 0
    assert sum(found["per_second"]["good"]) >= found["good"]
    assert found["target"]["body"] == ("json" if body == "json" else "binary")
    assert found["target"]["server"] == {"name": "target", "version": "1"}


@pytest.mark.parametrize("arrivals", ["poisson", "constant"])
def test_open_loop(url, tmp_path, arrivals):
    code, printed, found = load(url, "steady", tmp_path, rate=200, arrivals=arrivals)
    assert code == 0
    assert f"{arrivals} 200 requests/s" in printed
    assert "from when it was due" in printed
    assert found["good"] == found["offered"] > 50
    assert found["generator"]["lateness_p99_ms"] <= found["generator"]["lateness_limit_ms"] == 100


def test_a_model_that_takes_images_gets_images(url, tmp_path):
    code, _, found = load(url, "image", tmp_path, concurrency=2)
    assert code == 0
    assert found["target"]["body"] == "image"


def test_a_server_that_ends_each_connection_is_measured_all_the_same(url, tmp_path):
    code, _, found = load(url, "closes", tmp_path, concurrency=4)
    assert code == 0
    assert found["good"] > 10
    code, _, found = load(url, "closes", tmp_path, rate=100)
    assert code == 0


@pytest.mark.parametrize("mode", [{"concurrency": 2}, {"rate": 50}])
@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        ("stalls", "timeout", "no answer within 1 s"),
        ("resets", "reset", "the server closed the connection without an answer"),
        ("garbage", "garbage", "not an HTTP answer"),
        ("liar", "garbage", "200 without"),
        ("sheds", "http", "the queue is full"),
        ("dies", "refused", "nobody listens there any more"),
    ],
)
def test_what_goes_wrong_is_counted_in_plain_words(url, tmp_path, model, kind, words, mode):
    code, printed, found = load(url, model, tmp_path, warm_up_s=0, **mode)
    assert code == 1
    assert words in printed
    assert kind in [error["kind"] for error in found["errors"]]
    assert found["failed"] == sum(error["count"] for error in found["errors"]) > 0
    assert found["unfinished"] == 0


def test_goodput_counts_refusals_against_the_server(url, tmp_path):
    _, _, found = load(url, "sheds", tmp_path, rate=200)
    assert 0.3 < found["goodput"] < 0.7


def test_requests_beyond_the_connections_wait_and_their_latency_counts(url, tmp_path):
    code, printed, found = load(url, "stalls", tmp_path, rate=50, connections=2)
    assert code == 1
    assert found["generator"]["waited_for_connection"] > 0
    assert "found all connections busy" in printed
    assert {error["text"] for error in found["errors"]} >= {"no free connection for 1 s", "no answer within 1 s"}
    assert found["offered"] == found["failed"]


def test_a_rate_out_of_reach_voids_the_run(url, tmp_path):
    code, printed, found = load(url, "steady", tmp_path, rate=2_000_000, slo_ms=1, duration_s=0.3, timeout_s=0.5)
    assert code == 1
    assert "VOID" in printed
    assert "could not keep the schedule" in found["void"]


def test_the_api_key_is_sent_and_not_written_down(url, tmp_path):
    code, _, found = load(url, "secret", tmp_path, concurrency=1, api_key="open sesame")
    assert code == 0
    assert "sesame" not in json.dumps(found)
    with pytest.raises(JobError, match=r"401.*--api-key"):
        load(url, "secret", tmp_path, concurrency=1)


def test_a_model_that_does_not_exist_names_those_that_do(url, tmp_path):
    with pytest.raises(JobError, match=r"no model 'cats'; it serves closes, .*steady"):
        load(url, "cats", tmp_path)


def test_without_a_name_and_with_many_models_one_is_asked_for(url, tmp_path):
    with pytest.raises(UsageError, match="choose one with --model"):
        load(url, None, tmp_path)


def test_forcing_images_on_a_model_that_takes_none(url, tmp_path):
    with pytest.raises(JobError, match="does not take images; use --body binary"):
        load(url, "steady", tmp_path, body="image")


def test_a_server_that_is_down(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(JobError, match=r"nobody answers at .*start the server with `convoy serve`"):
            load(f"http://127.0.0.1:{unused.getsockname()[1]}", "steady", tmp_path)


@pytest.mark.parametrize("wrong", ["localhost:8000", "ftp://localhost", "http://", "http://localhost:port"])
def test_a_url_that_is_none(wrong, tmp_path):
    with pytest.raises(UsageError, match="should look like"):
        load(wrong, "steady", tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals")
@pytest.mark.parametrize("load_option", ["concurrency=2", "rate=100"])
def test_ctrl_c_shows_what_was_measured_so_far(url, tmp_path, load_option):
    file = tmp_path / "report.json"
    script = f"""
import sys
from pathlib import Path
from rich.console import Console
from loadtest import command, measure
from loadtest.options import LoadOptions

class View:
    def __init__(self, console, duration_s): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def show(self, progress):
        if progress.good > 20: print("running", flush=True)

command.LiveView = View
file = Path({str(file)!r})
options = LoadOptions(url={url!r}, model="steady", {load_option}, duration_s=60, warm_up_s=0, json_file=file)
sys.exit(command.run(options, Console()))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        stopped_at = time.monotonic()
        child.send_signal(signal.SIGINT)
        printed = child.stdout.read()
    assert child.returncode == 130
    assert time.monotonic() - stopped_at < 30
    assert "Stopped early" in printed
    found = json.loads(file.read_text())
    assert found["interrupted"]
    assert found["good"] > 20
