"""The generator: its loops under a clock that only the test moves, its connections, and what is an answer."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.answers import FULL_EVERY, FULL_FIRST, AnswerCheck, error_text
from convoy.loadtest.generator import loops
from convoy.loadtest.generator.http_sender import CLOSED, CUT_OFF, IDLE, NOT_HTTP, RESET, ClientConnection
from convoy.loadtest.generator.loops import ClosedLoop, LoopAlarm, OpenLoop, TimerFdAlarm, make_alarm
from convoy.loadtest.problems import MAX_TEXT_CHARS, Fault, Problem


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1000
        self.due_ns: int | None = None

    def monotonic_ns(self) -> int:
        return self.now_ns


class FakeAlarm:
    name = "fake"

    def __init__(self, clock: Clock, callback) -> None:
        self._clock = clock
        self.ring = callback

    def set(self, due_ns: int) -> None:
        self._clock.due_ns = due_ns

    def close(self) -> None:
        self._clock.due_ns = None


class FakeSender:
    def __init__(self) -> None:
        self.fired: list[tuple[int, int]] = []
        self.on_done = lambda arrived: None

    def fire(self, intended_ns: int, now_ns: int) -> None:
        self.fired.append((intended_ns, now_ns))


def make(monkeypatch):
    clock, sender, alarms = Clock(), FakeSender(), []

    def alarm(loop, callback):
        alarms.append(FakeAlarm(clock, callback))
        return alarms[-1]

    monkeypatch.setattr(loops, "make_alarm", alarm)
    monkeypatch.setattr(loops, "time", clock)
    monkeypatch.setattr(loops.asyncio, "get_running_loop", Mock())
    return clock, sender, alarms


gaps_ns = st.lists(st.integers(0, 50), max_size=200)
wakes_ns = st.lists(st.integers(0, 30), min_size=1, max_size=500)


@given(gaps_ns, wakes_ns)
def test_the_open_loop_sends_each_request_once_never_early_whatever_the_answers(gaps_ns, wakes_ns):
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock, sender, alarms = make(monkeypatch)
        offsets_ns = np.cumsum(gaps_ns, dtype=np.int64)
        loop = OpenLoop(sender, offsets_ns.tolist())
        loop.start(2000)
        for late_ns in wakes_ns:
            if loop.done:
                break
            assert clock.due_ns is not None
            clock.now_ns = max(clock.now_ns, clock.due_ns) + late_ns
            alarms[0].ring()
        unsent_ns = loop.stop()
        intended_ns = [due for due, _ in sender.fired]
        assert intended_ns + unsent_ns == (2000 + offsets_ns).tolist()
        assert all(now_ns >= due_ns for due_ns, now_ns in sender.fired)
        assert loop.done


def test_many_due_at_once_are_sent_in_bursts_so_that_answers_are_read_between(monkeypatch):
    clock, sender, alarms = make(monkeypatch)
    loop = OpenLoop(sender, [0] * (loops.BURST + 1))
    loop.start(clock.now_ns)
    alarms[0].ring()
    assert len(sender.fired) == loops.BURST
    assert clock.due_ns == clock.now_ns
    alarms[0].ring()
    assert len(sender.fired) == loops.BURST + 1


def test_the_closed_loop_keeps_its_clients_busy_until_the_end(monkeypatch):
    clock, sender, _ = make(monkeypatch)
    loop = ClosedLoop(sender, clients=3, duration_s=1e-6, most=100)
    loop.start(clock.now_ns)
    assert len(sender.fired) == 3
    sender.on_done(True)
    assert len(sender.fired) == 4
    clock.now_ns += 1000
    sender.on_done(True)
    assert len(sender.fired) == 4
    assert loop.done


linux = pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")


@pytest.mark.parametrize("kind", [pytest.param(TimerFdAlarm, marks=linux), LoopAlarm, make_alarm])
def test_an_alarm_rings_once_per_setting_and_closes_twice(kind):
    async def main() -> list[int]:
        rung = asyncio.Event()
        rings = []
        alarm = kind(asyncio.get_running_loop(), lambda: (rings.append(1), rung.set()))
        for _ in range(2):
            alarm.set(1)  # long past
            await rung.wait()
            rung.clear()
        alarm.close()
        alarm.close()
        return rings

    assert asyncio.run(main()) == [1, 1]


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
def connection(owner) -> ClientConnection:
    connection = ClientConnection(owner)
    connection.connection_made(Transport())
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
def test_what_is_not_http_is_garbage(owner, garbage):
    connection, transport = ClientConnection(owner), Transport()
    connection.connection_made(transport)
    connection.send(b"", 4, 0)
    connection.data_received(garbage)
    connection.connection_lost(None)
    assert owner.breaks == [(4, NOT_HTTP)]
    assert transport.ended == "aborted"


def test_an_answer_that_comes_after_its_time_out_changes_nothing(connection, owner):
    late = Problem(Fault.TIMEOUT, "late")
    connection.send(b"", 4, 0)
    connection.give_up(late)
    connection.data_received(ANSWER)
    assert (owner.breaks, owner.answers) == ([(4, late)], [])


def test_an_answer_to_nothing_ends_the_connection(connection, owner):
    connection.data_received(ANSWER)
    assert owner.breaks == [(IDLE, NOT_HTTP)]
    assert not connection.usable


def test_an_answer_without_end_is_cut_off(connection, owner, monkeypatch):
    monkeypatch.setattr("convoy.loadtest.generator.http_sender.MAX_ANSWER_BYTES", 4)
    connection.send(b"", 4, 0)
    connection.data_received(ANSWER)
    assert [(ticket, problem.fault) for ticket, problem in owner.breaks] == [(4, Fault.GARBAGE)]
    assert owner.answers == []


PREDICTION = json.dumps({"model": "m", "predictions": [{"class_id": 7, "label": None, "score": 0.5}]}).encode()
UNREAD = FULL_FIRST + 1  # a ticket that is not among those read in full


def outputs(*rows: dict[str, object]) -> bytes:
    return json.dumps({"model_name": "m", "outputs": list(rows)}).encode()


JSON_OUTPUT = {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}
BINARY_OUTPUT = {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
TWO_FLOATS = struct.pack("<2f", 1, 2)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("predictions", PREDICTION),
        ("predictions", b'{"model": "m", "detections": []}'),
        (
            "predictions",
            b'{"model": "m", "detections": [{"class_id": 1, "score": 0.5, "box": {}}]}',
        ),
        ("predictions", b'{"model": "m", "segmentation": {"classes": [{"class_id": 1, "share": 1.0, "rle": {}}]}}'),
        ("infer", outputs(JSON_OUTPUT)),
        ("infer", outputs({**JSON_OUTPUT, "data": [[1.0, 2.0]]})),
        ("infer", outputs(JSON_OUTPUT) + b"\n"),
        ("infer", outputs({**JSON_OUTPUT, "data": [float("nan"), float("inf")]})),
        ("infer", outputs(BINARY_OUTPUT) + TWO_FLOATS),
        ("infer", outputs(BINARY_OUTPUT) + b"        "),  # a tensor may look like white space
        ("infer", outputs(BINARY_OUTPUT, JSON_OUTPUT) + TWO_FLOATS),
        ("infer", outputs({**JSON_OUTPUT, "shape": [0], "data": []})),
    ],
)
def test_good_answers_are_good(route, body):
    assert AnswerCheck(route)(0, 200, body) is None


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("predictions", b""),
        ("predictions", b"<html>ok</html>"),
        ("predictions", b'{"predictions": [{"class_id": 1, "score": 0.5}]}'),
        ("predictions", b'{"model": "m", "predictions": []}'),
        ("predictions", b'{"model": "m", "predictions": [{"class_id": 1}]}'),
        ("predictions", b'{"model": "m", "predictions": 7}'),
        ("predictions", b'{"model": "m", "detections": [{"class_id": 1, "score": 0.5}]}'),
        ("predictions", b'{"model": "m", "segmentation": {"classes": [{"class_id": 1}]}}'),
        ("predictions", b'["model"]'),
        ("predictions", PREDICTION[:-3]),
        ("infer", b'{"outputs": []}'),
        ("infer", outputs({**JSON_OUTPUT, "data": [1.0]})),
        ("infer", outputs(BINARY_OUTPUT)),
        ("infer", outputs(BINARY_OUTPUT) + TWO_FLOATS + b"x"),
        ("infer", b'{"outputs": ' + b"[" * 5000),
        ("infer", outputs({"name": "y"})),
    ],
)
def test_a_200_that_is_no_answer_is_garbage(route, body):
    problem = AnswerCheck(route)(0, 200, body)
    assert problem.fault is Fault.GARBAGE


def test_every_answer_is_searched_and_a_sample_read_in_full():
    check = AnswerCheck("predictions")
    half = b'{"model": "m", "predictions": [{"class'
    assert check(UNREAD, 200, b"nonsense") is not None
    assert check(UNREAD, 200, half) is None
    assert check(FULL_EVERY * 100, 200, half) is not None


def test_an_error_carries_status_and_the_servers_own_words():
    problem = AnswerCheck("infer")(UNREAD, 429, b'{"error": "the queue is full"}')
    assert (problem.fault, problem.status, problem.text) == (Fault.HTTP, 429, "the queue is full")


def test_what_a_server_says_cannot_steer_the_terminal():
    text = error_text(b'{"error": "one\\ntwo \\u001b[31m three ' + b"x" * 1000 + b'"}')
    assert "\x1b" not in text
    assert "\n" not in text
    assert len(text) <= MAX_TEXT_CHARS


@given(st.binary(max_size=200), st.integers(100, 599), st.integers(0, 200))
def test_no_bytes_break_the_check(body, status, ticket):
    for route in ("predictions", "infer"):
        problem = AnswerCheck(route)(ticket, status, body)
        assert problem.text.isprintable()
