"""How often a server is asked, and for how long: in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.client.retry import Tries, WireQuestion, ask
from convoy.models.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestError, Unavailable


@dataclass
class Server:
    """Each reply comes so many seconds after it was asked for; an error in its place is one."""

    replies: Iterator[tuple[float, str | RequestError]]
    now_s: float = 0.0
    asked_s: list[float] = field(default_factory=list)
    left_s: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def send(self, message: float, within_s: float) -> str | RequestError:
        self.asked_s.append(self.now_s)
        self.left_s.append(message)
        took_s, reply = next(self.replies)
        if took_s > within_s:
            self.now_s += within_s
            raise DeadlineExceeded("did not answer")
        self.now_s += took_s
        return reply

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def read(reply: str | RequestError) -> str:
    if isinstance(reply, RequestError):
        raise reply
    return reply


def asked(server: Server, timeout_s: float, retries: int, drawn: float = 0.0) -> str:
    tries = Tries(timeout_s, retries, server.clock, lambda: drawn)
    return ask(WireQuestion(lambda left_s: left_s, read), tries, server.send, server.sleep)


def busy(retry_after_s: float) -> Overloaded:
    return Overloaded("busy", reason="", retry_after_s=retry_after_s)


def test_it_comes_back_when_the_server_said_so() -> None:
    server = Server(iter([(0.5, busy(2.0)), (0.5, Unavailable("loading", retry_after_s=3.0)), (0.5, "seven")]))
    assert asked(server, 60.0, 2) == "seven"
    assert server.asked_s == [0.0, 2.5, 6.0]
    assert server.left_s == [60.0, 57.5, 54.0]  # what the server is told is what is left


@pytest.mark.parametrize("reply", [busy(30.0), InvalidRequest("no image")])
def test_what_is_wrong_or_is_to_come_back_too_late_is_asked_once(reply: RequestError) -> None:
    server = Server(iter([(0.1, reply)]))
    with pytest.raises(type(reply)):
        asked(server, 10.0, 5)
    assert server.now_s == 0.1


def test_waits_grow_where_the_server_names_none() -> None:
    server = Server(iter([(0.0, busy(0.0))] * 9))
    with pytest.raises(Overloaded):
        asked(server, 60.0, 8)
    waits = [round(later - earlier, 6) for earlier, later in zip(server.asked_s, server.asked_s[1:], strict=False)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@given(
    replies=st.lists(
        st.tuples(st.floats(0, 5), st.one_of(st.just("seven"), st.floats(0, 9).map(busy))), min_size=1, max_size=9
    ),
    timeout_s=st.floats(0.01, 20),
    retries=st.integers(0, 6),
    drawn=st.floats(0, 1),
)
def test_it_keeps_within_its_time_its_tries_and_what_the_server_asks(
    replies: list[tuple[float, str | Overloaded]], timeout_s: float, retries: int, drawn: float
) -> None:
    replies = [*replies, *[(0.0, "seven")] * 9]
    server = Server(iter(replies))
    try:
        answer = asked(server, timeout_s, retries, drawn)
    except (Overloaded, DeadlineExceeded):
        answer = ""
    tries = len(server.asked_s)
    assert 1 <= tries <= retries + 1
    assert server.now_s <= timeout_s + 1e-6
    for earlier, later, (took_s, refusal) in zip(server.asked_s, server.asked_s[1:], replies, strict=False):
        assert later - earlier >= took_s + refusal.retry_after_s - 1e-9
    assert answer == (replies[tries - 1][1] if answer else "")
