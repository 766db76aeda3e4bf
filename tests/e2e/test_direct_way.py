"""Calls to the routes that infer, alone and one after the other on a connection: each is answered by itself."""

from __future__ import annotations

import gzip
import json
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.fake_server import DIE, POISON
from tests.support.servers import FakeServer, Server, metric, start_fake_server, start_server, wait_until
from tests.support.stores import StoreFolder, digit
from tests.support.wire import Wire, WireReply, chunk, head

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

MIB = 1 << 20
DIGITS = "/predictions/digits"
SIMPLE = "/v2/models/simple/infer"
ROWS = "/v2/models/rows/infer"
BROAD = 16 << 10  # values of a sample of `broad`
LENGTH = "Inference-Header-Content-Length"
STAGES = ("decode_wait", "decode", "queue", "encode")
CHANGING = {"server-timing", "x-request-id"}


class Asked(NamedTuple):
    """A request's body, in its two parts, and its path."""

    header: bytes
    data: bytes
    path: str = SIMPLE

    def headers(self, **more: str) -> dict[str, str]:
        length = str(len(self.header) + len(self.data))
        return {LENGTH: str(len(self.header)), "Content-Length": length} | {
            name.replace("_", "-"): value for name, value in more.items()
        }

    def whole(self, **more: str) -> bytes:
        return head(self.path, self.headers(**more)) + self.header + self.data


def binary(inputs: dict[str, np.ndarray], outputs: list[str], path: str, **more: Any) -> Asked:
    """A request that brings its tensors as bytes and wants its answer so."""
    dtypes = {"int32": "INT32", "float32": "FP32"}
    tensors = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": dtypes[array.dtype.name],
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in inputs.items()
    ]
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    document = {"inputs": tensors, "outputs": wanted, **more}
    return Asked(json.dumps(document).encode(), b"".join(array.tobytes() for array in inputs.values()), path)


def numbers(seed: int, samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
    left, right = np.random.default_rng(seed).integers(-1000, 1000, (2, samples, 16), np.int32)
    return left, right


def simple(seed: int = 0, samples: int = 1, path: str = SIMPLE, **more: Any) -> Asked:
    left, right = numbers(seed, samples)
    return binary({"INPUT0": left, "INPUT1": right}, ["OUTPUT0", "OUTPUT1"], path, **more)


def rows(value: float, path: str = ROWS) -> Asked:
    return binary({"x": np.full((1, 4), value, np.float32)}, ["y"], path)


def tensors(reply: WireReply) -> tuple[dict[str, Any], bytes]:
    """An answer's JSON and what follows it."""
    assert reply.status == 200, reply
    length = int(reply.headers[LENGTH.lower()])
    return json.loads(reply.body[:length]), reply.body[length:]


def check(reply: WireReply, seed: int = 0, samples: int = 1) -> None:
    """The answer to `simple` must be the right one."""
    left, right = numbers(seed, samples)
    document, data = tensors(reply)
    assert [one["name"] for one in document["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    assert [one["shape"] for one in document["outputs"]] == [[samples, 16]] * 2
    assert data == (left + right).tobytes() + (left - right).tobytes()


def alike(one: WireReply, other: WireReply) -> None:
    """Nothing tells two answers apart but what is new in every answer."""
    assert one.status == other.status
    assert one.body == other.body
    assert {*one.headers} == {*other.headers}
    assert {name for name, value in one.headers.items() if other.headers[name] != value} <= CHANGING


@pytest.fixture(scope="module")
def filled_store(shared_store: StoreFolder) -> StoreFolder:
    shared_store.add_add_sub()
    shared_store.add_add_sub(name="counted")
    shared_store.add_identity("FP32", ("batch", BROAD), name="broad")
    return shared_store


@pytest.fixture(scope="module")
def server(filled_store: StoreFolder) -> Iterator[Server]:
    with start_server("--access-log", "all", store=filled_store.root) as server:
        yield server
        wait_until(server.is_at_rest, "nothing is held after all these requests")


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    """A connection to a server that knows `simple()`."""
    with Wire(server.port) as wire:
        for _ in range(2):
            wire.send(simple().whole())
            check(wire.reply())
        yield wire
        wire.send(simple(99).whole())
        check(wire.reply(), 99)


def ask(wire: Wire, asked: Asked, **more: str) -> WireReply:
    wire.send(asked.whole(**more))
    return wire.reply()


@pytest.mark.parametrize("samples", [1, 3, 32])
def test_the_first_answer_and_the_later_ones_are_alike(server: Server, samples: int) -> None:
    with Wire(server.port) as wire:
        asked = simple(1, samples, id=f"first-{samples}")
        first, second, third = [ask(wire, asked) for _ in range(3)]
        check(first, 1, samples)
        alike(first, second)
        alike(first, third)
        assert tensors(third)[0]["id"] == f"first-{samples}"


@pytest.mark.parametrize("own_id", ["?", "??", "mine", ""])
def test_a_text_that_is_called_like_the_id_and_stands_before_it_is_not_the_id(server: Server, own_id: str) -> None:
    with Wire(server.port) as wire:
        for other in ("one", "two", "six", "six"):
            reply = ask(wire, simple(1, parameters={"id": other}, id=own_id))
            check(reply, 1)
            assert tensors(reply)[0]["id"] == own_id


@pytest.mark.parametrize("samples", [1, 5])
def test_each_gets_the_answer_to_its_own_tensors(server: Server, samples: int) -> None:
    def client(number: int) -> None:
        with Wire(server.port) as wire:
            for seed in range(100 * number, 100 * number + 40):
                check(ask(wire, simple(seed, samples)), seed, samples)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client, range(8)))


def test_a_version_that_is_named_answers_too(server: Server) -> None:
    with Wire(server.port) as wire:
        for seed in range(3):
            check(ask(wire, simple(seed, path="/v2/models/simple/versions/1/infer")), seed)
        for _ in range(2):
            assert ask(wire, simple(path="/v2/models/simple/versions/2/infer")).status == 404


def test_own_ids_and_traces_come_back_and_others_are_made(wire: Wire) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    replies = [ask(wire, simple(), X_Request_Id=f"mine-{number}", traceparent=parent) for number in range(3)]
    assert [reply.headers["x-request-id"] for reply in replies] == ["mine-0", "mine-1", "mine-2"]
    assert {reply.headers["traceparent"] for reply in replies} == {parent}
    made = [ask(wire, simple()) for _ in range(20)]
    assert len({reply.headers["x-request-id"] for reply in made}) == 20
    assert not any("traceparent" in reply.headers for reply in made)
    for unfit in ("two words", "x" * 200):
        assert ask(wire, simple(), X_Request_Id=unfit).headers["x-request-id"] != unfit


def test_requests_that_are_sent_at_once_are_answered_in_their_order(wire: Wire) -> None:
    ready, sent = head("/v2/health/ready", method="GET"), []
    for number in range(30):
        other = {7: ready, 13: simple(13, samples=2).whole(), 20: ready, 21: ready, 25: simple(25, id="x").whole()}
        sent.append(other.get(number, simple(number).whole()))
    wire.send(b"".join(sent))
    for number in range(30):
        reply = wire.reply()
        if number in (7, 20, 21):
            assert reply.json() == {"ready": True}
        else:
            check(reply, number, 2 if number == 13 else 1)


def in_two_pieces(wire: Wire, asked: Asked) -> None:
    whole = asked.whole()
    wire.send(whole[:-100])
    wire.send(whole[-100:])


def headers_byte_by_byte(wire: Wire, asked: Asked) -> None:
    start = head(asked.path, asked.headers())
    for byte in start:
        wire.send(bytes([byte]))
    wire.send(asked.header + asked.data)


def all_byte_by_byte(wire: Wire, asked: Asked) -> None:
    for byte in asked.whole():
        wire.send(bytes([byte]))


def chunked(wire: Wire, asked: Asked) -> None:
    start = head(asked.path, {LENGTH: str(len(asked.header)), "Transfer-Encoding": "chunked"})
    wire.send(start + chunk(asked.header) + chunk(asked.data) + chunk(b""))


def expecting(wire: Wire, asked: Asked) -> None:
    wire.send(head(asked.path, asked.headers(Expect="100-continue")))
    assert wire.reply().status == 100
    wire.send(asked.header + asked.data)


def expecting_nothing(wire: Wire, asked: Asked) -> None:
    wire.send(asked.whole(Expect="100-continue"))
    assert wire.reply().status == 100


def with_a_time_limit(wire: Wire, asked: Asked) -> None:
    wire.send(asked._replace(path=f"{asked.path}?timeout_ms=30000").whole())


def zipped(wire: Wire, asked: Asked) -> None:
    body = gzip.compress(asked.header + asked.data)
    wire.send(head(asked.path, asked.headers(Content_Encoding="gzip") | {"Content-Length": str(len(body))}) + body)


@pytest.mark.parametrize(
    "send",
    [
        in_two_pieces,
        headers_byte_by_byte,
        all_byte_by_byte,
        chunked,
        expecting,
        expecting_nothing,
        with_a_time_limit,
        zipped,
    ],
)
def test_however_it_is_sent_it_is_answered(wire: Wire, send: Callable[[Wire, Asked], None]) -> None:
    plain = ask(wire, simple(7))
    for _ in range(2):
        send(wire, simple(7))
        reply = wire.reply()
        check(reply, 7)
        alike(plain, reply)


def test_a_connection_that_is_to_be_closed_is_closed(server: Server, wire: Wire) -> None:
    for change in (
        lambda whole: whole.replace(b"Host: test", b"Connection: close"),
        lambda whole: whole.replace(b"HTTP/1.1", b"HTTP/1.0"),
    ):
        with Wire(server.port) as other:
            other.send(change(simple(3).whole()))
            reply = other.reply()
            check(reply, 3)
            assert reply.headers["connection"] == "close"
            assert other.is_closed()


@pytest.mark.parametrize(
    "parameters", [{"timeout": 30_000_000}, {"priority": 3}, {"timeout": 20_000_000, "priority": 1}]
)
def test_terms_are_heeded_every_time(wire: Wire, parameters: dict[str, int]) -> None:
    for seed in range(3):
        check(ask(wire, simple(seed, parameters=parameters)), seed)
    for _ in range(2):
        assert ask(wire, simple(parameters={"timeout": 1})).status in (429, 504)


def test_an_answer_is_compressed_for_whom_it_was_the_first_time(server: Server) -> None:
    with Wire(server.port) as wire:
        asked = simple(5, samples=32, id="compressed")
        zipped = [ask(wire, asked, Accept_Encoding="gzip") for _ in range(3)]
        plain = [ask(wire, asked) for _ in range(2)]
        zipped.append(ask(wire, asked, Accept_Encoding="gzip, identity;q=0.5"))
        refused = ask(wire, asked, Accept_Encoding="gzip;q=0")
        for reply in plain:
            check(reply, 5, 32)
            assert "content-encoding" not in reply.headers
            alike(reply, refused)
        for reply in zipped:
            assert reply.headers["content-encoding"] == "gzip"
            assert gzip.decompress(reply.body) == plain[0].body
            alike(zipped[0], reply)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda good: good._replace(data=good.data + b"\0" * 4), id="longer"),
        pytest.param(lambda good: good._replace(data=good.data[:-4]), id="shorter"),
        pytest.param(lambda good: good._replace(data=b""), id="no-tensor"),
        pytest.param(
            lambda good: good._replace(header=good.header[:-1], data=b"}" + good.data), id="length-less-by-one"
        ),
        pytest.param(lambda good: Asked(good.header + good.data[:1], good.data[1:]), id="length-more-by-one"),
        pytest.param(lambda good: Asked(good.header + good.data, b""), id="length-of-all"),
        pytest.param(lambda good: good._replace(header=good.header.replace(b"INT32", b"INT64")), id="another-dtype"),
    ],
)
def test_what_is_wrong_is_refused_as_on_the_first_time(wire: Wire, spoil: Callable[[Asked], Asked]) -> None:
    wrong = spoil(simple())
    direct, usual = ask(wire, wrong), ask(wire, wrong._replace(path=SIMPLE.replace("simple", "%73imple")))
    assert direct.status == 400
    assert direct.error
    alike(direct, usual)


@pytest.mark.parametrize("length", ["999999", "-1", "one", "", "0"])
def test_a_length_that_is_none_is_refused_as_on_the_first_time(wire: Wire, length: str) -> None:
    good = simple()
    replies = []
    for path in (SIMPLE, f"{SIMPLE}?"):
        wire.send(head(path, good.headers() | {LENGTH: length}) + good.header + good.data)
        replies.append(wire.reply())
    assert replies[0].status == 400
    alike(*replies)


def test_every_request_is_counted_exactly_once(server: Server) -> None:
    own, path = {"model": "counted", "version": "1"}, "/v2/models/counted/infer"

    def counts() -> list[float]:
        statistics = server.statistics("counted")
        stages = [metric(server, "convoy_stage_duration_seconds_count", stage=stage, **own) for stage in STAGES]
        return [
            *(statistics["inference_stats"]["success"]["count"], statistics["inference_count"]),
            metric(server, "convoy_requests_total", outcome="success", protocol="v2", **own),
            metric(server, "convoy_requests_total", **own),
            metric(server, "convoy_request_duration_seconds_count", **own),
            metric(server, "nv_inference_request_success", **own),
            *stages,
        ]

    with Wire(server.port) as wire:
        for seed in range(60):
            check(ask(wire, simple(seed, path=path)), seed)
        wire.send(b"".join(simple(seed, path=path).whole() for seed in range(40)))
        for seed in range(40):
            check(wire.reply(), seed)
    wait_until(lambda: min(counts()) >= 100, "all are counted")
    assert counts() == [100.0] * 10


def test_each_request_has_one_line_in_the_access_log(server: Server, wire: Wire) -> None:
    name = f"logged-{server.port}-{wire.socket.getsockname()[1]}"
    for number in range(10):
        check(ask(wire, simple(number), X_Request_Id=f"{name}-{number}"), number)
    wire.send(b"".join(simple(number).whole(X_Request_Id=f"{name}-{number}") for number in range(10, 20)))
    for number in range(10, 20):
        check(wire.reply(), number)
    wait_until(lambda: server.log_so_far.count(name) >= 20, "all are in the log")
    lines = server.log.splitlines()
    for number in range(20):
        (line,) = [line for line in lines if line.endswith(f"[request {name}-{number}]")]
        assert f"127.0.0.1 POST {SIMPLE} 200 " in line


def test_a_client_that_reads_slowly_is_waited_for_and_misses_nothing(server: Server) -> None:
    count = 300

    def broad(number: int) -> Asked:
        return binary({"x": np.full((1, BROAD), number, np.float32)}, ["y"], "/v2/models/broad/infer")

    def answered() -> int:
        return int(server.statistics("broad")["inference_stats"]["success"]["count"])

    before, seen = answered(), []

    def stands_still() -> bool:
        seen.append(answered())
        return seen[-1] > before and len(seen) > 25 and len({*seen[-25:]}) == 1

    with Wire(server.port, receive_buffer=4096) as wire, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(wire.send, b"".join(broad(number).whole() for number in range(count)))
        wait_until(stands_still, "nobody answers whom nobody hears")
        assert answered() - before < count
        assert server.stats()["inflight_bytes"] < 8 << 20
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # or the rest would take long
        for number in range(count):
            _, data = tensors(wire.reply())
            assert (np.frombuffer(data, np.float32) == number).all()
            assert len(data) == BROAD * 4
        sending.result()
    assert answered() - before == count


def test_an_idle_connection_is_closed_in_the_end(server: Server) -> None:
    with Wire(server.port) as idle:
        for seed in range(3):
            check(ask(idle, simple(seed)), seed)
        assert idle.is_closed()


def test_a_known_kind_needs_the_key_all_the_same(filled_store: StoreFolder, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open sesame\n")
    options = ("--api-key-file", str(tmp_path / "key"))
    with start_server(*options, store=filled_store.root) as server, Wire(server.port) as wire:
        assert ask(wire, simple()).status == 401
        for seed in range(3):
            check(ask(wire, simple(seed), Authorization="Bearer open sesame"), seed)
        for authorization in ("Bearer open", "open sesame", "Basic open sesame", ""):
            refusal = ask(wire, simple(), Authorization=authorization)
            assert refusal.status == 401
            assert "Authorization: Bearer" in refusal.error
        assert ask(wire, simple()).status == 401
        check(ask(wire, simple(4), Authorization="Bearer open sesame"), 4)


def test_who_answers_changes_with_what_is_loaded(store: StoreFolder) -> None:
    asked = binary({"x": np.zeros((1, 4), np.float32)}, ["y"], "/v2/models/shift/infer")

    def answer(wire: Wire) -> tuple[str, float]:
        document, data = tensors(ask(wire, asked))
        return document["model_version"], float(np.frombuffer(data, np.float32)[0])

    def change(server: Server, what: str) -> None:
        assert server.post(f"/v2/repository/models/shift/{what}").status_code == 200

    store.add_shift(1.0)
    mode = ("--model-control", "explicit", "--host", "127.0.0.1")
    with start_server(*mode, store=store.root) as server, Wire(server.port) as wire:
        change(server, "load")
        assert [answer(wire) for _ in range(3)] == [("1", 1.0)] * 3
        change(server, "unload")
        for _ in range(2):
            gone = ask(wire, asked)
            assert gone.status == 404
            assert gone.error.startswith("Request for unknown model: 'shift' has no available versions")
        store.add_shift(2.0, version=2)
        change(server, "load")
        assert [answer(wire) for _ in range(3)] == [("2", 2.0)] * 3
        store.add_shift(3.0, version=2)
        change(server, "load")
        assert [answer(wire) for _ in range(3)] == [("2", 3.0)] * 3
        wait_until(server.is_at_rest, "nothing is held")


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    """A batch is one sample, and four may wait."""
    with start_fake_server(fake={"max_batch": 1}, max_queue=4) as server:
        with Wire(server.port) as wire:
            for value in (1.0, 2.0):
                tensors(ask(wire, rows(value)))
        yield server
        wait_until(server.is_ready, "every engine is well")
        wait_until(server.is_at_rest, "nothing is held after all these requests")


@pytest.fixture
def held(fake: FakeServer) -> Iterator[FakeServer]:
    """Its engines stop in the middle of their work, until the switch is off again."""
    wait_until(fake.is_at_rest, "nothing is left of the test before")
    fake.switch_on("hold")
    yield fake
    with suppress(FileNotFoundError):  # the test has done it
        fake.switch_off("hold")
    wait_until(fake.is_at_rest, "what was held has been given back")


def unfinished(server: Server) -> int:
    return int(server.stats()["unfinished_requests"])


def test_a_client_that_leaves_is_counted_and_leaves_nothing_behind(held: FakeServer) -> None:
    asked = rows(1.0)
    before = held.statistics("rows")
    cancelled = metric(held, "convoy_requests_total", outcome="cancelled")
    wires = []
    for number in range(1, 5):
        wires.append(Wire(held.port))
        wires[-1].send(asked.whole())
        wait_until(lambda number=number: unfinished(held) == number, "it is in the core")  # type: ignore[misc]
    waiting = held.stats()["models"][-1]["waiting_samples"]
    for wire in reversed(wires):
        wire.reset()
    wait_until(lambda: unfinished(held) == 4 - waiting, "those who waited have gone")
    wait_until(lambda: metric(held, "convoy_requests_total", outcome="cancelled") == cancelled + 4, "all are counted")
    assert held.stats()["inflight_bytes"] > 0, "an engine still writes"
    held.switch_off("hold")
    wait_until(held.is_at_rest, "all memory has come back")
    after = held.statistics("rows")
    assert after["inference_count"] - before["inference_count"] == 4 - waiting, "what ran has run"
    counts = [one["inference_stats"] for one in (before, after)]
    grown = {name: counts[1][name]["count"] - counts[0][name]["count"] for name in ("success", "fail")}
    assert grown == {"success": 0, "fail": 4}, "nobody was answered"


def test_a_full_queue_turns_away_those_it_knows_too(held: FakeServer) -> None:
    rejected = metric(held, "convoy_rejected_total", reason="queue_full")
    wires = [Wire(held.port) for _ in range(12)]
    for number, wire in enumerate(wires):
        wire.send(rows(float(number)).whole())
    wait_until(lambda: metric(held, "convoy_rejected_total", reason="queue_full") > rejected, "some are refused")
    held.switch_off("hold")
    replies = [wire.reply() for wire in wires]
    for number, reply in enumerate(replies):
        if reply.status == 200:
            assert (np.frombuffer(tensors(reply)[1], np.float32) == number).all()
        else:
            assert reply.status == 429
            assert reply.error == "Exceeds maximum queue size: 4 samples for 'rows'; send it again later"
            assert int(reply.headers["retry-after"]) >= 1
    refusals = sum(reply.status == 429 for reply in replies)
    wait_until(
        lambda: metric(held, "convoy_rejected_total", reason="queue_full") == rejected + refusals, "it is counted"
    )
    for wire in wires:
        tensors(ask(wire, rows(1.0)))
        wire.close()


def test_an_engine_that_fails_is_told_as_on_the_first_time(fake: FakeServer) -> None:
    with Wire(fake.port) as wire:
        for value, status, words in ((POISON, 500, "fails on this request"), (DIE, 503, "fell off the bus")):
            replies = []
            for path in (ROWS, f"{ROWS}?"):
                wait_until(fake.is_ready, "its engine is well again")
                tensors(ask(wire, rows(3.0)))
                replies.append(ask(wire, rows(value, path)))
            assert replies[0].status == status
            assert words in replies[0].error
            alike(*replies)
        wait_until(fake.is_ready, "its engine is well again")
        assert (np.frombuffer(tensors(ask(wire, rows(5.0)))[1], np.float32) == 5.0).all()


def test_who_was_taken_before_the_end_is_answered_and_told_to_go() -> None:
    with start_fake_server() as server:
        wires = [Wire(server.port) for _ in range(6)]
        for _ in range(2):
            tensors(ask(wires[0], rows(1.0)))
        server.switch_on("hold")
        for number, wire in enumerate(wires):
            wire.send(rows(float(number)).whole())
        wait_until(lambda: unfinished(server) == 6, "all are in the core")
        server.signal()
        wait_until(lambda: _is_leaving(server), "everybody knows that the end has come")
        server.switch_off("hold")
        for number, wire in enumerate(wires):
            reply = wire.reply()
            assert (np.frombuffer(tensors(reply)[1], np.float32) == number).all()
            assert reply.headers["connection"] == "close"
            assert wire.is_closed()
            wire.close()
        assert server.wait() == 0
        assert "every accepted request was answered" in server.log


def _is_leaving(server: Server) -> bool:
    return server.get("/v2/health/live").headers.get("connection") == "close"


def test_while_the_server_leaves_it_answers_and_says_so(filled_store: StoreFolder) -> None:
    options = ("--drain-delay-s", "60")
    with start_server(*options, store=filled_store.root, exit_code=128 + signal.SIGTERM) as server:
        wires = [Wire(server.port) for _ in range(4)]
        for _ in range(2):
            for wire in wires:
                check(ask(wire, simple()))
        server.signal()
        wait_until(lambda: _is_leaving(server), "everybody knows that the end has come")
        for seed, wire in enumerate(wires):
            reply = ask(wire, simple(seed))
            check(reply, seed)
            assert reply.headers["connection"] == "close"
            assert wire.is_closed()
            wire.close()
        server.signal()  # it waits no longer
        server.wait()


def test_who_is_not_answered_in_time_is_told_so() -> None:
    with start_fake_server(drain_timeout_s=0.3) as server, Wire(server.port) as wire:
        for _ in range(2):
            tensors(ask(wire, rows(1.0)))
        server.switch_on("hold")
        wire.send(rows(2.0).whole())
        wait_until(lambda: unfinished(server) == 1, "it runs")
        server.signal()
        reply = wire.reply()
        assert (reply.status, reply.headers["connection"]) == (503, "close")
        assert "the server shut down" in reply.error
        assert server.wait() == 0
        assert "1 requests were not answered in time" in server.log


def test_a_chunked_body_that_is_allowed_is_read_where_there_is_hardly_room() -> None:
    body = digit("seven") + bytes(5 * MIB)  # what is appended to a PNG is not looked at
    with start_server("--max-body-mb", "8", "--max-inflight-mb", "8") as server:
        with Wire(server.port) as wire:
            assert wire.ask(DIGITS, body).status == 200
        for _ in range(3):
            wait_until(server.is_at_rest, "nothing else holds memory")
            with Wire(server.port) as wire:
                pieces = [chunk(body[start : start + MIB]) for start in range(0, len(body), MIB)]
                wire.send(head(DIGITS, {"Transfer-Encoding": "chunked"}) + b"".join(pieces) + chunk(b""))
                assert wire.reply().status == 200


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with start_server() as server:
        yield server
        wait_until(server.is_at_rest, "nothing is held after all these requests")


def picture_request(body: bytes, length: str | None = None, path: str = DIGITS, **headers: str) -> bytes:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return head(path, {"Content-Length": str(len(body)) if length is None else length, **more}) + body


SEVEN, TWO = digit("seven"), digit("two")
# What follows a picture on a connection, as the bytes of one request.
AFTER_A_PICTURE = {
    "the same": picture_request(SEVEN),
    "another": picture_request(TWO),
    "no image": picture_request(b"no image at all"),
    "cut off": picture_request(SEVEN[:-100]),
    "nothing": picture_request(b""),
    "zeros before its length": picture_request(TWO, f"000{len(TWO)}"),
    "a length in hex": picture_request(TWO, hex(len(TWO))),
    "a length below zero": picture_request(b"", "-1"),
    "too large to be read": picture_request(b"", str(1 << 40)),
    "one more header": picture_request(TWO, x_more="more"),
    "another model": picture_request(TWO, path="/predictions/nobody"),
    "other classes": picture_request(TWO, path=f"{DIGITS}?top_k=2"),
    "its id": picture_request(TWO, x_request_id="own"),
    "a form": picture_request(
        b'--x\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n\r\n' + TWO + b"\r\n--x--\r\n",
        content_type="multipart/form-data; boundary=x",
    ),
    "chunked": head(DIGITS, {"Transfer-Encoding": "chunked"}) + chunk(TWO) + chunk(b""),
    "the last": picture_request(TWO, connection="close"),
}


def same_answer(reply: WireReply) -> tuple[object, ...]:
    """What an answer says beside times and the server's own ids."""
    document = reply.json()
    for one in (document, *document.get("results", ())):
        one.pop("timing_ms", None)
    return reply.status, document, {*reply.headers}, reply.headers.get("connection")


@pytest.mark.parametrize("following", AFTER_A_PICTURE)
@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in-pieces"])
def test_what_follows_a_picture_is_answered_as_if_nothing_had_been_before(
    following: str, in_pieces: bool, demo: Server
) -> None:
    request = AFTER_A_PICTURE[following]
    with Wire(demo.port) as alone:
        alone.send(request)
        expected = same_answer(alone.reply())
    with Wire(demo.port) as wire:
        for body in (SEVEN, TWO, SEVEN):
            assert wire.ask(DIGITS, body).json()["predictions"][0]["label"] == ("7" if body is SEVEN else "2")
        if in_pieces:
            for at in range(0, len(request), 700):  # whether they come together is up to the system
                wire.send(request[at : at + 700])
        else:
            wire.send(request)
        assert same_answer(wire.reply()) == expected
        if expected[0] == 200 and expected[-1] != "close":
            assert wire.ask(DIGITS, SEVEN).json()["predictions"][0]["label"] == "7"


def test_several_pictures_at_once_are_answered_in_their_order(demo: Server) -> None:
    with Wire(demo.port) as wire:
        for labels in ("7", "72", "2772", "7" * 9 + "2"):
            wire.send(b"".join(picture_request(SEVEN if label == "7" else TWO) for label in labels))
            assert "".join(wire.reply().json()["predictions"][0]["label"] for _ in labels) == labels
