"""What our connections guard against, and what becomes of calls on them.

A core, the gate and the infer route over fake engines, and connections whose other end is the test.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import random
import re
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial, update_wrapper
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from convoy.app.calls.access import BodyLimits, ServeOptions
from convoy.app.http.application import hot_routes
from convoy.app.http.connection import guarded_protocol
from convoy.app.http.gate import Gate
from convoy.app.http.replies import Reply, send_reply
from convoy.app.scheduling.policy import RefusalReason, Refuse
from convoy.app.server.acceptor import ConnectionLimits
from convoy.app.server.logs import request_id
from tests.support.fake_devices import ROW, Workshop, in_workshop, until
from tests.support.memory_server import Connection
from tests.support.wire import WireReply, check_refused, chunk, head

OPTIONS = ServeOptions(BodyLimits(1 << 20), decode_threads=1, access_log="all")
ROWS = "/v2/models/rows/infer"
OFFSET = 100.0  # of the workshop's first engine
LENGTH = "Inference-Header-Content-Length"


def rows(value: float, samples: int = 1, path: str = ROWS, headers: dict[str, str] | None = None, **more: Any) -> bytes:
    """A binary request for rows of this value."""
    header, data = parts(value, samples, **more)
    declared = {LENGTH: str(len(header)), "Content-Length": str(len(header) + len(data))}
    return head(path, {**declared, **(headers or {})}) + header + data


def parts(value: float, samples: int = 1, **more: Any) -> tuple[bytes, bytes]:
    """Its JSON and its tensor."""
    data = np.full((samples, ROW), value, np.float32).tobytes()
    tensor = {
        "name": "x",
        "shape": [samples, ROW],
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(data)},
    }
    output = {"name": "y", "parameters": {"binary_data": True}}
    return json.dumps({"inputs": [tensor], "outputs": [output], **more}).encode(), data


def in_json(
    value: object, samples: int = 1, path: str = ROWS, headers: dict[str, str] | None = None, **more: Any
) -> bytes:
    """The same in JSON; a text stands for itself."""
    data = value if isinstance(value, str) else json.dumps([value] * (samples * ROW))
    tensor = f'{{"name": "x", "shape": [{samples}, {ROW}], "datatype": "FP32", "data": {data}}}'
    document = json.dumps({"inputs": ["here"], **more}).replace('"here"', tensor).encode()
    return head(path, {"Content-Length": str(len(document)), **(headers or {})}) + document


def shift(reply: WireReply, samples: int = 1) -> float:
    """What an answer's rows are, which must be all the same."""
    assert reply.status == 200, reply
    data = reply.body[int(reply.headers[LENGTH.lower()]) :]
    (value,) = set(np.frombuffer(data, np.float32).tolist())
    assert len(data) == samples * ROW * 4
    return float(value)


class House:
    """A host of the workshop's core. `entered` counts the requests that reached the application."""

    def __init__(self, workshop: Workshop, options: ServeOptions = OPTIONS) -> None:
        core = self.core = workshop.core
        self.entered, self.options = 0, options
        self.hot = hot_routes(core, options)
        self.gate = Gate(self.hot, _elsewhere, core, options)
        self._app: ASGIApp = self.gate
        self._kind = guarded_protocol(ConnectionLimits())
        self._config = uvicorn.Config(
            self._counted,
            http=self._kind,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        self._config.load()
        self.state = ServerState()

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.entered += 1
        await self._app(scope, receive, send)

    def connect(self, loop: Any = None) -> Connection:
        return Connection(lambda: self._kind(self._config, self.state, {}, _loop=loop or asyncio.get_running_loop()))

    async def used(self) -> Connection:
        """A connection after the first request of the kind `rows(...)`."""
        connection = self.connect()
        assert shift(await connection.ask(rows(0.0))) == OFFSET
        return connection

    def counted(self, outcome: str, series: str = "convoy_requests_total") -> float:
        labels = {"model": "rows", "version": "1", "protocol": "v2", "outcome": outcome}
        return self.core.metrics.registry.get_sample_value(series, labels) or 0.0


async def _elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
    await send_reply(send, Reply(200, (b'"elsewhere"',)))


Scene = Callable[[House, Workshop], Coroutine[None, None, None]]


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def play(workshop: Workshop, scene: Scene, **options: Any) -> None:
    """A scene in a house; afterwards nothing is held, no call is open, and no version has a user."""

    async def scenario() -> None:
        house = House(workshop, replace(OPTIONS, **options))
        async with asyncio.timeout(60):
            await scene(house, workshop)
        for engine in workshop.engines:
            if engine.gate is not None:
                engine.gate.set()
        await until(lambda: workshop.core.slab.slots_in_use == workshop.core.open_calls == 0)
        assert [served.users for served in workshop.core.catalog.all_live()] == [0] * len(
            workshop.core.catalog.served()
        )
        house.hot.close()
        for served in workshop.core.catalog.served():
            leaving = workshop.core.lifecycle.take_out_of_service(served.key.model, served.key.version)
            assert leaving is not None
            await leaving

    in_workshop(workshop, scenario)


def played(**options: Any) -> Callable[[Callable[..., Coroutine[None, None, None]]], Callable[..., None]]:
    """Makes a test of a scene, which gets a house and its workshop, and then the parameters of the test."""

    def test_of(scene: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
        def test(workshop: Workshop, **given: Any) -> None:
            play(workshop, partial(scene, **given), **options)

        own = list(inspect.signature(test).parameters.values())[:1]
        given = list(inspect.signature(scene).parameters.values())[2:]
        update_wrapper(test, scene).__signature__ = inspect.Signature([*own, *given])  # type: ignore[attr-defined]
        return test

    return test_of


def held(workshop: Workshop) -> threading.Event:
    """From now on runs wait until the event is set."""
    (engine,) = workshop.engines
    engine.gate = threading.Event()
    return engine.gate


@pytest.mark.parametrize(
    ("request_of", "status"),
    [
        pytest.param(lambda: rows(1.0, headers={"Content-Encoding": "gzip"}), 400, id="not-gzip"),
        pytest.param(lambda: rows(1.0, headers={"Content-Encoding": "br"}), 501, id="unknown-compression"),
        pytest.param(lambda: rows(1.0, headers={LENGTH: "9"}), 400, id="a-wrong-length"),
        pytest.param(lambda: rows(1.0, headers={LENGTH: "one"}), 400, id="no-length"),
        pytest.param(lambda: rows(1.0, headers={LENGTH: "99999"}), 400, id="too-long"),
        pytest.param(lambda: rows(1.0, headers={LENGTH: "9" * 5000}), 400, id="absurdly-long"),
        pytest.param(lambda: rows(1.0, path="/v2/models/nothing/infer"), 404, id="no-model"),
        pytest.param(lambda: rows(1.0, path=f"{ROWS}?timeout_ms=soon"), 400, id="no-time-limit"),
        pytest.param(lambda: rows(1.0, headers={"Content-Length": str(2 << 20)}), 413, id="too-large"),
        pytest.param(lambda: in_json("[1, 2, 3]"), 400, id="too-few"),
        pytest.param(lambda: in_json("[1, 2, 3, 4, 5]"), 400, id="too-many"),
        pytest.param(lambda: in_json('[1, 2, 3, "4"]'), 400, id="a-text"),
        pytest.param(lambda: in_json("[1, 2, 3, 4"), 400, id="no-end"),
    ],
)
@played()
async def test_what_is_wrong_is_told(
    house: House, workshop: Workshop, request_of: Callable[[], bytes], status: int
) -> None:
    connection = house.connect()
    reply = await connection.ask(request_of())
    assert reply.status == status
    assert reply.error
    assert reply.headers["x-request-id"]


@played()
async def test_who_asks_first_whether_to_go_on_is_told_so_when_there_is_room(house: House, workshop: Workshop) -> None:
    connection, request = house.connect(), rows(1.0, headers={"Expect": "100-continue"})
    body_at = request.index(b"\r\n\r\n") + 4
    connection.send(request[:body_at])
    await until(lambda: connection.sent == b"HTTP/1.1 100 Continue\r\n\r\n")
    connection.sent.clear()
    assert shift(await connection.ask(request[body_at:])) == 101.0
    connection.send(rows(1.0, path="/v2/models/nothing/infer", headers={"Expect": "100-continue"})[:-1])
    assert (await connection.reply())[0].status == 404, "and where there is none nobody need send it"


@played()
async def test_who_asks_faster_than_it_is_answered_is_not_read_on(house: House, workshop: Workshop) -> None:
    gate, others = await busy(house, workshop)
    connection, value, most_waiting = house.connect(), 0, 0
    answered: list[WireReply] = []
    for turn in range(40):
        for _ in range(5):  # a turn of the event loop, in which the server may go on reading
            if connection.is_read:
                connection.send(b"".join(rows(float(value + number)) for number in range(100)))
                value += 100
            await asyncio.sleep(0)
        most_waiting = max(most_waiting, len(connection.protocol.pipeline))
        if turn == 10:
            gate.set()
        answered += connection.replies
        connection.sent.clear()
    waiting = value - len(answered)
    assert waiting <= 250, "what is read ahead is one piece and one read"
    assert most_waiting <= 50, "and most of it has not been parsed"
    answered += await connection.reply(waiting)
    assert [shift(reply) for reply in answered] == [OFFSET + number for number in range(value)]
    assert connection.is_read
    for other in others:
        await other.reply()


@played()
async def test_a_long_body_behind_a_request_that_waits_arrives_whole(house: House, workshop: Workshop) -> None:
    gate, others = await busy(house, workshop)
    connection, long = house.connect(), in_json(json.dumps([3.0] * ROW) + " " * 200_000)
    connection.send(rows(1.0) + rows(2.0) + long[:100_000])
    await asyncio.sleep(0)
    assert not connection.is_read
    gate.set()
    await until(lambda: connection.is_read)
    connection.send(long[100_000:] + rows(4.0))
    first, second, third, fourth = await connection.reply(4)
    assert [shift(reply) for reply in (first, second, fourth)] == [101.0, 102.0, 104.0]
    assert third.json()["outputs"][0]["data"] == [103.0] * ROW
    for other in others:
        await other.reply()


@played()
async def test_under_a_root_path_the_routes_are_the_same(house: House, workshop: Workshop) -> None:
    house._config.root_path = "/models/here"
    connection = house.connect()
    assert shift(await connection.ask(rows(1.0))) == 101.0
    assert (await connection.ask(head("/v2", method="GET"))).json() == "elsewhere"


@played()
async def test_a_chunked_body_arrives_whole(house: House, workshop: Workshop) -> None:
    header, data = parts(8.0)
    chunked = head(ROWS, {LENGTH: str(len(header)), "Transfer-Encoding": "chunked"})
    connection = house.connect()
    for _ in range(3):
        reply = await connection.ask(chunked + chunk(header) + chunk(data) + chunk(b""))
        assert shift(reply) == 108.0
    assert shift(await connection.ask(rows(9.0))) == 109.0


@played()
async def test_a_chunked_body_that_grows_too_long_is_refused_while_it_comes(house: House, workshop: Workshop) -> None:
    connection = house.connect()
    connection.send(head(ROWS, {"Transfer-Encoding": "chunked"}))
    for _ in range(20):
        connection.send(chunk(bytes(64 << 10)))
        await until(lambda: connection.is_read or bool(connection.sent))
    (reply,) = await connection.reply()
    assert reply.status == 413
    await until(lambda: house.counted("invalid") == 1)
    assert house.core.slab.used_bytes == 0
    connection.send(chunk(b""))
    connection.sent.clear()
    assert shift(await connection.ask(rows(9.0))) == 109.0, "what was left of it has been thrown away"


@played()
async def test_while_nothing_can_be_written_nothing_more_is_read(house: House, workshop: Workshop) -> None:
    connection = house.connect()
    connection.protocol.flow.pause_writing()
    connection.send(rows(1.0) + rows(2.0))
    await until(lambda: house.entered == 1 and not house.core.scheduler.unfinished)
    connection.send(rows(3.0))
    assert not connection.is_read, "what nobody reads must not pile up"
    assert not connection.sent
    connection.protocol.flow.resume_writing()
    assert [shift(reply) for reply in await connection.reply(3)] == [101.0, 102.0, 103.0]


def is_answered(connection: Connection) -> bool:
    """Whether all that was asked has its answer; the last request may be cut off by the server."""
    protocol = connection.protocol
    return connection.is_closing() or (
        protocol.cycle.response_complete and not protocol.pipeline and not protocol.flow.ahead
    )


def told(reply: WireReply) -> tuple[object, ...]:
    """What must not depend on how a request came in."""
    own = reply.headers.get("x-request-id", "")
    return reply.status, reply.body, own if own.startswith("own") else None, reply.headers.get("connection")


@pytest.mark.parametrize("seed", range(40))
def test_however_a_conversation_is_cut_its_requests_are_answered_in_order(workshop: Workshop, seed: int) -> None:
    """The same bytes in pieces of any size, and a request at a time."""
    rng = random.Random(seed)
    menu: list[Callable[[float], bytes]] = [
        *[rows] * 6,
        lambda value: rows(value, samples=2),
        lambda value: rows(value, id="b"),
        lambda value: rows(value, headers={"X-Request-Id": f"own-{value:g}"}),
        lambda _: head("/ping", method="GET"),
        lambda value: b"\r\n" + rows(value),
        lambda value: rows(value) + b"\r\n",
        lambda value: rows(value, headers={LENGTH: "9"}),
    ]
    messages = [rng.choice(menu)(float(number)) for number in range(150)]
    if seed % 4 == 0:
        messages[rng.randrange(120, 150)] = rows(1.0, headers={"Connection": "close"})
    if seed % 4 == 1:
        messages[rng.randrange(120, 150)] = b"no request at all\r\n\r\n"
    whole = [(message, True) for message in messages]
    pieces: list[tuple[bytes, bool]] = []  # and whether the client waits for its answers before it goes on
    while messages:
        together = b"".join(messages[: (count := rng.choice((1, 1, 1, 1, 1, 1, 2, 3)))])
        del messages[:count]
        at = sorted(rng.randrange(len(together) + 1) for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 2))))
        pieces += [(together[a:b], False) for a, b in pairwise([0, *at])]
        pieces.append((together[at[-1] if at else 0 :], rng.random() < 0.9))

    async def scene(house: House, workshop: Workshop) -> None:
        heard: list[list[tuple[object, ...]]] = []
        for sent in (pieces, whole):
            connection = await house.used()
            for piece, is_awaited in sent:
                if connection.is_closing() or connection.has_ended:
                    break
                connection.send(piece)
                if is_awaited:
                    await until(lambda: is_answered(connection))  # noqa: B023
            await until(lambda: is_answered(connection))  # noqa: B023
            heard.append([told(reply) for reply in connection.replies])
            connection.leave()
        assert heard[0] == heard[1]
        assert len(heard[0]) > 100

    play(workshop, scene)


# Who leaves, and who is refused


async def running(workshop: Workshop, connection: Connection, request: bytes) -> None:
    """Send a request, and return when an engine has it."""
    (engine,) = workshop.engines
    before = len(engine.batches)
    connection.send(request)
    await until(lambda: len(engine.batches) > before)


async def busy(house: House, workshop: Workshop) -> tuple[threading.Event, list[Connection]]:
    """Fill the engine: who comes now waits. What runs is let go with the event."""
    connections = [await house.used() for _ in range(workshop.slots)]
    gate = held(workshop)
    for connection in connections:
        await running(workshop, connection, rows(1.0))
    return gate, connections


@pytest.mark.parametrize("broken", ["next_request_id", "submit"])
def test_a_bug_is_a_500_that_the_log_explains(
    workshop: Workshop, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    async def scene(house: House, workshop: Workshop) -> None:
        connection = await house.used()
        with monkeypatch.context() as patch:
            patch.setattr(house.core if broken == "next_request_id" else house.core.scheduler, broken, bug)
            reply = await connection.ask(rows(1.0))
        assert reply.status == 500
        assert reply.error == f"internal error; the log has it under request {reply.headers['x-request-id']}"
        assert "failed; this is a bug" in caplog.text
        assert "nobody foresaw this" in caplog.text
        await until(lambda: house.counted("failed") == 1)
        assert house.core.slab.used_bytes == 0
        assert shift(await connection.ask(rows(2.0))) == 2.0 + OFFSET

    play(workshop, scene)


@played()
async def test_a_client_that_leaves_while_it_waits_is_not_computed(house: House, workshop: Workshop) -> None:
    gate, others = await busy(house, workshop)
    batches = len(workshop.engines[0].batches)
    connection = house.connect()
    connection.send(rows(1.0))
    await until(lambda: house.core.scheduler.unfinished == len(others) + 1)
    connection.leave()
    await until(lambda: house.counted("cancelled") == 1)
    assert workshop.served().statistics.failures_by_reason["CANCELED"] == 1
    gate.set()
    for other in others:
        await other.reply()
    assert len(workshop.engines[0].batches) == batches
    assert not connection.sent


@played()
async def test_a_client_that_leaves_while_it_runs_gives_its_memory_back_when_the_engine_is_done(
    house: House, workshop: Workshop
) -> None:
    gate, (first, second) = await busy(house, workshop)
    slots = house.core.slab.slots_in_use
    first.leave()
    await until(lambda: house.counted("cancelled") == 1)
    assert house.core.slab.slots_in_use == slots
    gate.set()
    assert shift((await second.reply())[0]) == 101.0
    await until(lambda: workshop.served().statistics.inference_count == 2 + 2)  # what has run has run
    assert workshop.served().statistics.success.count == 2 + 1
    assert workshop.served().statistics.failures_by_reason["CANCELED"] == 1
    assert not first.sent


@played()
async def test_a_client_that_leaves_with_requests_in_line_is_noticed(house: House, workshop: Workshop) -> None:
    gate, others = await busy(house, workshop)
    connection = house.connect()
    connection.send(rows(1.0) + rows(2.0))
    assert not connection.is_read
    await until(lambda: connection.is_read)
    connection.send(rows(3.0))
    assert not connection.is_read, "the line is bounded"
    connection.leave()
    await until(lambda: house.counted("cancelled") == 1)
    gate.set()
    for other in others:
        await other.reply()


@played()
async def test_after_the_time_to_drain_those_who_still_wait_are_told(house: House, workshop: Workshop) -> None:
    gate, connections = await busy(house, workshop)
    connections.append(house.connect())
    connections[-1].send(rows(2.0) + rows(3.0))
    await until(lambda: house.core.open_calls == 3)
    assert not await house.core.drain(0.0)
    assert house.core.open_calls == 3
    for connection in connections:
        connection.protocol.shutdown()
    for task in house.state.tasks:
        task.cancel()
    for connection in connections:
        (reply,) = await connection.reply()
        assert (reply.status, reply.headers["connection"], reply.headers["retry-after"]) == (503, "close", "1")
        assert "the server shut down" in reply.error
        assert connection.is_closing()
    assert house.core.open_calls == 0
    await until(lambda: house.counted("cancelled") == 3)
    gate.set()


@played()
async def test_who_asks_while_the_server_leaves_is_answered_and_told_to_go(house: House, workshop: Workshop) -> None:
    gate, (early, _) = await busy(house, workshop)
    late = house.connect()
    house.core.leaving = True
    late.send(rows(2.0))
    gate.set()
    for connection, value in ((early, 101.0), (late, 102.0)):
        (reply,) = await connection.reply()
        assert (shift(reply), reply.headers["connection"]) == (value, "close")
        assert connection.is_closing()


@played()
async def test_after_a_refused_last_request_nothing_more_is_taken(house: House, workshop: Workshop) -> None:
    await busy(house, workshop)
    house.core.scheduler.state.queues[workshop.served().key].max_waiting = 0
    connection = house.connect()
    connection.send(rows(1.0, headers={"Connection": "close"}) + rows(2.0) + head("/ping", method="GET"))
    (reply,) = await connection.reply()
    assert (reply.status, reply.headers["connection"], reply.headers["retry-after"]) == (429, "close", "1")
    await until(lambda: connection.protocol.parser is None)
    assert house.core.open_calls == 2
    assert (house.counted("rejected"), house.counted("cancelled")) == (1, 0)


def test_a_client_that_has_gone_when_it_is_hung_up_on_leaves_no_open_call(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio's own loop says so there and then."""

    def gone(self: Connection) -> None:
        raise OSError(errno.ENOTCONN, "the peer has gone")

    async def scene(house: House, workshop: Workshop) -> None:
        monkeypatch.setattr(Connection, "write_eof", gone)
        connection = house.connect()
        headers = {"Connection": "close", "Content-Length": "1000"}
        connection.send(head("/v2/models/nobody/infer", headers) + b"abc")
        assert [reply.status for reply in await connection.reply()] == [404]
        await until(lambda: house.core.open_calls == 0)
        connection.leave()

    play(workshop, scene)


@played()
async def test_what_still_comes_on_a_connection_that_is_hung_up_on_is_thrown_away(
    house: House, workshop: Workshop
) -> None:
    """The next request's body is read to its end; else its client would wait for the time to linger."""
    gate, _ = await busy(house, workshop)
    connection = house.connect()
    connection.send(rows(1.0) + head("/elsewhere", {"Content-Length": str(8 << 20)}))
    house.core.leaving = True
    gate.set()
    await until(lambda: connection.has_ended)
    (reply,) = connection.replies
    assert (shift(reply), reply.headers["connection"]) == (1.0 + OFFSET, "close")
    for _ in range(128):
        assert connection.is_read
        assert not connection.is_closing()
        connection.send(bytes(64 << 10))
    assert connection.is_closing(), "it has been heard to its end"
    assert connection.replies == [reply]


@played()
async def test_a_full_queue_is_refused(house: House, workshop: Workshop) -> None:
    await busy(house, workshop)
    house.core.scheduler.state.queues[workshop.served().key].max_waiting = 0
    assert (await house.connect().ask(rows(1.0))).status == 429
    assert workshop.served().statistics.failures_by_reason["REJECTED"] == 1
    assert house.counted("rejected") == 1
    assert 'convoy_rejected_total{reason="queue_full"} 1.0' in house.core.metrics.render().decode()


@played()
async def test_without_room_that_is_said(house: House, workshop: Workshop) -> None:
    connection, slab = await house.used(), house.core.slab
    taken = slab.reserve(slab.capacity_bytes)
    assert taken is not None
    check_refused(await connection.ask(rows(1.0, path=f"{ROWS}?timeout_ms=50")), 429, code="memory_exhausted")
    slab.free(taken.ref)
    assert shift(await connection.ask(rows(1.0))) == 101.0
    assert 'convoy_rejected_total{reason="memory"} 1.0' in house.core.metrics.render().decode()


# Versions that come and go


@played()
async def test_a_version_that_leaves_while_it_answers_is_not_found_afterwards(house: House, workshop: Workshop) -> None:
    connection, gate = house.connect(), held(workshop)
    await running(workshop, connection, rows(1.0))
    leaving = workshop.core.lifecycle.take_out_of_service("rows", 1)
    assert leaving is not None
    gate.set()
    assert shift((await connection.reply())[0]) == 101.0
    assert (await connection.ask(rows(1.0))).status == 404
    await leaving
    assert (await connection.ask(rows(1.0))).status == 404


@played()
async def test_a_version_that_leaves_waits_for_those_who_found_it(house: House, workshop: Workshop) -> None:
    gate, connections = await busy(house, workshop)
    leaving = workshop.core.lifecycle.take_out_of_service("rows", 1)
    assert leaving is not None
    assert (await house.connect().ask(rows(1.0))).status == 404
    assert not leaving.done()
    gate.set()
    for connection in connections:
        assert shift((await connection.reply())[0]) == 101.0
    await leaving


# What is written down


@played()
async def test_every_request_is_counted_once(house: House, workshop: Workshop) -> None:
    connection = await house.used()
    connection.send(b"".join(rows(float(number)) for number in range(10)))
    await connection.reply(10)
    for number in range(20):
        await connection.ask(rows(float(number)))
    await asyncio.sleep(0)
    assert workshop.served().statistics.success.count == 31
    assert house.counted("success") == 31
    read = house.core.metrics.registry.get_sample_value
    own = {"model": "rows", "version": "1"}
    assert read("convoy_request_duration_seconds_count", own) == 31
    for stage in ("decode_wait", "decode", "queue", "encode"):
        assert read("convoy_stage_duration_seconds_count", {**own, "stage": stage}) == 31
    assert read("nv_inference_request_success", own) == 31
    assert house.state.total_requests == 31


def test_the_access_log_names_client_and_trace(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "convoy.access")

    async def scene(house: House, workshop: Workshop) -> None:
        seen: list[str] = []
        caplog.handler.addFilter(lambda _: bool(seen.append(request_id.get()) or True))
        headers = {"X-Request-Id": "mine", "traceparent": "00-ab-cd-01"}
        proxied = {**headers, "X-Forwarded-For": "198.51.100.9, 127.0.0.1"}
        lines = []
        connection = house.connect()
        for more, peer in ((headers, "192.0.2.7"), (proxied, "192.0.2.7"), (proxied, "127.0.0.1")):
            connection.protocol.client = (peer, 5000)
            await connection.ask(rows(1.0, headers=more))
            await until(lambda: bool(caplog.records))
            (line,) = [record.getMessage() for record in caplog.records]
            lines.append(re.sub(r"[\d.]+ ms", "T ms", line))
            caplog.clear()
        assert {*seen} == {"mine"}
        assert lines == [
            f"{client} POST {ROWS} 200 T ms trace 00-ab-cd-01" for client in ("192.0.2.7", "192.0.2.7", "198.51.100.9")
        ]

    play(workshop, scene)


def test_slow_requests_and_those_whose_client_left_have_a_line_where_only_errors_have(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "convoy.access")

    async def scene(house: House, workshop: Workshop) -> None:
        gate, (first, second) = await busy(house, workshop)
        first.leave()
        await until(lambda: bool(caplog.records))
        (left,) = [record.getMessage() for record in caplog.records]
        assert f"POST {ROWS} left" in left
        gate.set()
        await second.reply()
        assert len(caplog.records) == 1
        house.gate._access_log._options = replace(OPTIONS, access_log="errors", slow_request_ms=0.0)
        await second.ask(rows(1.0))
        assert f"POST {ROWS} 200" in caplog.records[-1].getMessage()
        assert len(caplog.records) == 2

    play(workshop, scene, access_log="errors", slow_request_ms=60_000.0)


# Idle connections


class Clock:
    """A loop whose timers run when the test says so."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now_s = 1000.0
        self.timers: list[tuple[float, Callable[[], None], asyncio.Handle]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._loop)
        self.timers.append((self.now_s + delay_s, lambda: callback(*args), handle))
        return handle

    def pass_s(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := sorted((one for one in self.timers if one[0] <= end_s), key=lambda one: one[0]):
            self.timers.remove(due[0])
            self.now_s = max(self.now_s, due[0][0])
            if not due[0][2].cancelled():
                due[0][1]()
        self.now_s = end_s


@played()
async def test_an_idle_connection_is_closed_after_its_time_and_not_earlier(house: House, workshop: Workshop) -> None:
    await house.used()
    clock = Clock()
    connection = house.connect(clock)
    patience_s = connection.protocol.timeout_keep_alive
    for _ in range(10):
        clock.pass_s(0.9 * patience_s)
        assert shift(await connection.ask(rows(1.0))) == 101.0
        assert not connection.is_closing()
    assert len([timer for timer in clock.timers if not timer[2].cancelled()]) == 1
    gate = held(workshop)
    await running(workshop, connection, rows(2.0))
    clock.pass_s(10 * patience_s)
    assert not connection.is_closing(), "who waits for an answer is not idle"
    gate.set()
    assert shift((await connection.reply())[0]) == 102.0
    clock.pass_s(0.9 * patience_s)
    assert not connection.is_closing()
    clock.pass_s(0.2 * patience_s)
    assert connection.is_closing()


@played()
async def test_who_follows_a_refused_request_is_not_idle(
    house: House, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.used()
    clock = Clock()
    connection = house.connect(clock)
    gate, submit = held(workshop), house.core.scheduler.submit
    refusals = [Refuse(RefusalReason.QUEUE_FULL, 10**9)]
    monkeypatch.setattr(house.core.scheduler, "submit", lambda request: refusals.pop() if refusals else submit(request))
    connection.send(rows(1.0) + rows(2.0))
    clock.pass_s(10 * connection.protocol.timeout_keep_alive)
    assert not connection.is_closing()
    gate.set()
    refused, answered = await connection.reply(2)
    assert refused.status == 429
    assert shift(answered) == 102.0


@played()
async def test_empty_lines_do_not_hold_an_idle_connection(house: House, workshop: Workshop) -> None:
    await house.used()
    clock = Clock()
    connection = house.connect(clock)
    await connection.ask(rows(1.0))
    connection.send(b"\r\n")
    clock.pass_s(1.1 * connection.protocol.timeout_keep_alive)
    assert connection.is_closing()


@played()
async def test_a_trailer_that_never_ends_is_too_long(house: House, workshop: Workshop) -> None:
    connection = await house.used()
    start = head(ROWS, {"Transfer-Encoding": "chunked"})
    connection.send(start + chunk(b"{}") + b"0\r\nX-Trailer: ")
    for _ in range(100):
        connection.send(b"a" * 1024)
    assert connection.has_ended
    assert [reply.status for reply in connection.replies] == [431]


@played()
async def test_a_trailer_is_no_header(house: House, workshop: Workshop) -> None:
    connection = await house.used()
    header, data = parts(1.0)
    start = head(ROWS, {"Transfer-Encoding": "chunked", LENGTH: str(len(header))})
    reply = await connection.ask(start + chunk(header + data) + b"0\r\n" + f"{LENGTH}: 7\r\n\r\n".encode())
    assert shift(reply) == 101.0


@pytest.mark.parametrize(
    ("behind", "answered"),
    [
        pytest.param(rows(2.0) + rows(3.0)[:40], [101.0, 102.0], id="while-nobody-reads-them"),
        pytest.param(rows(2.0)[:40], [101.0], id="behind-a-call-that-runs"),
    ],
)
@played()
async def test_the_end_of_headers_is_awaited_until_those_before_are_answered(
    house: House, workshop: Workshop, behind: bytes, answered: list[float]
) -> None:
    await house.used()
    clock = Clock()
    connection = house.connect(clock)
    gate = held(workshop)
    await running(workshop, connection, rows(1.0))
    connection.send(behind)
    clock.pass_s(2 * connection.protocol.limits.header_timeout_s)
    assert not connection.is_closing()
    assert not connection.sent
    gate.set()
    assert [shift(reply) for reply in await connection.reply(len(answered))] == answered
    clock.pass_s(2 * connection.protocol.limits.header_timeout_s)
    assert connection.is_closing()
    assert [reply.status for reply in connection.replies] == [408]


# What cannot be read, behind what could be

GARBAGE = b"\0 this is no request\r\n\r\n"
BROKEN_BODY = head(ROWS, {"Transfer-Encoding": "chunked"}) + b"5\r\nabcde\r\nno length\r\n"


@pytest.mark.parametrize("unreadable", [GARBAGE, BROKEN_BODY, head("/", {"X": "x" * (70 << 10)})])
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("together", [True, False], ids=["together", "later"])
@played()
async def test_what_cannot_be_read_is_answered_behind_what_could_be(
    house: House, workshop: Workshop, unreadable: bytes, others: int, together: bool
) -> None:
    await house.used()
    gate = held(workshop)
    (engine,) = workshop.engines
    before, connection = len(engine.batches), house.connect()
    good = b"".join(rows(float(value)) for value in range(1, 2 + others))
    for data in (good + unreadable,) if together else (good, unreadable):
        connection.send(data)
    connection.send(b"and more")
    await until(lambda: len(engine.batches) > before)
    assert not connection.sent
    gate.set()
    *answers, refusal = await connection.reply(2 + others)
    assert [shift(reply) for reply in answers] == [100.0 + value for value in range(1, 2 + others)]
    assert refusal.status == (431 if len(unreadable) > 1000 else 400)
    assert refusal.headers["connection"] == "close"
    assert connection.has_ended or connection.is_closing()
    await until(lambda: house.core.open_calls == 0)
    connection.leave()


@played()
async def test_nothing_is_written_into_the_midst_of_an_answer(house: House, workshop: Workshop) -> None:
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"11")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'"half', "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b' half"'})

    house._app = slow
    for unreadable, begun, statuses in (
        (GARBAGE, head("/slow", method="GET"), [200, 400]),
        (b"no length\r\n", head("/slow", {"Transfer-Encoding": "chunked"}), [200]),  # of its own body
    ):
        connection = house.connect()
        connection.send(begun)
        await until(lambda: bytes(connection.sent).endswith(b"half"))  # noqa: B023
        connection.send(unreadable)
        connection.send(b"and more")
        assert bytes(connection.sent).endswith(b"half")
        go_on.set()
        await until(lambda: b'half half"' in connection.sent)  # noqa: B023
        replies = await connection.reply(len(statuses))
        assert [reply.status for reply in replies] == statuses
        assert replies[0].json() == "half half"
        await until(lambda: connection.has_ended or connection.is_closing())  # noqa: B023
        connection.leave()
        go_on.clear()


@played()
async def test_an_answer_that_has_begun_and_awaits_a_body_that_breaks_ends(house: House, workshop: Workshop) -> None:
    heard = list[str]()

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (message := await receive())["type"] != "http.disconnect":
            await send({"type": "http.response.body", "body": message["body"], "more_body": True})
        heard.append(message["type"])

    house._app, clock = echo, Clock()
    connection = house.connect(clock)
    connection.send(head("/echo", {"Transfer-Encoding": "chunked"}) + b"3\r\nabc\r\n")
    await until(lambda: b"abc" in connection.sent)
    connection.send(b"no length\r\n")
    clock.pass_s(2 * connection.protocol.limits.linger_s)
    await until(lambda: heard == ["http.disconnect"])
    assert b"400" not in connection.sent


@played()
async def test_when_the_time_to_drain_is_over_what_is_being_answered_is_the_last(
    house: House, workshop: Workshop
) -> None:
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"ab"})

    house._app, clock = slow, Clock()
    connection = house.connect(clock)
    connection.send(head("/a", method="GET") * 2 + b"GET /b HT")
    await until(lambda: house.entered == 1)
    connection.protocol.shutdown()
    go_on.set()
    await until(lambda: connection.sent.endswith(b"ab"))
    await until(lambda: connection.has_ended)
    clock.pass_s(2 * connection.protocol.limits.linger_s)
    assert connection.is_closing()
    assert (house.entered, len(connection.replies)) == (1, 1)


@pytest.mark.parametrize("path", ["/v2/models/nobody/infer", "/nothing"])
@played()
async def test_the_rest_of_a_body_that_has_its_answer_gets_no_other(
    house: House, workshop: Workshop, path: str
) -> None:
    connection = house.connect()
    connection.send(head(path, {"Transfer-Encoding": "chunked"}) + b"5\r\nabcde\r\n")
    await until(lambda: len(connection.replies) == 1)
    await asyncio.sleep(0)
    connection.send(b"no length\r\n")
    assert len(connection.replies) == 1
    assert connection.has_ended, "it is heard out, and closed"
    connection.leave()


@played()
async def test_a_body_that_breaks_is_refused_once_and_its_client_heard_out(house: House, workshop: Workshop) -> None:
    clock = Clock()
    connection = house.connect(clock)
    connection.send(BROKEN_BODY)
    assert [reply.status for reply in connection.replies] == [400]
    await until(lambda: house.core.open_calls == 0)
    assert connection.has_ended
    assert not connection.is_closing(), "what its client still sends is taken"
    connection.send(bytes(1 << 20))
    clock.pass_s(2 * connection.protocol.limits.linger_s)
    assert connection.is_closing()
    assert [reply.status for reply in connection.replies] == [400]
