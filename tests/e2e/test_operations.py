"""What the people who run a server rely on: metrics, logs, keys, ids, documents, and another host."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers import Server, check_ended, run_convoy, start_server, wait_until
from tests.support.stores import ROOT, StoreFolder, digit
from tests.support.wire import check_refused

DIGITS = "/predictions/digits"


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    shared_store.add_digits()
    shared_store.add_add_sub()
    with start_server("--engine", "auto", "--access-log", "all", store=shared_store.root) as server:
        yield server


def test_what_clients_make_up_does_not_become_a_label(server: Server) -> None:
    server.post("/predictions/warm-up", content=b"")
    server.post("/v2/models/digits/versions/999/infer", content=b"")
    once = len(server.get("/metrics").text.splitlines())
    for number in range(50):
        server.post(f"/predictions/made-up-{number}", content=b"")
        server.post(f"/v2/models/digits/versions/{number + 2}/infer", content=b"")
    assert "made-up" not in server.get("/metrics").text
    assert len(server.get("/metrics").text.splitlines()) == once


def test_each_answer_has_an_id_its_own_or_a_new_one(server: Server) -> None:
    for path, status in ((DIGITS, 200), ("/predictions/nobody", 404)):
        answer = server.post(path, content=digit("four"), headers={"X-Request-Id": f"my-request-{status}"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, f"my-request-{status}")
    wait_until(lambda: "[request my-request-200]" in server.log_so_far, "it is in the log")
    unfit = [b"", b"a" * 200, b"two words", b"caf\xe9"]
    made = [server.get("/ping", headers={b"X-Request-Id": own}).headers["x-request-id"] for own in unfit]
    made += [server.get(path).headers["x-request-id"] for path in ("/ping", "/nowhere", "/stats", "/docs", "/ping")]
    assert all(re.fullmatch(r"[0-9a-f]{8}-\d+", one) for one in made)
    assert len(set(made)) == len(made)


def test_answers_say_where_their_time_went(server: Server) -> None:
    row = {"shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
    tensors = {"inputs": [{"name": "INPUT0", **row}, {"name": "INPUT1", **row}]}
    answers = server.post(DIGITS, content=digit("six")), server.post("/v2/models/simple/infer", json=tensors)
    timing, other = (answer.headers["server-timing"] for answer in answers)
    assert [part.split(";")[0] for part in other.split(", ")] == ["decode_wait", "decode", "queue", "compute", "total"]
    stages = ("decode_wait", "decode", "queue", "compute", "total")
    assert re.fullmatch(", ".join(rf"{stage};dur=[\d.]+" for stage in stages), timing)


def test_a_client_cannot_write_lines_or_colours_into_the_log(server: Server) -> None:
    server.post("/predictions/x%0a2026-01-01T00:00:00.000Z%20ERROR%20owned%1b[31m%e2%80%a8", content=b"")
    wait_until(lambda: "owned" in server.log_so_far, "it is in the log")
    assert "\x1b" not in server.log
    assert not any(line.startswith("2026-01-01T00:00:00.000Z ERROR owned") for line in server.log.splitlines())


@pytest.mark.parametrize(("mode", "expected"), [("errors", ["400"]), ("off", [])])
def test_the_access_log_says_as_much_as_it_is_asked_to(mode: str, expected: list[str]) -> None:
    with start_server("--access-log", mode) as server:
        server.post(DIGITS, content=digit("seven"))
        server.post(DIGITS, content=b"no image")
        server.signal()
        server.wait()
        assert re.findall(rf"POST {DIGITS} (\d+)", server.log) == expected


def test_only_the_key_opens_all_but_the_probes(locked: Server) -> None:
    wrong = ({}, *({b"Authorization": one} for one in (b"Bearer wrong", b"open sesame", b"Basic open sesame",
             b"Bearer open sesame2", b"Bearer \xff")))  # fmt: skip
    for headers in wrong:
        refused = [locked.get(path, headers=headers) for path in ("/metrics", "/v2", "/nowhere")]
        for answer in (*refused, locked.post(DIGITS, content=digit("one"), headers=headers)):
            check_refused(answer, 401, "Authorization: Bearer")
            assert answer.headers["x-request-id"]
    answer = locked.post(DIGITS, content=digit("one"), headers={"Authorization": "Bearer open sesame"})
    assert answer.json()["predictions"][0]["label"] == "1"
    for path in ("/ping", "/v2/health/live", "/v2/health/ready", "/v2/models/digits/ready"):
        assert locked.get(path).status_code == 200


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    check_ended(run_convoy("serve", "--port", "0", "--api-key-file", str(tmp_path / "key")), 2, "is empty")


def test_uvicorn_serves_the_same_application(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "convoy.app.server.main:app", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: _is_ready(port), "uvicorn serves")
            answer = httpx.post(f"http://127.0.0.1:{port}{DIGITS}", content=digit("seven"), trust_env=False)
            assert answer.json()["predictions"][0]["label"] == "7"
            process.terminate()
            assert process.wait(30) in (0, -15)
        finally:
            process.kill()
    assert "Traceback" not in (tmp_path / "log").read_text()


def _is_ready(port: int) -> bool:
    try:
        ready = httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", trust_env=False, verify=False)
        return ready.status_code == 200
    except httpx.TransportError:
        return False
