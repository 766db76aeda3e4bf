"""What probes and careless clients ask: HEAD, an empty version, names that look like the log's own fields."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from tests.support.pictures import digit
from tests.support.servers import Server, start_server, wait_until
from tests.support.wire import check_refused

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server("--access-log", "all", "--max-inflight-mb", "512") as one:
        yield one


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
        assert client.head("/predictions/digits").status_code == client.get("/predictions/digits").status_code == 405


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
        server.post(path, content=digit("five")), 404, "the version is empty; give its number, or leave the version out"
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
    assert re.fullmatch(rf'\S+ INFO    {re.escape(line)}[\d.]+ ms trace "x key admin" \[request "a\]b=c"\]', told), told


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
        assert server.post("/predictions/digits", content=digit("five")).status_code == 200
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            images = triton_grpc.InferInput("images", [300, 32, 32, 3], "UINT8")
            images.set_data_from_numpy(np.zeros((300, 32, 32, 3), np.uint8))
            with pytest.raises(triton_grpc.InferenceServerException, match="batch"):
                client.infer("digits", [images])  # it was read
            assert client.is_server_ready()
