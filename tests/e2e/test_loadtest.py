"""The whole load test against a real server in a process of its own, which behaves as badly as asked."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from convoy.loadtest import runner
from convoy.loadtest.answers import AnswerCheck
from convoy.loadtest.bodies import Payload, request_bytes
from convoy.loadtest.command import run
from convoy.loadtest.endpoint import find_endpoint
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.results import whole
from convoy.models.errors import JobError, UsageError
from tests.support.played_http import playing
from tests.support.servers import metric, start_fake_server, wait_until
from tests.support.stores import ROOT, digit

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

# A generous objective, so that a busy test machine does not void an honest run: late is then over a second.
EASY_SLO_MS = 20_000


@pytest.fixture
def url() -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("loadtest_target.py")), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://localhost:{server.stdout.readline().strip()}"
        finally:
            server.kill()


def load(url: str, tmp_path: Path, model: str | None = None, **options) -> tuple[int, str, dict]:
    """Exit code, what was printed, and the JSON."""
    console = Console(file=io.StringIO(), width=200)
    file = tmp_path / "report.json"
    options = {"duration_s": 0.6, "slo_ms": EASY_SLO_MS, "json_file": file, "timeout_s": 30.0, **options}
    code = run(LoadTestOptions(url=url, model=model, **options), console)
    return code, console.file.getvalue(), json.loads(file.read_text())


@pytest.mark.parametrize("body", ["auto", "binary", "json"])
def test_closed_loop(url, tmp_path, body):
    code, printed, found = load(url, tmp_path, "steady", concurrency=4, body=body)
    assert (code, "4 clients" in printed) == (0, True)
    assert "p99.9" in printed or "needs" in printed
    assert found["good"] == found["offered"] > 0
    assert sum(found["per_second"]["good"]) >= found["good"]
    target = {"body": "json" if body == "json" else "binary", "server": {"name": "target", "version": "1"}}
    assert found["target"].items() >= target.items()


@pytest.mark.parametrize("arrivals", ["poisson", "constant"])
def test_open_loop(url, tmp_path, arrivals):
    code, printed, found = load(url, tmp_path, "steady", rate=200, arrivals=arrivals)
    assert code == 0
    assert all(words in printed for words in (f"{arrivals} 200 requests/s", "from scheduled time"))
    assert found["good"] == found["offered"] > 50
    assert found["generator"]["lateness_p99_ms"] <= found["generator"]["lateness_limit_ms"] == 1000


def test_a_folder_of_images_is_sent_in_turn(demo, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "one.png").write_bytes(digit("seven"))
    (pictures / "two.jpg").write_bytes(b"not even an image")
    (pictures / "notes.txt").write_text("is left out")
    code, _, found = load(demo.url, tmp_path, "digits", concurrency=1, images=pictures)
    assert (code, found["target"]["body"]) == (1, "image")
    assert abs(found["good"] - found["failed"]) <= 1
    (error,) = found["errors"]
    assert "not an image" in error["text"]
    for no_folder in (tmp_path / "none", pictures / "one.png"):
        with pytest.raises(UsageError, match="is not a folder"):
            load(demo.url, tmp_path, "digits", images=no_folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match="no images"):
        load(demo.url, tmp_path, "digits", images=tmp_path / "empty")


def test_a_deadline_goes_with_every_request(tmp_path):
    with start_fake_server(fake={"latency_ms": 300.0}) as server:
        _, _, found = load(server.url, tmp_path, "rows", concurrency=2, deadline_ms=5.0)
        assert found["good"] == 0
        assert {error["kind"] for error in found["errors"]} == {"http"}
        assert metric(server, "convoy_call_duration_seconds_count", model="rows", outcome="answered") <= 1
        _, _, found = load(server.url, tmp_path, "rows", concurrency=2, deadline_ms=20_000.0)
        assert found["good"] == found["offered"] > 0


CLOSED, OPEN = {"concurrency": 2}, {"rate": 50}


@pytest.mark.parametrize(
    ("model", "kind", "words", "mode"),
    [
        ("stalls", "timeout", "no answer within 1 s", OPEN),
        ("resets", "reset", "the server closed the connection without an answer", CLOSED),
        ("resets", "reset", "the server closed the connection without an answer", OPEN),
        ("garbage", "garbage", "not an HTTP answer", CLOSED),
        ("liar", "garbage", "200 without", OPEN),
        ("sheds", "http", "the queue is full", CLOSED),
        ("dies", "refused", "the server does not accept connections any more", CLOSED),
        ("dies", "refused", "the server does not accept connections any more", OPEN),
    ],
)
def test_what_goes_wrong_is_counted_in_plain_words(url, tmp_path, model, kind, words, mode):
    code, printed, found = load(url, tmp_path, model, warm_up_s=0, timeout_s=1.0, **mode)
    assert (code, words in printed, found["unfinished"]) == (1, True, 0)
    assert kind in [error["kind"] for error in found["errors"]]
    assert found["failed"] == sum(error["count"] for error in found["errors"]) > 0


def test_requests_beyond_the_connections_wait_and_their_latency_counts(url, tmp_path):
    code, printed, found = load(url, tmp_path, "stalls", rate=50, connections=2, timeout_s=1.0)
    assert (code, "waited for a free connection" in printed) == (1, True)
    assert found["generator"]["waited_for_connection"] > 0
    assert {error["text"] for error in found["errors"]} >= {"no free connection for 1 s", "no answer within 1 s"}
    assert found["offered"] == found["failed"]


def test_a_rate_out_of_reach_voids_the_run(url, tmp_path):
    code, printed, found = load(url, tmp_path, "steady", rate=2_000_000, slo_ms=1, duration_s=0.3, timeout_s=0.5)
    assert (code, "Not valid." in printed, found["verdict"]) == (1, True, "not valid")
    # A machine that is busy with other work may not even begin.
    assert re.search("could not keep the schedule|nothing was measured", found["void"])


def test_the_api_key_is_sent_and_not_written_down(url, tmp_path):
    code, _, found = load(url, tmp_path, "secret", concurrency=1, api_key="open sesame")
    assert (code, "sesame" in json.dumps(found)) == (0, False)
    with pytest.raises(JobError, match=r"401.*--api-key"):
        load(url, tmp_path, "secret", concurrency=1)


@pytest.mark.parametrize(
    ("model", "options", "kind", "words"),
    [
        ("cats", {}, JobError, r"no model 'cats'; it serves dies, .*steady"),
        (None, {}, UsageError, "choose one with --model"),
        ("steady", {"body": "image"}, JobError, "does not take images; use --body binary"),
    ],
)
def test_a_target_that_cannot_be_is_told(url, tmp_path, model, options, kind, words):
    with pytest.raises(kind, match=words):
        load(url, tmp_path, model, **options)
    for wrong in ("localhost:8000", "ftp://localhost", "http://", "http://localhost:port"):
        with pytest.raises(UsageError, match="should look like"):
            load(wrong, tmp_path, "steady")


def test_a_server_that_stops_for_a_moment_is_seen_by_all_who_came_meanwhile(url, tmp_path):
    """A closed loop would count one slow request for each client; the open loop counts everybody who waited."""
    # Longer patience than the nap of a second, so that nobody who waited is lost, however busy the machine.
    options = {"rate": 100, "arrivals": "constant", "duration_s": 2, "warm_up_s": 0, "slo_ms": 500, "timeout_s": 10}
    code, _, found = load(url, tmp_path, "naps", **options)
    assert found["errors"] == []
    assert code == (0 if found["void"] is None else 1)
    late = (1 - found["goodput"]) * found["offered"]
    assert 40 <= late <= 120  # of the hundred due within the second's nap, the first half waited longer than 500 ms
    assert found["latency_ms"]["max"] >= 900


def test_a_program_brings_its_own_requests(url):
    """To a server of which nothing is asked beforehand."""
    endpoint = find_endpoint(url)
    request = request_bytes(endpoint, "/v2/models/steady/infer", Payload(b"{}", ()), None)
    options = LoadTestOptions(rate=100, duration_s=0.5, slo_ms=EASY_SLO_MS)
    for word, good in ((b"model_name", True), (b"no such word", False)):
        measurement = runner.run(options, RequestPool([request], AnswerCheck("plain", word)), endpoint)
        result = whole(options, measurement)
        assert result.verdict.void is None
        assert result.summary.offered > 20
        assert result.summary.goodput == (1 if good else 0)


def test_several_processes_share_one_schedule(url, tmp_path):
    code, _, found = load(url, tmp_path, "steady", rate=200, processes=3, warm_up_s=0)
    _, _, alone = load(url, tmp_path, "steady", rate=200, processes=1, warm_up_s=0)
    assert (code, found["generator"]["processes"], found["offered"]) == (0, 3, alone["offered"])


def test_steps_give_a_row_each(url, tmp_path):
    file = tmp_path / "steps.csv"
    code, printed, found = load(url, tmp_path, "steady", steps=(50.0, 150.0), csv_file=file)
    assert (code, "steps of 50, 150 requests/s" in printed) == (0, True)
    assert [row["rate"] for row in found["rows"]] == [50, 150]
    assert found["rows"][0]["offered"] < found["rows"][1]["offered"]
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["name"] for row in rows] == ["step 1", "step 2"]
    assert float(rows[1]["good"]) == found["rows"][1]["good"]


def test_a_server_without_the_protocol_is_told_from_one_without_the_model(tmp_path):
    with playing(lambda asked: (404, {}, b"nothing")) as url:
        for model in (None, "cats"):
            with pytest.raises(JobError, match="does not speak the Open Inference Protocol"):
                load(url, tmp_path, model)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
class TestProcesses:
    """What becomes of generator processes when something ends that should not."""

    def test_one_that_dies_voids_the_run_and_keeps_its_rows(self, url, tmp_path):
        file = tmp_path / "report.json"
        with running(url, f"--rate 3000 --processes 2 --duration 60 --warm-up 0 --json {file}") as child:
            generators = wait_until(lambda: generators_of(child.pid, 2), "both generators run")
            wait_until(lambda: cpu_ticks(generators[0]) > 30, "it has sent something")
            os.kill(generators[0], signal.SIGKILL)
            printed = child.communicate(timeout=60)[0]
        assert (child.returncode, "was killed by SIGKILL" in printed) == (1, True)
        assert json.loads(file.read_text())["good"] > 0

    def test_none_outlives_a_parent_that_is_killed(self, url):
        with running(url, "--rate 100 --processes 2 --duration 60") as child:
            generators = wait_until(lambda: generators_of(child.pid, 2), "both generators run")
            child.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in generators), "both generators have ended")

    @pytest.mark.parametrize("load", ["--concurrency 2", "--rate 3000"])
    def test_none_outlives_ctrl_c_and_what_was_measured_so_far_is_shown(self, url, tmp_path, load):
        file = tmp_path / "report.json"
        with running(url, f"{load} --processes 2 --duration 60 --warm-up 0 --json {file}") as child:
            generators = wait_until(lambda: generators_of(child.pid, 2), "both generators run")
            wait_until(lambda: cpu_ticks(generators[1]) > 30, "there is something to tell of")
            child.send_signal(signal.SIGINT)
            printed = child.communicate(timeout=60)[0]
        assert (child.returncode, "Not valid. The run was stopped early" in printed) == (130, True)
        found = json.loads(file.read_text())
        assert found["interrupted"]
        assert found["good"] > 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in generators)


def running(url: str, options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "convoy.loadtest", "--url", url, "--model", "steady", *options.split()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def generators_of(parent: int, count: int) -> list[int]:
    """The process ids of the parent's generators once there are so many and they have sent something."""
    pids = [child.pid for child in psutil.Process(parent).children() if "convoy.loadtest.generator" in child.cmdline()]
    return pids if len(pids) == count else []


def cpu_ticks(pid: int) -> float:
    """Hundredths of a second that the process has computed: an interpreter that has started and works."""
    return 100 * sum(psutil.Process(pid).cpu_times()[:2])
