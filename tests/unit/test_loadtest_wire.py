from __future__ import annotations

import asyncio

import pytest

from convoy.loadtest.generator.http_sender import CLOSED, CUT_OFF, IDLE, NOT_HTTP, RESET, ClientConnection
from convoy.loadtest.problems import Fault, Problem

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Transport(asyncio.Transport):
    """A socket that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = ""

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


class Owner:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, int, bytes, bool]] = []
        self.breaks: list[tuple[int, Problem]] = []

    def opened(self, connection: ClientConnection) -> None:
        pass

    def answered(self, connection: ClientConnection, ticket: int, status: int, body: bytes, reusable: bool) -> None:
        self.answers.append((ticket, status, body, reusable))

    def broke(self, connection: ClientConnection, ticket: int, problem: Problem) -> None:
        self.breaks.append((ticket, problem))


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def connection(owner, transport) -> ClientConnection:
    connection = ClientConnection(owner)
    connection.connection_made(transport)
    return connection


@pytest.mark.parametrize("size", [1, 7])
def test_answers_in_pieces_one_after_the_other(connection, owner, size):
    for ticket in (1, 2):
        connection.send(b"", ticket, 0)
        for start in range(0, len(ANSWER), size):
            connection.data_received(ANSWER[start : start + size])
    assert owner.answers == [(1, 200, b"hello", True), (2, 200, b"hello", True)]


@pytest.mark.parametrize(
    ("received", "error", "problem"),
    [
        (b"", None, CLOSED),
        (b"", ConnectionResetError(), RESET),
        (ANSWER[:-1], None, CUT_OFF),
        (ANSWER[:20], ConnectionResetError(), RESET),
        (b"HTTP/1.1 200 OK\r\n\r\nno length at all", None, CUT_OFF),
    ],
)
def test_a_connection_lost_before_the_answer_is_a_failure_once(connection, owner, received, error, problem):
    connection.send(b"", 4, 0)
    connection.data_received(received)
    connection.connection_lost(error)
    connection.connection_lost(error)
    assert owner.breaks == [(4, problem)]
    assert owner.answers == []


@pytest.mark.parametrize("garbage", [b"220 smtp ready\r\n\r\n", b"\x16\x03\x01", b"HTTP/9.9 abc\r\n\r\n"])
def test_what_is_not_http_is_garbage(connection, owner, transport, garbage):
    connection.send(b"", 4, 0)
    connection.data_received(garbage)
    connection.connection_lost(None)
    assert owner.breaks == [(4, NOT_HTTP)]
    assert transport.ended == "aborted"


def test_an_answer_to_nothing_ends_the_connection(connection, owner):
    connection.data_received(ANSWER)
    assert owner.breaks == [(IDLE, NOT_HTTP)]
    assert not connection.usable


def test_an_answer_that_comes_after_its_time_out_changes_nothing(connection, owner):
    late = Problem(Fault.TIMEOUT, "late")
    connection.send(b"", 4, 0)
    connection.give_up(late)
    connection.data_received(ANSWER)
    assert owner.breaks == [(4, late)]
    assert owner.answers == []


def test_an_answer_without_end_is_cut_off(connection, owner, monkeypatch):
    monkeypatch.setattr("convoy.loadtest.generator.http_sender.MAX_ANSWER_BYTES", 4)
    connection.send(b"", 4, 0)
    connection.data_received(ANSWER)
    assert [(ticket, problem.fault) for ticket, problem in owner.breaks] == [(4, Fault.GARBAGE)]
    assert owner.answers == []
