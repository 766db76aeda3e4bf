"""How the oracle takes answers from a connection, against a server that says what it is told to."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.oracle.normal import Answer, Part
from tests.oracle.session import Session

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
HEAD = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"


@contextmanager
def scripted(*connections: list[bytes], closed: threading.Event | None = None) -> Iterator[Session]:
    """A server that says one of these after each thing that it reads, and then closes; connection by connection.

    `closed` is set when the client's side has been told that a connection is closed.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for script in connections:
            accepted, _ = listener.accept()
            # So that to close it waits until the other side has acknowledged that.
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 10))
            with accepted:
                for words in script:
                    accepted.recv(65536)
                    accepted.sendall(words)
            if closed is not None:
                closed.set()

    # A client that does not come leaves it waiting; that must not outlive the tests.
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    session = Session(None, SimpleNamespace(port=listener.getsockname()[1], grpc_address="127.0.0.1:9"))  # type: ignore[arg-type]
    try:
        yield session
    finally:
        session.close()
        thread.join(60)
        listener.close()


def asked(session: Session) -> Answer:
    """The answer to one request on the connection that is kept."""
    session.answers.clear()
    session.raw("x", b"GET / HTTP/1.1\r\n\r\n")
    return session.answers["x"]


def test_a_kept_connection_is_used_again_and_left_when_it_closes() -> None:
    closed = threading.Event()
    with scripted([OK, OK], [OK], closed=closed) as session:
        assert [asked(session) for _ in range(2)] == [(Part(HEAD, b"{}"),)] * 2
        assert closed.wait(60)
        assert asked(session) == (Part(HEAD, b"{}"),)


def test_a_connection_that_is_announced_to_close_is_not_used_again() -> None:
    with scripted([OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b"never"], [OK]) as session:
        assert asked(session)[0].body == asked(session)[0].body == b"{}"


def test_a_server_that_closes_is_an_answer() -> None:
    with scripted([b""]) as session:
        assert asked(session)[0].head.startswith("connection closed")


def test_half_an_answer_is_cut_off() -> None:
    with scripted([OK[:-1]]) as session:
        (part,) = asked(session)
    assert "after 1 of 2 bytes" in part.head


def test_several_answers_interim_ones_and_chunks() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"
    with scripted([b"HTTP/1.1 100 Continue\r\n\r\n" + OK + chunked]) as session:
        session.fresh("x", b"POST / HTTP/1.1\r\n\r\n", replies=2)
    assert [part.body for part in session.answers["x"][:3]] == [b"", b"{}", b"abcd"]
    assert session.answers["x"][3].head == "connection closed"


def test_more_than_was_asked_for_does_not_pass() -> None:
    with scripted([OK + OK]) as session:
        session.fresh("x", b"GET / HTTP/1.1\r\n\r\n")
    assert session.answers["x"] == (Part(HEAD, b"{}"), Part("connection unexpected"))


@pytest.mark.parametrize(
    ("said", "parts"), [(OK, (Part(HEAD, b"{}"),)), (b"no answer", (Part("no whole answer", b"no answer"),)), (b"", ())]
)
def test_what_is_broken_is_answered_by_whatever_comes(said: bytes, parts: Answer) -> None:
    with scripted([said]) as session:
        session.broken("x", b"GET")
    assert session.answers["x"] == (*parts, Part("after the client has finished: 0 bytes"))


def test_a_head_has_no_body() -> None:
    with scripted([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"]) as session:
        session.raw("x", b"HEAD / HTTP/1.1\r\n\r\n")
    assert session.answers["x"] == (Part(HEAD),)
