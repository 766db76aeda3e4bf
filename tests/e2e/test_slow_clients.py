"""Clients that are slow, many, or gone: none may hold what the others need."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from tests.support.servers import (
    FakeServer,
    Server,
    fresh_peak,
    peak_bytes,
    rows_request,
    start_fake_server,
    start_server,
    wait_until,
)
from tests.support.stores import StoreFolder, digit
from tests.support.wire import Wire, check_refused, chunk, head

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

DIGITS = "/predictions/digits"
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    """Patience of one second, so that the tests need none."""
    shared_store.add_digits()
    shared_store.add_identity("FP32", ("batch", "size"))
    limits = ("--header-timeout-s", "1", "--body-timeout-s", "1", "--write-timeout-s", "1", "--max-connections", "40")
    with start_server(*limits, store=shared_store.root, rests=True) as server:
        yield server
        assert server.post(DIGITS, content=digit("seven")).json()["predictions"][0]["label"] == "7"


@contextmanager
def trickling(wire: Wire, piece: bytes) -> Iterator[None]:
    """Meanwhile this piece is sent again and again, until it is not taken any more."""
    enough = threading.Event()

    def send() -> None:
        with suppress(OSError):
            while not enough.wait(0.1):
                wire.send(piece)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def test_headers_that_do_not_arrive_are_a_408(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(b"POST /predictions/digits HTTP/1.1\r\nHost: te")
        reply = wire.reply()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert "headers" in reply.error
        assert wire.is_closed()


def test_headers_that_trickle_are_a_408_all_the_same(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(b"GET / HTTP/1.1\r\n")
        with trickling(wire, b"X-A: b\r\n"):
            assert (wire.reply().status, wire.is_closed()) == (408, True)


def test_a_connection_that_says_nothing_is_closed(server: Server) -> None:
    with Wire(server.port) as wire:
        assert wire.reply().status == 408
        assert wire.is_closed()


def test_slow_headers_of_a_second_request_are_a_408_too(server: Server) -> None:
    with Wire(server.port) as wire:
        assert wire.ask("/ping", method="GET").status == 200
        wire.send(b"GET /ping HT")
        assert wire.reply().status == 408


def test_a_body_that_does_not_arrive_is_a_408_and_gives_its_memory_back(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(head(DIGITS, {"Content-Length": "1000"}) + b"x")
        wait_until(lambda: server.stats()["inflight_bytes"] == 1, "what has come is counted")
        check_refused(wire.reply(), 408, "1 s", code="request_timeout")
        wait_until(server.is_at_rest, "the room is given back")
        assert wire.is_closed(), "the rest of the body is not waited for without end"


def test_nor_is_a_control_routes_body_waited_for(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(head("/v2/repository/index", {"Content-Length": "1000"}) + b"{")
        check_refused(wire.reply(), 408, "1 s", code="request_timeout")
        assert wire.is_closed()


def test_a_chunked_body_that_stalls_has_no_more_patience_than_a_short_one(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(head(DIGITS, {"Transfer-Encoding": "chunked"}) + chunk(b"five!"))
        check_refused(wire.reply(), 408, "1 s", code="request_timeout")
    wait_until(server.is_at_rest, "the room is given back")


def test_a_body_that_comes_slowly_but_steadily_is_taken(server: Server) -> None:
    body, pause = digit("seven") + bytes(MIB), threading.Event()
    with Wire(server.port) as wire:
        wire.send(head(DIGITS, {"Content-Length": str(len(body))}))
        started_s = time.monotonic()
        for start in range(0, len(body), 128 << 10):
            wire.send(body[start : start + (128 << 10)])
            pause.wait(0.3)  # not slower than the slowest pace, but for longer than the time that all have
        assert wire.reply().status in (200, 400), "whatever the bytes behind the picture are"
        assert time.monotonic() - started_s > 2.0, "it has to take longer than the time-out to prove anything"


def test_after_an_early_answer_the_rest_of_the_body_is_not_read_for_ever(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(head("/predictions/nobody", {"Transfer-Encoding": "chunked"}))
        assert wire.reply().status == 404
        with trickling(wire, chunk(b"x")):
            assert wire.is_closed()


def test_who_still_sends_when_the_last_answer_comes_gets_it(server: Server) -> None:
    body = b"x" * (8 * MIB)
    with Wire(server.port) as wire:
        wire.send(head("/predictions/nobody", {"Content-Length": str(len(body)), "Connection": "close"}) + body)
        reply = wire.reply()
        assert (reply.status, reply.headers["connection"]) == (404, "close")
        assert wire.is_closed()


def test_who_still_sends_headers_that_are_too_long_is_told_so(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * MIB)
        assert wire.reply().status == 431
        assert wire.is_closed()


def test_after_the_last_answer_the_rest_of_the_body_is_not_read_for_ever(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(head("/predictions/nobody", {"Transfer-Encoding": "chunked", "Connection": "close"}))
        assert wire.reply().status == 404

        def is_reset() -> bool:
            try:
                wire.send(chunk(b"x"))
            except OSError:
                return True
            return False

        wait_until(is_reset, "the server does not take it any more")


def test_a_client_that_does_not_read_its_answer_is_cut_off(server: Server) -> None:
    with Wire(server.port, receive_buffer=4096) as wire:
        wire.send(big_request())
        wait_until(lambda: "did not read its answer" in server.log_so_far, "the server gives up")
        wait_until(server.is_at_rest, "the answer's memory is given back")


@pytest.mark.slow
def test_a_client_that_reads_slowly_but_steadily_is_served(server: Server) -> None:
    request, received, pause = big_request(), 0, threading.Event()
    with Wire(server.port, receive_buffer=64 << 10) as wire:
        wire.send(request)
        started_s = time.monotonic()
        while received < 16 * MIB:
            piece = wire.socket.recv(MIB // 2)
            assert piece, "the server cut off a client that was reading"
            received += len(piece)
            if time.monotonic() - started_s < 3.0:
                pause.wait(0.2)  # a slow reader is what this test is about
        assert time.monotonic() - started_s > 2.0, "it has to take longer than the time-out to prove anything"


def big_request() -> bytes:
    """16 MiB in, 16 MiB out."""
    data = bytes(16 * MIB)
    document = (
        b'{"parameters":{"binary_data_output":true},"inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],'
        b'"parameters":{"binary_data_size":%d}}]}' % (len(data) // 4, len(data))
    )
    lengths = {"Inference-Header-Content-Length": str(len(document)), "Content-Length": str(len(document + data))}
    return head("/v2/models/identity_fp32/infer", lengths) + document + data


def test_a_client_that_asks_on_and_on_and_reads_nothing_is_not_read_either(server: Server) -> None:
    request = head(DIGITS, {"Content-Length": str(len(digit("seven")))}) + digit("seven")
    idle_bytes, sent_bytes = fresh_peak(server), 0
    with Wire(server.port, receive_buffer=4096) as wire, suppress(OSError):
        while sent_bytes < 256 * MIB:
            sent_bytes += wire.socket.send(request * 100)
    assert sent_bytes < 32 * MIB, "what the kernel keeps"
    assert peak_bytes(server) < idle_bytes + 50 * MIB


@pytest.mark.slow
def test_a_thousand_announced_bodies_of_64_mb_take_no_memory_from_others() -> None:
    """Nor do they leave any behind: what the server has in use is the same after one thousand and after another."""
    inflight_mib, body_mib, left_bytes = 256, 64, []
    request = head(DIGITS, {"Content-Length": str(body_mib * MIB)})
    with start_server("--max-inflight-mb", str(inflight_mib), "--max-body-mb", str(body_mib)) as server:
        server.post(DIGITS, content=digit("seven"))
        idle_bytes = server.rss_bytes
        for _ in range(2):
            with ExitStack() as stack:
                wires = [stack.enter_context(Wire(server.port)) for _ in range(1000)]
                for wire in wires:
                    wire.send(request + b"x" * 1000)
                wait_until(lambda: server.stats()["open_calls"] == 1000, "all have been let in")
                assert server.stats()["inflight_bytes"] < 2 * MIB, "what is only announced counts for nothing"
                fresh_peak(server)
                for wire in wires * 20:  # a little on every connection, again and again
                    wire.send(b"x" * 8000)
                assert peak_bytes(server) < idle_bytes + (inflight_mib + 100) * MIB
                assert server.post(DIGITS, content=digit("seven")).status_code == 200
            wait_until(server.is_at_rest, "all room is given back")
            assert server.post(DIGITS, content=digit("seven")).json()["predictions"][0]["label"] == "7"
            left_bytes.append(server.trimmed_bytes())
    first, second = left_bytes
    assert first < idle_bytes + 50 * MIB
    assert second < first + 4 * MIB, "four KiB of each upload are lost"


@pytest.mark.slow
def test_uploads_that_stall_leave_room_for_ordinary_pictures_and_end_in_a_429() -> None:
    """More has arrived of them than fits: they must neither keep others out nor wait for each other for ever."""
    body_bytes, part_bytes = 5 * MIB, 3 * MIB // 2
    options = ("--max-inflight-mb", "16", "--max-body-mb", "8", "--body-timeout-s", "4")
    with start_server(*options) as server, ThreadPoolExecutor(16) as pool:
        wires = [Wire(server.port) for _ in range(16)]
        sending = [
            pool.submit(_send_or_break, wire, head(DIGITS, {"Content-Length": str(body_bytes)}) + bytes(part_bytes))
            for wire in wires
        ]
        wait_until(lambda: server.stats()["inflight_bytes"] > 7 * MIB, "the uploads' part of the room is full")
        for _ in range(20):
            assert server.post(DIGITS, content=digit("seven")).status_code == 200
            assert server.stats()["inflight_bytes"] <= 16 * MIB
        replies = [wire.reply() for wire in wires]
        assert {reply.status for reply in replies} <= {408, 429}
        refused = [reply for reply in replies if reply.status == 429]
        assert refused
        for reply in refused:
            assert reply.headers["retry-after"] == "1"
            assert "--max-inflight-mb" in reply.error
        for wire in wires:
            wire.close()
        for one in sending:
            one.result()
        wait_until(server.is_at_rest, "all room is given back")


@pytest.mark.slow
def test_uploads_that_go_on_are_all_answered_in_the_end() -> None:
    """Together they are larger than the slab; each waits for its turn, and those before it leave."""
    options = ("--max-inflight-mb", "64", "--max-body-mb", "32", "--body-timeout-s", "60")
    with start_server(*options) as server, ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: server.post(DIGITS, content=bytes(20 * MIB)).status_code, range(24)))
        assert statuses == [400] * 24, "zeros are no image, and nobody was turned away"


@pytest.mark.slow
def test_answers_that_nobody_reads_are_counted_and_bounded() -> None:
    values = MIB // 4
    with start_fake_server(fake={"echo": True}, max_inflight_mb=64, body_timeout_s=3) as server:
        data = np.ones((1, 2 * values), np.float32).tobytes()
        given = {"name": "x", "shape": [1, 2 * values], "datatype": "FP32"}
        given["parameters"] = {"binary_data_size": len(data)}
        wanted = {"name": "y", "parameters": {"binary_data": True}}
        text = json.dumps({"inputs": [given], "outputs": [wanted]}).encode()
        lengths = {"Inference-Header-Content-Length": str(len(text)), "Content-Length": str(len(text) + len(data))}
        request = head("/v2/models/echo_fp32/infer", lengths) + text + data
        idle_bytes = server.rss_bytes
        wires = [Wire(server.port, receive_buffer=4096) for _ in range(120)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda wire: _send_or_break(wire, request), wires))
            wait_until(lambda: server.stats()["inflight_bytes"] > 8 * MIB, "unread answers are counted")
            assert server.rss_bytes < idle_bytes + 250 * MIB
            assert server.infer(3.0).status_code == 200
        for wire in wires:
            wire.close()
        wait_until(server.is_at_rest, "all room is given back")


def _send_or_break(wire: Wire, data: bytes) -> None:
    with suppress(OSError):  # the server may close before it has read all
        wire.send(data)


@pytest.mark.slow
def test_large_bodies_that_do_arrive_stay_within_the_memory() -> None:
    with start_server("--max-inflight-mb", "128", "--max-body-mb", "32") as server:
        server.post(DIGITS, content=digit("seven"))
        idle_bytes = fresh_peak(server)
        boundary = b"--frontier\r\nContent-Disposition: form-data; name=f; filename=f\r\n\r\n"
        form = boundary + bytes(31 * MIB) + b"\r\n--frontier--\r\n"
        with ThreadPoolExecutor(12) as pool:
            kinds = [{"Content-Type": "multipart/form-data; boundary=frontier"}, {"Content-Type": "image/png"}]
            answers = list(pool.map(lambda n: server.post(DIGITS, content=form, headers=kinds[n % 2]), range(36)))
        assert {400} <= {answer.status_code for answer in answers} <= {400, 429}
        assert peak_bytes(server) < idle_bytes + (128 + 100) * MIB
        wait_until(server.is_at_rest, "all room is given back")


@pytest.mark.slow
def test_a_thousand_clients_killed_at_random_leave_nothing_behind() -> None:
    with start_fake_server(fake={"latency_ms": 2.0, "per_sample_ms": 0.2}, max_queue=256) as server:
        chance = random.Random(20)
        with ThreadPoolExecutor(8) as pool:
            seeds = [chance.getrandbits(32) for _ in range(1000)]
            list(pool.map(lambda seed: _die_somewhere(server, seed), seeds))
        wait_until(server.is_at_rest, "the queue is empty and every slot is free")
        for value in range(20):
            assert server.infer(float(value)).json()["outputs"][0]["data"] == [float(value)] * 4
        assert server.post("/predictions/images", content=digit("seven")).status_code == 200
        assert server.is_ready()
        wait_until(server.is_at_rest, "the queue is empty and every slot is free")


def _die_somewhere(server: FakeServer, seed: int) -> None:
    """One client: it may die in its headers, in its body, while it waits or runs, or while it reads."""
    chance = random.Random(seed)
    image = chance.random() < 0.5
    body = digit("seven") if image else json.dumps(rows_request(chance.random())).encode()
    path = "/predictions/images" if image else "/v2/models/rows/infer"
    request = head(path, {"Content-Length": str(len(body))}) + body
    if chance.random() < 0.2:
        request = head(path, {"Transfer-Encoding": "chunked"}) + chunk(body) + chunk(b"")
    if chance.random() < 0.2:
        request += request  # pipelined
    with Wire(server.port) as wire:
        if chance.random() < 0.5:
            wire.send(request[: chance.randrange(len(request))])
        else:
            wire.send(request)
            # Long enough that some die in the queue, some in the batch, some with their answer before them.
            threading.Event().wait(chance.random() * 0.02)
        if chance.random() < 0.5:
            wire.reset()
