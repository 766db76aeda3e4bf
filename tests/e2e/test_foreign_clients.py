"""Clients that are not ours: what they send beside a request, and a machine that stops under them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.servers import Server, rows_request, start_fake_server, start_server, wait_until
from tests.support.stores import digit
from tests.support.wire import Wire, chunk, head

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

UPGRADE = {
    "Connection": "Upgrade, HTTP2-Settings",
    "Upgrade": "h2c",
    "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA",
}
DIGITS = "/predictions/digits"
BODY = json.dumps(rows_request(3.0)).encode()
ROWS = head("/v2/models/rows/infer", {"Content-Length": str(len(BODY))})
# What would be a request, if it were not a body.
SMUGGLED = b"GET /v2/health/live HTTP/1.1\r\nHost: smuggled\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server("--header-timeout-s", "600") as server:
        yield server


# Another protocol is offered


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_an_upgrade_is_ignored_and_the_request_answered(server: Server, version: str) -> None:
    body = digit("seven")
    with Wire(server.port) as wire:
        opening = head(DIGITS, {"Content-Length": str(len(body)), **UPGRADE}).replace(
            b"HTTP/1.1", b"HTTP/" + version.encode()
        )
        wire.send(opening + body)
        assert wire.reply().json()["predictions"][0]["label"] == "7"


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("comes_later", [False, True])
def test_no_byte_of_a_body_is_ever_a_request(server: Server, *, is_chunked: bool, comes_later: bool) -> None:
    framing = {"Transfer-Encoding": "chunked"} if is_chunked else {"Content-Length": str(len(SMUGGLED))}
    body = chunk(SMUGGLED) + chunk(b"") if is_chunked else SMUGGLED
    with Wire(server.port) as wire:
        opening = head(DIGITS, {**framing, **UPGRADE})
        if comes_later:
            wire.send(opening)
            time.sleep(0.1)
            opening = b""
        wire.send(opening + body)
        assert wire.reply().status == 400  # it is no image
        assert wire.ask("/ping", method="GET").status == 200, "the next answer is the next request's"


def test_requests_may_each_offer_it(server: Server) -> None:
    names = ("seven", "two", "five")
    requests = [head(DIGITS, {"Content-Length": str(len(digit(name))), **UPGRADE}) + digit(name) for name in names]
    with Wire(server.port) as wire:
        wire.send(b"".join(requests))
        assert [wire.reply().json()["predictions"][0]["label"] for _ in names] == ["7", "2", "5"]
        for _ in range(3):
            wire.send(requests[0])
            assert wire.reply().json()["predictions"][0]["label"] == "7"


def test_websockets_are_ignored_too(server: Server) -> None:
    asked = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "x" * 24,
        "Sec-WebSocket-Version": "13",
    }
    with Wire(server.port) as wire:
        assert wire.ask("/v2/health/live", headers=asked, method="GET").json() == {"live": True}


def test_a_tunnel_is_refused_and_what_follows_is_nobodys_request(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n" + SMUGGLED)
        reply = wire.reply()
        assert (reply.status, reply.headers["connection"]) == (405, "close")
        assert "proxy" in reply.error
        assert wire.is_closed()


# Headers that a library would not send


ODD_HEADERS = {
    "two hosts": b"Host: one\r\nHost: two\r\n",
    "an empty host": b"Host:\r\n",
    "no host": b"",
    "a host that is none": b"Host: a b/c?d\r\n",
    "bytes beyond ASCII": b"Host: test\r\nX-Odd: \xe9\xff\r\n",
    "a name with odd characters": b"Host: test\r\nX!#$%&'*+-.^_`|~: 1\r\n",
    "two lengths that agree": b"Host: test\r\nContent-Length: 0\r\nContent-Length: 0\r\n",
    "expectations": b"Host: test\r\nExpect: a-miracle\r\n",
    "te and trailer": b"Host: test\r\nTE: trailers\r\nTrailer: X-Sum\r\n",
}


@pytest.mark.parametrize(
    ("path", "status"), [("/v2/health/ready", 200), ("/nowhere", 404), ("/v2/models/d%69gits?x=%zz&=", 200)]
)
@pytest.mark.parametrize("odd", list(ODD_HEADERS))
def test_odd_headers_are_answered_at_once(server: Server, odd: str, path: str, status: int) -> None:
    with Wire(server.port, timeout_s=60.0) as wire:  # less than the time to send one's headers
        wire.send(b"GET " + path.encode() + b" HTTP/1.1\r\n" + ODD_HEADERS[odd] + b"\r\n")
        assert wire.reply().status == (400 if odd == "two lengths that agree" else status)


# A machine that stops


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


def test_connections_that_waited_through_a_stop_are_answered() -> None:
    """As of a virtual machine that is suspended: all timers are late, and every client has sent its next request."""
    with start_fake_server() as server, ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.port)) for _ in range(40)]
        for wire in wires:
            assert wire.ask("/v2/models/rows/infer", BODY).status == 200
        with stopped(server):
            for wire in wires:
                wire.send(ROWS + BODY)
            time.sleep(6.5)  # more than a connection may be idle
        assert [wire.reply().status for wire in wires] == [200] * len(wires)


@pytest.mark.parametrize(
    ("limit", "first", "rest"),
    [
        pytest.param("header_timeout_s", b"GET /v2/health/live HTT", b"P/1.1\r\nHost: test\r\n\r\n", id="headers"),
        pytest.param(
            "body_timeout_s",
            ROWS + BODY[:20],
            BODY[20:],
            id="body",
        ),
    ],
)
def test_what_came_during_a_stop_came_in_time(limit: str, first: bytes, rest: bytes) -> None:
    with start_fake_server(**{limit: 1}) as server, Wire(server.port) as wire:
        wire.send(first)
        time.sleep(0.2)  # it has been read
        with stopped(server):
            wire.send(rest)
            time.sleep(1.5)
        assert wire.reply().status == 200


def test_a_batch_that_ran_through_a_stop_does_not_hang() -> None:
    health = {"hang_after_s": 1.6, "hang_after_predictions": 0.1, "watch_every_s": 0.05}
    fake = {"latency_ms": 2400.0, "health": health, "tells_runs": True}
    with start_fake_server(fake=fake) as server, Wire(server.port) as wire:
        before = server.runs
        wire.send(ROWS + BODY)
        wait_until(lambda: server.runs > before, "it runs")
        with stopped(server):
            time.sleep(1.3)
        assert wire.reply().status == 200
        assert "has run for" not in server.log
