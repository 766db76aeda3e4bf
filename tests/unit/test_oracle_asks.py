"""The oracle itself: how it takes answers from a connection, what it leaves out, finds and accepts."""

from __future__ import annotations

import gzip
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.oracle.judge import INTENDED, Intended, intended_since, judge, read_intended
from tests.oracle.normal import Answer, Answers, Part
from tests.oracle.session import Session
from tests.support.stores import ROOT

HEAD = "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nx-request-id: {id}\r\n"
PREDICT = "images/POST /predictions/digits seven"


def answers(name: str, *parts: Part) -> Answers:
    return {name: parts}


def predicted(own_id: str, total: str, score: str = "0.99") -> Answers:
    body = f'{{"predictions":[{{"class_id":7,"score":{score}}}],"timing_ms":{{"decode":0.1,"total":{total}}}}}'.encode()
    return answers(PREDICT, Part(HEAD.format(length=len(body), id=own_id), body))


def verdict(before: Answers, after: Answers, *intended: Intended):
    return judge([before], [after], intended)


def test_ids_and_times_do_not_count_unless_an_id_is_the_clients_own() -> None:
    assert verdict(predicted("3eeb31c8-7", "5.51"), predicted("00000000-12345", "12.375")).equal == 1
    assert verdict(predicted("mine", "5.51"), predicted("yours", "5.51")).differences


@pytest.mark.parametrize("after", [predicted("3eeb31c8-7", "5.51", "0.98"), answers("images/other", Part("x")), {}])
def test_anything_else_is_a_difference_and_shown(after: Answers) -> None:
    found = verdict(predicted("3eeb31c8-7", "5.51"), after)
    assert not found.is_good
    assert '-   "score": 0.99' in found.differences[PREDICT]


def test_a_header_more_is_a_difference_and_so_are_bytes_that_show_alike() -> None:
    before, after, spaced = (
        Part("a: b\r\n", b'{"a":1}'),
        Part("a: b\r\nc: d\r\n", b'{"a":1}'),
        Part("a: b\r\n", b'{"a": 1}'),
    )
    assert "+c: d" in verdict(answers("x/y", before), answers("x/y", after)).differences["x/y"]
    assert not verdict(answers("x/y", before), answers("x/y", spaced)).is_good


def test_compressed_times_are_times() -> None:
    def squeezed(total: str) -> Answers:
        body = gzip.compress(f'{{"timing_ms":{{"total":{total}}}}}'.encode())
        head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(body)}\r\n"
        return answers(PREDICT, Part(head, body))

    assert verdict(squeezed("1.25"), squeezed("123456.75")).equal == 1


def test_what_one_build_answers_in_two_ways_is_unsteady_and_no_difference() -> None:
    one, other = predicted("mine", "1", "0.5"), predicted("mine", "1", "0.6")
    found = judge([one, other], [other, other], [])
    assert (found.unsteady, found.differences) == ([PREDICT], {})
    assert judge([one, one], [other, other], []).differences


def test_an_intended_difference_settles_just_its_lines() -> None:
    before, after = predicted("mine", "1", "0.5"), predicted("mine", "1", "0.6")
    exact = Intended("images/*", (r'\s+"score": 0\.5',), (r'\s+"score": 0\.6',), "better")
    found = verdict(before, after, exact)
    assert (found.intended, found.is_good) == ([PREDICT], True)
    (part,) = after[PREDICT]
    more = answers(PREDICT, Part(part.head + "new: header\r\n", part.body))
    assert not verdict(before, more, Intended("images/*", exact.before, exact.after, "better")).is_good


def test_an_intended_difference_that_is_none_any_more_is_an_error() -> None:
    same = predicted("mine", "1")
    found = verdict(same, same, Intended("images/*", ("gone",), (), "once"))
    assert found.equal == 1
    assert not found.is_good


def test_an_entry_needs_a_reason_and_a_line(tmp_path: Path) -> None:
    path = tmp_path / "intended.toml"
    for text in ('asks = "*"\nbefore = ["a"]', 'asks = "*"\nreason = "b"'):
        path.write_text(f"[[difference]]\n{text}\n")
        with pytest.raises(ValueError, match="needs a reason"):
            read_intended(path)
    path.write_text('[[difference]]\nasks = "*"\nafter = ["a"]\nreason = "b"\n')
    assert read_intended(path)[0].after == ("a",)
    read_intended(ROOT / INTENDED)  # the one that is in force can be read


def test_what_the_build_before_has_made_already_is_not_intended_again(tmp_path: Path) -> None:
    builds = tmp_path / "before", tmp_path / "after"
    for build, asks in zip(builds, (["a"], ["a", "b"]), strict=True):
        path = build / INTENDED
        path.parent.mkdir(parents=True)
        path.write_text("".join(f'[[difference]]\nasks = "{one}"\nwhole = true\nreason = "c"\n' for one in asks))
    assert [one.asks for one in intended_since(*builds)] == ["b"]
    assert intended_since(ROOT, ROOT) == []
    assert len(intended_since(tmp_path / "older than the list", builds[1])) == 2


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
OK_HEAD = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"


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
        assert [asked(session) for _ in range(2)] == [(Part(OK_HEAD, b"{}"),)] * 2
        assert closed.wait(60)
        assert asked(session) == (Part(OK_HEAD, b"{}"),)


def test_a_connection_that_is_announced_to_close_is_not_used_again() -> None:
    with scripted([OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), b"never"], [OK]) as session:
        assert asked(session)[0].body == asked(session)[0].body == b"{}"


@pytest.mark.parametrize(("said", "words"), [(b"", "connection closed"), (OK[:-1], "after 1 of 2 bytes")])
def test_a_server_that_closes_is_an_answer(said: bytes, words: str) -> None:
    with scripted([said]) as session:
        (part,) = asked(session)
    assert words in part.head


def test_several_answers_interim_ones_and_chunks() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"
    with scripted([b"HTTP/1.1 100 Continue\r\n\r\n" + OK + chunked]) as session:
        session.fresh("x", b"POST / HTTP/1.1\r\n\r\n", replies=2)
    assert [part.body for part in session.answers["x"][:3]] == [b"", b"{}", b"abcd"]
    assert session.answers["x"][3].head == "connection closed"


def test_more_than_was_asked_for_does_not_pass() -> None:
    with scripted([OK + OK]) as session:
        session.fresh("x", b"GET / HTTP/1.1\r\n\r\n")
    assert session.answers["x"] == (Part(OK_HEAD, b"{}"), Part("connection unexpected"))


@pytest.mark.parametrize(
    ("said", "parts"),
    [(OK, (Part(OK_HEAD, b"{}"),)), (b"no answer", (Part("no whole answer", b"no answer"),)), (b"", ())],
)
def test_what_is_broken_is_answered_by_whatever_comes(said: bytes, parts: Answer) -> None:
    with scripted([said]) as session:
        session.broken("x", b"GET")
    assert session.answers["x"] == (*parts, Part("after the client has finished: 0 bytes"))


def test_a_head_has_no_body() -> None:
    with scripted([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"]) as session:
        session.raw("x", b"HEAD / HTTP/1.1\r\n\r\n")
    assert session.answers["x"] == (Part(OK_HEAD),)
