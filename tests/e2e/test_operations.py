"""What the people who run a server rely on: metrics, logs, keys, ids, another host, and answers to careless clients."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from tests.support.servers import Server, check_ended, free_port, run_convoy, start_server, wait_until
from tests.support.stores import ROOT, StoreFolder, digit
from tests.support.wire import check_refused

DIGITS = "/predictions/digits"


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    shared_store.add_digits()
    shared_store.add_add_sub()
    options = ("--engine", "auto", "--access-log", "all", "--max-inflight-mb", "512")
    with start_server(*options, store=shared_store.root) as server:
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
            check_refused(answer, 401, "Authorization: Bearer", code="unauthenticated")
            assert answer.headers["x-request-id"]
    answer = locked.post(DIGITS, content=digit("one"), headers={"Authorization": "Bearer open sesame"})
    assert answer.json()["predictions"][0]["label"] == "1"
    for path in ("/ping", "/v2/health/live", "/v2/health/ready", "/v2/models/digits/ready"):
        assert locked.get(path).status_code == 200


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    check_ended(run_convoy("serve", "--port", "0", "--api-key-file", str(tmp_path / "key")), 2, "is empty")


def test_uvicorn_serves_the_same_application(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "convoy.app.server.main:app", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        server = Server(process, tmp_path / "log")
        server.port = port
        try:
            server.await_ready()
            assert server.seven() == ("1", "7")
            process.terminate()
            assert process.wait(30) in (0, -15)
        finally:
            process.kill()
    assert "Traceback" not in server.log


# What probes and careless clients ask


def get_paths(server: Server) -> list[str]:
    """Every path of the document that is asked with GET, and what is not in it."""
    document = server.get("/openapi.json").json()
    found = [path for path, verbs in document["paths"].items() if "get" in verbs]
    names = {"model": "digits", "version": "1", "name": "r"}
    told = [re.sub(r"\{(\w+)\}", lambda one: names.get(one[1], "x"), path) for path in found]
    return [*told, "/v2/", "/docs", "/openapi.json", "/no-such-page", "/v2/models/nobody/ready", "/models/digits/7"]


def test_head_is_answered_like_get_without_a_body(server: Server) -> None:
    paths = get_paths(server)
    assert {"/", "/ping", "/metrics", "/stats", "/v2", "/v2/health/live", "/v2/health/ready"} <= set(paths)
    with server.client() as client:
        for path in paths:
            asked, head = client.get(path), client.head(path)
            assert head.status_code == asked.status_code, path
            assert head.headers["content-type"] == asked.headers["content-type"], path
            assert "content-length" in head.headers, path
            assert head.content == b"", path
        assert client.head(DIGITS).status_code == client.get(DIGITS).status_code == 405


def test_nothing_of_a_body_comes_behind_head(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        last = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        connection.sendall(b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2 + last)
        said = b""
        while data := connection.recv(1 << 16):
            said += data
    first, second, third, body = said.split(b"\r\n\r\n")
    for answer in (first, second, third):
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == server.get("/ping").content


@pytest.mark.parametrize("path", ["/predictions/digits/", "/v2/models/digits/versions//infer", "/predictions/nobody/"])
def test_an_empty_version_is_said_to_be_one(server: Server, path: str) -> None:
    check_refused(
        server.post(path, content=digit("five")), 404, "the version is empty; set its number, or remove the version"
    )


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/predictions/x%20200%200.1%20ms%20key%20admin", r'"/predictions/x 200 0.1 ms key admin"'),
        ("/predictions/x%22%20y", r'"/predictions/x\" y"'),
        ("/a=b", '"/a=b"'),
        ("/a%0a2026-01-01%20ERROR", r'"/a\n2026-01-01 ERROR"'),
        ("/a%5d%20[request%20own", '"/a] [request own"'),
        ("/v2/models/gr%C3%B6%C3%9Fe/infer", "/v2/models/größe/infer"),
    ],
)
def test_a_path_is_one_field_of_its_line(server: Server, path: str, shown: str) -> None:
    with server.client() as client:
        client.post(path, headers={"traceparent": "x key admin", "x-request-id": "a]b=c"}, content=b"x")
    line = rf"127.0.0.1 POST {shown} 404 "
    wait_until(lambda: line in server.log_so_far, f"the log has {line}")
    (told,) = [one for one in server.log.splitlines() if line in one]
    rest = r'[\d.]+ ms unknown_(model|route) trace "x key admin" \[request "a\]b=c"\]'
    assert re.fullmatch(rf"\S+ INFO    {re.escape(line)}{rest}", told), told


def test_metadata_of_grpc_is_one_field_of_its_line(server: Server) -> None:
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.get_server_metadata(headers={"traceparent": "y key admin", "x-request-id": "own"})
    line = "gRPC ServerMetadata OK"
    wait_until(lambda: line in server.log_so_far, "the call is in the log")
    (told,) = [one for one in server.log.splitlines() if line in one]
    assert 'trace "y key admin" [request own]' in told


@pytest.mark.parametrize("body_mb", [2047, 2048, 4096])
def test_a_limit_of_bodies_beyond_that_of_grpc_is_no_obstacle(body_mb: int) -> None:
    given = ("--max-body-mb", str(body_mb), "--max-inflight-mb", str(body_mb))
    with start_server(*given) as server:
        assert server.post(DIGITS, content=digit("five")).status_code == 200
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            images = triton_grpc.InferInput("images", [300, 32, 32, 3], "UINT8")
            images.set_data_from_numpy(np.zeros((300, 32, 32, 3), np.uint8))
            with pytest.raises(triton_grpc.InferenceServerException, match="batch"):
                client.infer("digits", [images])  # it was read
            assert client.is_server_ready()
