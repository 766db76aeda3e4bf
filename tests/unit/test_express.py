"""The short way past ASGI: who may take it, that nobody can tell, and what becomes of those who are on it.

A core, the gate and the infer route over fake engines, and connections whose other end is the test.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from convoy.app.batch import BatchResult, EngineFailure
from convoy.app.edge.decode_pool import DecodePool
from convoy.app.edge.http.connection import ConnectionLimits, GuardedProtocol, guarded_protocol
from convoy.app.edge.http.express import Express
from convoy.app.edge.http.gate import Gate
from convoy.app.edge.http.hot_routes import Shortcut, hot_routes
from convoy.app.edge.http.replies import Reply, send_reply
from convoy.app.edge.options import BodyLimits, EdgeOptions
from convoy.app.engines.base import Part
from convoy.app.host.logs import request_id
from convoy.app.scheduling.request import Request
from convoy.models.errors import Overloaded
from convoy.models.tensors import TensorBytes
from tests.support.fake_devices import MAX_BATCH, ROW, Workshop, in_workshop, until
from tests.support.wire import WireReply, chunk, head, read_reply

OPTIONS = EdgeOptions(BodyLimits(1 << 20), decode_threads=1, access_log="all")
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


class Connection(asyncio.Transport):
    """A connection of which the test is the client. What the server has written is in `sent`."""

    def __init__(self, make: Callable[[], GuardedProtocol]) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_read = True
        self._is_closing = False
        self.protocol = make()
        self.protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        self.protocol.data_received(data)

    @property
    def replies(self) -> list[WireReply]:
        """All that came so far; they must be whole."""
        file, found = io.BytesIO(self.sent), []
        while file.tell() < len(self.sent):
            found.append(read_reply(file))
        return found

    async def reply(self, count: int = 1) -> list[WireReply]:
        """So many answers, which are taken away."""
        await until(lambda: len(self.replies) >= count)
        found = self.replies
        assert len(found) == count
        self.sent.clear()
        return found

    async def ask(self, data: bytes) -> WireReply:
        self.send(data)
        (one,) = await self.reply()
        return one

    def leave(self) -> None:
        self.protocol.connection_lost(ConnectionResetError())

    # What the server sees

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 8000), "peername": ("192.0.2.7", 5000)}.get(name, default)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._is_closing:
            self.sent += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


class House:
    """A host of the workshop's core. `usual` counts the requests that went through ASGI."""

    def __init__(self, workshop: Workshop, options: EdgeOptions = OPTIONS) -> None:
        core = self.core = workshop.core
        self.usual = 0
        self.express = Express(core, options)
        self.pool = DecodePool(1, 16)
        routes = hot_routes(core, options, self.pool, self.express)
        self._app = Gate(Shortcut(_elsewhere, routes), core, options)
        self._kind = guarded_protocol(ConnectionLimits(), self.express)
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
        self.usual += 1
        await self._app(scope, receive, send)

    def connect(self, loop: Any = None) -> Connection:
        return Connection(lambda: self._kind(self._config, self.state, {}, _loop=loop or asyncio.get_running_loop()))

    async def taught(self) -> Connection:
        """A connection after the first request of the kind `rows(...)`."""
        connection = self.connect()
        assert shift(await connection.ask(rows(0.0))) == OFFSET
        self.usual = 0
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
        await until(lambda: workshop.core.slab.slots_in_use == 0)
        assert workshop.core.open_calls == 0
        assert [served.users for served in workshop.core.catalog.all_live()] == [0] * len(
            workshop.core.catalog.served()
        )
        house.pool.close()
        for served in workshop.core.catalog.served():
            leaving = workshop.core.lifecycle.take_out_of_service(served.key.model, served.key.version)
            assert leaving is not None
            await leaving

    in_workshop(workshop, scenario)


def held(workshop: Workshop) -> threading.Event:
    """From now on runs wait until the event is set."""
    (engine,) = workshop.engines
    engine.gate = threading.Event()
    return engine.gate


# Who goes there


def test_the_second_request_of_a_kind_takes_the_short_way_and_its_answer_looks_the_same(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = house.connect()
        first = await connection.ask(rows(1.0, id="mine"))
        assert house.usual == 1
        second, third = [await connection.ask(rows(value, id="mine")) for value in (1.0, 2.0)]
        assert house.usual == 1
        assert [shift(reply) for reply in (first, second, third)] == [101.0, 101.0, 102.0]
        assert second.body == first.body
        changing = {"server-timing", "x-request-id"}
        assert {*second.headers} == {*first.headers}
        assert {name for name in first.headers if first.headers[name] != second.headers[name]} <= changing
        assert first.headers["x-request-id"] != second.headers["x-request-id"] != third.headers["x-request-id"]

    play(workshop, scene)


def test_another_connection_may_take_it_too(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        await house.taught()
        assert shift(await house.connect().ask(rows(3.0))) == 103.0
        assert house.usual == 0

    play(workshop, scene)


def test_another_kind_goes_the_usual_way_first(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = await house.taught()
        for number, request in enumerate(
            [rows(1.0, samples=2), rows(1.0, id="another"), rows(1.0, path="/v2/models/rows/versions/1/infer")], 1
        ):
            await connection.ask(request)
            assert house.usual == number
            await connection.ask(request)
            assert house.usual == number

    play(workshop, scene)


def test_requests_that_come_together_are_answered_in_their_order(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = await house.taught()
        connection.send(rows(1.0) + head("/ping", method="GET") + rows(2.0) + rows(3.0, samples=2) + rows(4.0))
        first, second, *others = await connection.reply(5)
        assert (shift(first), second.body) == (101.0, b'"elsewhere"')
        assert [shift(reply, samples) for reply, samples in zip(others, (1, 2, 1), strict=True)] == [102, 103, 104]
        assert house.usual == 4, "only the first found nobody before it"

    play(workshop, scene)


def test_headers_may_come_byte_by_byte(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, request = await house.taught(), rows(5.0)
        body_at = request.index(b"\r\n\r\n") + 4
        for byte in request[: body_at - 1]:
            connection.send(bytes([byte]))
        assert shift(await connection.ask(request[body_at - 1 :])) == 105.0
        assert house.usual == 0

    play(workshop, scene)


@pytest.mark.parametrize("pieces", [2, 3, 50])
def test_a_body_in_pieces_goes_the_usual_way_and_arrives_whole(workshop: Workshop, pieces: int) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, request = await house.taught(), rows(6.0)
        body_at = request.index(b"\r\n\r\n") + 4
        step = -(-(len(request) - body_at) // pieces)
        connection.send(request[: body_at + step])
        for start in range(body_at + step, len(request), step):
            await asyncio.sleep(0)
            connection.send(request[start : start + step])
        (reply,) = await connection.reply()
        assert shift(reply) == 106.0
        assert house.usual == 1
        assert shift(await connection.ask(rows(7.0))) == 107.0
        assert house.usual == 1

    play(workshop, scene)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        pytest.param(lambda good: good.replace(b"HTTP/1.1", b"HTTP/1.0"), 200, id="http-1.0"),
        pytest.param(lambda good: good.replace(b"infer ", b"infer?timeout_ms=30000 "), 200, id="a-time-limit"),
        pytest.param(lambda good: good.replace(b"infer ", b"infer? "), 200, id="an-empty-query"),
        pytest.param(lambda good: good.replace(b"Host: test", b"Expect: 100-continue"), 100, id="expect"),
        pytest.param(lambda good: good.replace(b"Host: test", b"Content-Encoding: gzip"), 400, id="not-gzip"),
        pytest.param(lambda good: good.replace(b"Host: test", b"Content-Encoding: identity"), 200, id="identity"),
        pytest.param(lambda good: good.replace(b"POST", b"PUT"), 200, id="another-verb"),
        pytest.param(lambda _: rows(1.0, headers={LENGTH: "9"}), 400, id="a-wrong-length"),
        pytest.param(lambda _: rows(1.0, headers={LENGTH: "one"}), 400, id="no-length"),
        pytest.param(lambda _: rows(1.0, headers={LENGTH: "99999"}), 400, id="too-long"),
    ],
)
def test_what_is_unusual_is_the_usual_ways_business(
    workshop: Workshop, change: Callable[[bytes], bytes], status: int
) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, good = await house.taught(), rows(1.0)
        assert change(good) != good
        connection.send(change(good))
        await until(lambda: bool(connection.sent))
        assert house.usual == 1
        assert connection.replies[0].status == status

    play(workshop, scene)


def test_a_chunked_body_goes_the_usual_way_and_teaches_all_the_same(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        header, data = parts(8.0)
        chunked = head(ROWS, {LENGTH: str(len(header)), "Transfer-Encoding": "chunked"})
        connection = house.connect()
        for number in (1, 2):
            reply = await connection.ask(chunked + chunk(header) + chunk(data) + chunk(b""))
            assert (shift(reply), house.usual) == (108.0, number)
        assert shift(await connection.ask(rows(9.0))) == 109.0
        assert house.usual == 2

    play(workshop, scene)


@pytest.mark.parametrize(
    "parameters", [{"timeout": 10_000_000}, {"priority": 1}, {"timeout": 9_000_000, "priority": 2}]
)
def test_terms_are_never_taken_from_memory(workshop: Workshop, parameters: dict[str, int]) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = await house.taught()
        for number in (1, 2, 3):
            assert shift(await connection.ask(rows(1.0, parameters=parameters))) == 101.0
            assert house.usual == number

    play(workshop, scene)


def test_where_everybody_has_a_time_limit_there_is_no_short_way(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = house.connect()
        for number in (1, 2, 3):
            assert shift(await connection.ask(rows(1.0))) == 101.0
            assert house.usual == number

    play(workshop, scene, default_timeout_ms=30_000.0)


def test_classes_are_found_every_time(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = house.connect()
        outputs = [{"name": "y", "parameters": {"binary_data": True, "classification": 2}}]
        for number in (1, 2, 3):
            reply = await connection.ask(rows(float(number), outputs=outputs))
            assert (reply.status, house.usual) == (200, number)
            assert f"{100 + number}.".encode() in reply.body

    play(workshop, scene)


# In JSON

JSON_OUT = [{"name": "y", "parameters": {"binary_data": False}}]
BINARY_OUT = [{"name": "y", "parameters": {"binary_data": True}}]


@pytest.mark.parametrize(
    "request_of",
    [
        pytest.param(in_json, id="json-to-json"),
        pytest.param(lambda value: in_json(value, outputs=BINARY_OUT), id="json-to-binary"),
        pytest.param(lambda value: rows(value, outputs=JSON_OUT), id="binary-to-json"),
        pytest.param(lambda value: in_json(value, samples=3, id="mine"), id="several-and-an-id"),
    ],
)
def test_json_takes_the_short_way_and_its_answer_looks_the_same(
    workshop: Workshop, request_of: Callable[[float], bytes]
) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = house.connect()
        first = await connection.ask(request_of(1.5))
        assert house.usual == 1
        second, third = [await connection.ask(request_of(value)) for value in (1.5, -2.5)]
        assert house.usual == 1
        assert (first.status, second.body) == (200, first.body)
        assert third.body != first.body
        assert b"101.5" in first.body or np.float32(101.5).tobytes() in first.body
        assert b"97.5" in third.body or np.float32(97.5).tobytes() in third.body
        assert {*second.headers} == {*first.headers}
        changing = {"server-timing", "x-request-id"}
        assert {name for name in first.headers if first.headers[name] != second.headers[name]} <= changing

    play(workshop, scene)


@pytest.mark.parametrize(
    ("other", "status"),
    [
        pytest.param(in_json("[[1, 2, 3, 4]]"), 200, id="nested"),
        pytest.param(in_json("[1, 2, NaN, 4]"), 200, id="not-a-number"),
        pytest.param(in_json("[1, 2, 3]"), 400, id="too-few"),
        pytest.param(in_json("[1, 2, 3, 4, 5]"), 400, id="too-many"),
        pytest.param(in_json('[1, 2, 3, "4"]'), 400, id="a-text"),
        pytest.param(in_json("[1, 2, 3, 4"), 400, id="no-end"),
        pytest.param(in_json('[1, 2, 3, 4], "data": [1, 2, 3, 4]'), 200, id="twice"),
        pytest.param(in_json(1.0, parameters={"priority": 1}), 200, id="terms"),
        pytest.param(in_json(1.0, headers={"Content-Encoding": "gzip"}), 400, id="not-gzip"),
    ],
)
def test_json_that_says_anything_else_is_read_in_the_usual_way(workshop: Workshop, other: bytes, status: int) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = house.connect()
        await connection.ask(in_json(1.0))
        for number in (2, 3):
            assert (await connection.ask(other)).status == status
            assert house.usual == number
        assert (await connection.ask(in_json(2.0))).status == 200
        assert house.usual == 3

    play(workshop, scene)


def test_an_answer_that_could_be_compressed_is_where_that_is_asked_for(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, gzip = house.connect(), {"Accept-Encoding": "gzip"}
        long = in_json(1.0, samples=MAX_BATCH)
        await connection.ask(long)
        assert "content-encoding" not in (await connection.ask(long)).headers
        assert house.usual == 1
        await connection.ask(in_json(1.0, samples=MAX_BATCH, headers=gzip))
        assert house.usual == 2
        for _ in (1, 2):
            await connection.ask(in_json(1.0, headers=gzip))
        assert house.usual == 3, "a short one never is"

    play(workshop, scene)


def test_known_forms_are_bounded_and_the_newest_stay(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = house.connect()
        for number in range(40):
            await connection.ask(in_json(1.0, id=str(number)))
        assert house.usual == 40
        await connection.ask(in_json(2.0, id="39"))
        assert house.usual == 40
        await connection.ask(in_json(2.0, id="0"))
        assert house.usual == 41

    play(workshop, scene)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_json_comes_the_short_way_says_what_the_usual_would(workshop: Workshop, seed: int) -> None:
    rng = random.Random(seed)
    odd = [
        "1e39",
        "-0",
        "1E5",
        "true",
        "null",
        '"1"',
        "[1]",
        "NaN",
        "1]",
        "01",
        "",
        " 2 ",
        "\n3",
        "-",
        "1e-400",
        "9" * 40,
    ]

    def text() -> str:
        numbers = [repr(rng.uniform(-1e3, 1e3)) for _ in range(ROW)]
        if rng.random() < 0.2:
            numbers[rng.randrange(ROW)] = rng.choice(odd)
        if rng.random() < 0.05:
            numbers = numbers[1:]
        return f"[{', '.join(numbers)}]"

    ids = [{}, {}, {}, {"id": "a"}, {"id": "[1]"}, {"outputs": BINARY_OUT}]
    requests = [in_json(text(), **rng.choice(ids)) for _ in range(60)]

    async def scene(house: House, workshop: Workshop) -> None:
        heard = []
        for knows_forms in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if not knows_forms:
                    patch.setattr(Express, "find", lambda *_: None)
                connection, house.usual = house.connect(), 0
                heard.append([told(await connection.ask(request)) for request in requests])
            assert (house.usual < len(requests)) == knows_forms
        assert heard[0] == heard[1]

    play(workshop, scene)


# Who may not


def test_without_the_key_a_known_kind_gets_nothing(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, key = house.connect(), {"Authorization": "Bearer sesame"}
        assert (await connection.ask(rows(1.0))).status == 401
        for _ in range(2):
            assert shift(await connection.ask(rows(1.0, headers=key))) == 101.0
        assert house.usual == 2
        for headers in ({}, {"Authorization": "Bearer sesame2"}, {"Authorization": "sesame"}):
            assert (await connection.ask(rows(1.0, headers=headers))).status == 401
        assert house.usual == 5

    play(workshop, scene, api_key="sesame")


def test_while_nothing_can_be_written_the_usual_way_waits(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = await house.taught()
        connection.protocol.flow.pause_writing()
        connection.send(rows(1.0) + rows(2.0))
        await until(lambda: house.usual == 1 and house.counted("success") == 1 and not house.core.scheduler.unfinished)
        connection.send(rows(3.0))
        assert not connection.is_read, "what nobody reads must not pile up"
        assert not connection.sent
        connection.protocol.flow.resume_writing()
        assert [shift(reply) for reply in await connection.reply(3)] == [101.0, 102.0, 103.0]
        assert house.usual == 3

    play(workshop, scene)


def test_what_is_known_is_bounded(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection = house.connect()
        for number in range(256 + 4):
            # A client can spell a model's name in many ways, and each is a URL of its own.
            path = ROWS if number >= 256 else ROWS.replace("rows", "%72ows")
            assert shift(await connection.ask(rows(1.0, path=path, id=str(number)))) == 101.0
        assert house.usual == 256 + 4
        assert len(house.express._lessons) == 4
        assert house.express.targets == {ROWS.encode()}

    play(workshop, scene)


# What comes again byte by byte


class Parser:
    """The connection's, which remembers what it was given."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.fed: list[bytes] = []

    def feed_data(self, data: bytes) -> None:
        self.fed.append(data)
        self._parser.feed_data(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


async def repeating(house: House, **more: Any) -> tuple[Connection, Parser]:
    """A connection that has just sent `rows(...)` the short way."""
    connection = await house.taught()
    connection.protocol.parser = parser = Parser(connection.protocol.parser)
    for _ in range(2):  # other words than those of the lesson are learned first
        assert shift(await connection.ask(rows(1.0, **more))) == 101.0
    house.usual, parser.fed = 0, []
    return connection, parser


def test_a_request_that_comes_again_is_not_parsed_again(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, parser = await repeating(house)
        ids = set()
        for value in (2.0, 3.0, 4.0):
            reply = await connection.ask(rows(value))
            assert shift(reply) == value + OFFSET
            ids.add(reply.headers["x-request-id"])
        assert (len(ids), parser.fed, house.usual) == (3, [], 0)

    play(workshop, scene)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: rows(2.0, headers={"Host": "tesT"}), id="another byte in a header"),
        pytest.param(lambda: rows(2.0) + b"\r\n", id="a line more"),
        pytest.param(lambda: b"\r\n" + rows(2.0), id="a line before"),
        pytest.param(lambda: rows(2.0, headers={"X-Request-Id": "mine"}), id="an id"),
    ],
)
def test_what_differs_in_a_byte_is_parsed(workshop: Workshop, other: Callable[[], bytes]) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, parser = await repeating(house)
        assert shift(await connection.ask(other())) == 102.0
        assert parser.fed == [other()]
        # Whatever the connection remembers now, the next ones are understood.
        assert [shift(await connection.ask(rows(value))) for value in (3.0, 4.0, 5.0)] == [103.0, 104.0, 105.0]
        assert house.usual == 0

    play(workshop, scene)


def test_a_length_that_is_the_same_with_other_words_is_parsed(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, parser = await repeating(house, id="a")
        reply = await connection.ask(rows(2.0, id="b"))
        assert (shift(reply), len(parser.fed), house.usual) == (102.0, 1, 1)
        assert json.loads(reply.body[: int(reply.headers[LENGTH.lower()])])["id"] == "b"

    play(workshop, scene)


def test_another_tenants_key_is_asked_for_again(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, good, bad = house.connect(), {"Authorization": "Bearer sesame"}, {"Authorization": "Bearer sesamo"}
        for _ in range(3):
            assert shift(await connection.ask(rows(1.0, headers=good))) == 101.0
        assert (await connection.ask(rows(1.0, headers=bad))).status == 401
        assert shift(await connection.ask(rows(2.0, headers=good))) == 102.0

    play(workshop, scene, api_key="sesame")


def test_a_refusal_does_not_end_the_repetition(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection, parser = await repeating(house)
        gate, others = await busy(house, workshop)
        queue = house.core.scheduler.state.queues[workshop.served().key]
        before, queue.max_waiting = queue.max_waiting, 0
        assert (await connection.ask(rows(1.0))).status == 429
        queue.max_waiting = before
        gate.set()
        for other in others:
            await other.reply()
        assert shift(await connection.ask(rows(2.0))) == 102.0
        assert (parser.fed, house.usual) == ([], 0)

    play(workshop, scene)


def test_what_a_version_meant_is_not_repeated_after_its_end(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection, parser = await repeating(house)
        leaving = workshop.core.lifecycle.take_out_of_service("rows", 1)
        assert leaving is not None
        await leaving
        assert (await connection.ask(rows(1.0))).status == 404
        assert (len(parser.fed), house.usual) == (1, 1)

    play(workshop, scene)


def test_without_room_a_repetition_is_refused_in_the_usual_words(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, _parser = await repeating(house)
        slab = house.core.slab
        taken = slab.reserve(slab.capacity_bytes)
        assert taken is not None
        assert ((await connection.ask(rows(1.0))).status, house.usual) == (429, 1)
        slab.free(taken.ref)
        assert shift(await connection.ask(rows(2.0))) == 102.0

    play(workshop, scene)


def test_a_client_that_leaves_in_a_repetition_is_counted(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection, _parser = await repeating(house)
        gate, others = await busy(house, workshop)
        connection.send(rows(1.0))
        connection.leave()
        await until(lambda: house.counted("cancelled") == 1)
        gate.set()
        for other in others:
            await other.reply()

    play(workshop, scene)


def is_answered(connection: Connection) -> bool:
    """Whether all that was asked has its answer; the last request may be cut off by the server."""
    protocol = connection.protocol
    return connection.is_closing() or (protocol.cycle.response_complete and not protocol.pipeline)


def told(reply: WireReply) -> tuple[object, ...]:
    """What must not depend on how a request came in."""
    own = reply.headers.get("x-request-id", "")
    return reply.status, reply.body, own if own.startswith("own") else None, reply.headers.get("connection")


@pytest.mark.parametrize("seed", range(40))
def test_however_a_conversation_is_cut_it_is_understood_as_the_parser_would(workshop: Workshop, seed: int) -> None:
    """The same bytes in the same pieces, to one house that knows templates and to one that parses everything."""
    rng = random.Random(seed)
    menu: list[Callable[[float], bytes]] = [
        *[rows] * 20,  # mostly the same
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
    pieces: list[tuple[bytes, bool]] = []  # and whether the client waits for its answers before it goes on
    while messages:
        together = b"".join(messages[: (count := rng.choice((1, 1, 1, 1, 1, 1, 2, 3)))])
        del messages[:count]
        at = sorted(rng.randrange(len(together) + 1) for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 2))))
        pieces += [(together[a:b], False) for a, b in pairwise([0, *at])]
        pieces.append((together[at[-1] if at else 0 :], rng.random() < 0.9))

    async def scene(house: House, workshop: Workshop) -> None:
        heard: list[list[tuple[object, ...]]] = []
        parsed: list[int] = []
        for knows_templates in (True, False):
            connection = await house.taught()
            connection.protocol.parser = parser = Parser(connection.protocol.parser)
            with pytest.MonkeyPatch.context() as patch:
                if not knows_templates:
                    patch.setattr(Express, "template", lambda *_: None)
                for piece, is_awaited in pieces:
                    if connection.is_closing():
                        break
                    connection.send(piece)
                    if is_awaited:
                        await until(lambda: is_answered(connection))  # noqa: B023
                await until(lambda: is_answered(connection))  # noqa: B023
            heard.append([told(reply) for reply in connection.replies])
            parsed.append(sum(map(len, parser.fed)))
            connection.leave()
        assert heard[0] == heard[1]
        assert len(heard[0]) > 100
        assert parsed[0] < parsed[1]

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
    connections = [await house.taught() for _ in range(workshop.slots)]
    gate = held(workshop)
    for connection in connections:
        await running(workshop, connection, rows(1.0))
    return gate, connections


@pytest.mark.parametrize("broken", ["next_request_id", "take", "run"])
def test_a_bug_is_a_500_that_the_log_explains(
    workshop: Workshop, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    async def scene(house: House, workshop: Workshop) -> None:
        connection = await house.taught()
        (engine,) = workshop.engines
        run = engine.run

        def run_without_answers(parts: Sequence[Part]) -> BatchResult:
            answers = tuple(
                tuple(TensorBytes((part.samples, ROW), cast(Any, None)) for _ in part.wanted) for part in parts
            )
            return run(parts)._replace(answers=answers)

        with monkeypatch.context() as patch:
            if broken == "run":
                patch.setattr(engine, "run", run_without_answers)
            else:
                patch.setattr(house.core, broken, bug)
            reply = await connection.ask(rows(1.0))
        assert reply.status == 500
        assert reply.error == f"internal error; the log has it under request {reply.headers['x-request-id']}"
        assert "failed; this is a bug" in caplog.text
        assert ("TypeError" if broken == "run" else "nobody foresaw this") in caplog.text
        await until(lambda: house.counted("failed") == 1)
        assert house.core.slab.used_bytes == 0
        assert shift(await connection.ask(rows(2.0))) == 2.0 + OFFSET

    play(workshop, scene)


def test_a_client_that_leaves_while_it_waits_is_not_computed(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        gate, others = await busy(house, workshop)
        batches = len(workshop.engines[0].batches)
        connection = house.connect()
        connection.send(rows(1.0))
        connection.leave()
        await until(lambda: house.counted("cancelled") == 1)
        assert workshop.served().statistics.failures_by_reason["CANCELED"] == 1
        gate.set()
        for other in others:
            await other.reply()
        assert len(workshop.engines[0].batches) == batches
        assert (house.usual, connection.sent) == (0, b"")

    play(workshop, scene)


def test_a_client_that_leaves_while_it_runs_gives_its_memory_back_when_the_engine_is_done(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        gate, (first, second) = await busy(house, workshop)
        slots = house.core.slab.slots_in_use
        first.leave()
        await until(lambda: house.counted("cancelled") == 1)
        assert house.core.slab.slots_in_use == slots
        gate.set()
        assert shift((await second.reply())[0]) == 101.0
        statistics = workshop.served().statistics
        await until(lambda: statistics.success.count == 2 + 2)  # what has run has run
        assert statistics.fail.count == 0
        assert not first.sent

    play(workshop, scene)


def test_a_client_that_leaves_with_requests_in_line_is_noticed(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
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
        assert house.usual == 0, "nobody waits for the others"

    play(workshop, scene)


def test_after_the_time_to_drain_those_who_still_wait_are_told(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        gate, connections = await busy(house, workshop)
        connections.append(house.connect())
        connections[-1].send(rows(2.0) + rows(3.0))
        assert not await house.core.drain(0.0)
        assert house.core.open_calls == 3
        for connection in connections:
            connection.protocol.shutdown()
            (reply,) = connection.replies
            assert (reply.status, reply.headers["connection"], reply.headers["retry-after"]) == (503, "close", "1")
            assert "the server shut down" in reply.error
            assert connection.is_closing()
        assert house.core.open_calls == 0
        await until(lambda: house.counted("cancelled") == 3)
        gate.set()

    play(workshop, scene)


def test_who_asks_while_the_server_leaves_is_answered_and_told_to_go(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        gate, (early, _) = await busy(house, workshop)
        late = house.connect()
        house.core.leaving = True
        late.send(rows(2.0))
        gate.set()
        for connection, value in ((early, 101.0), (late, 102.0)):
            (reply,) = await connection.reply()
            assert (shift(reply), reply.headers["connection"]) == (value, "close")
            assert connection.is_closing()

    play(workshop, scene)


def test_after_a_refused_last_request_nothing_more_is_taken(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        await busy(house, workshop)
        house.core.scheduler.state.queues[workshop.served().key].max_waiting = 0
        connection = house.connect()
        connection.send(rows(1.0, headers={"Connection": "close"}) + rows(2.0) + head("/ping", method="GET"))
        (reply,) = connection.replies
        assert (reply.status, reply.headers["connection"], reply.headers["retry-after"]) == (429, "close", "1")
        await until(lambda: connection.protocol.parser is None)
        assert (house.usual, house.core.open_calls) == (0, 2)
        assert (house.counted("rejected"), house.counted("cancelled")) == (1, 0)

    play(workshop, scene)


def test_a_full_queue_is_refused_in_the_usual_ways_words(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        await busy(house, workshop)
        house.core.scheduler.state.queues[workshop.served().key].max_waiting = 0
        await alike(house, house.connect(), 429)
        assert workshop.served().statistics.failures_by_reason["REJECTED"] == 2
        assert house.counted("rejected") == 2
        assert 'convoy_rejected_total{reason="queue_full"} 2.0' in house.core.metrics.render().decode()

    play(workshop, scene)


def test_a_model_that_fails_is_told_in_the_usual_ways_words(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection, (engine,) = await house.taught(), workshop.engines
        engine.failure = EngineFailure("it is broken")
        reply = await alike(house, connection, 500)
        assert "it is broken" in reply.error
        engine.failure = None
        assert shift(await connection.ask(rows(1.0))) == 101.0
        assert workshop.served().statistics.failures_by_reason["BACKEND"] == 2
        assert house.counted("failed") == 2

    play(workshop, scene)


async def alike(house: House, connection: Connection, status: int) -> WireReply:
    """The answer to a known kind, which must be that of the usual way."""
    short = await connection.ask(rows(1.0))
    assert house.usual == 0
    usual = await connection.ask(rows(1.0, path=f"{ROWS}?"))
    assert house.usual == 1
    assert (short.status, short.body) == (status, usual.body)
    names = {*short.headers} - {"x-request-id"}
    assert {*short.headers} == {*usual.headers}
    assert {name: short.headers[name] for name in names} == {name: usual.headers[name] for name in names}
    return short


def test_without_room_the_usual_way_says_so(workshop: Workshop) -> None:
    async def scene(house: House, _: Workshop) -> None:
        connection, slab = await house.taught(), house.core.slab
        taken = slab.reserve(slab.capacity_bytes)
        assert taken is not None
        reply = await connection.ask(rows(1.0))
        assert (reply.status, house.usual) == (429, 1)
        slab.free(taken.ref)
        assert shift(await connection.ask(rows(1.0))) == 101.0
        assert 'convoy_rejected_total{reason="memory"} 1.0' in house.core.metrics.render().decode()

    play(workshop, scene)


# Versions that come and go


def test_what_was_learned_of_a_version_is_forgotten_with_it(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection = await house.taught()
        leaving = workshop.core.lifecycle.take_out_of_service("rows", 1)
        assert leaving is not None
        await leaving
        reply = await connection.ask(rows(1.0))
        assert (reply.status, house.usual) == (404, 1)

    play(workshop, scene)


def test_a_version_that_leaves_while_it_answers_teaches_nothing(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection, gate = house.connect(), held(workshop)
        await running(workshop, connection, rows(1.0))
        leaving = workshop.core.lifecycle.take_out_of_service("rows", 1)
        assert leaving is not None
        gate.set()
        assert shift((await connection.reply())[0]) == 101.0
        assert (await connection.ask(rows(1.0))).status == 404
        await leaving
        assert (await connection.ask(rows(1.0))).status == 404

    play(workshop, scene)


def test_a_version_that_leaves_waits_for_those_on_the_short_way(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        gate, connections = await busy(house, workshop)
        leaving = workshop.core.lifecycle.take_out_of_service("rows", 1)
        assert leaving is not None
        assert (await house.connect().ask(rows(1.0))).status == 404
        assert not leaving.done()
        gate.set()
        for connection in connections:
            assert shift((await connection.reply())[0]) == 101.0
        await leaving

    play(workshop, scene)


# What is written down


def test_every_request_is_counted_once_whichever_way_it_went(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection = await house.taught()
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
        for stage in ("decode", "queue", "encode"):
            assert read("convoy_stage_duration_seconds_count", {**own, "stage": stage}) == 31
        assert read("nv_inference_request_success", own) == 31
        assert house.state.total_requests == 31

    play(workshop, scene)


def test_the_access_log_is_that_of_the_usual_way(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "convoy.access")

    async def scene(house: House, workshop: Workshop) -> None:
        seen: list[str] = []
        caplog.handler.addFilter(lambda _: bool(seen.append(request_id.get()) or True))
        connection, path = house.connect(), ROWS.replace("rows", "%72ows")
        headers = {"X-Request-Id": "mine", "traceparent": "00-ab-cd-01"}
        proxied = {**headers, "X-Forwarded-For": "198.51.100.9, 127.0.0.1"}
        lines = []
        for _ in range(2):
            for more, peer in ((headers, "192.0.2.7"), (proxied, "192.0.2.7"), (proxied, "127.0.0.1")):
                connection.protocol.client = (peer, 5000)
                await connection.ask(rows(1.0, path=path, headers=more))
                await asyncio.sleep(0)
                (line,) = [record.getMessage() for record in caplog.records]
                lines.append(re.sub(r"[\d.]+ ms", "T ms", line))
                caplog.clear()
        assert house.usual == 1
        assert {*seen} == {"mine"}
        assert lines == [
            f"{client} POST {ROWS} 200 T ms trace 00-ab-cd-01"
            for client in ("192.0.2.7", "192.0.2.7", "198.51.100.9") * 2
        ]

    play(workshop, scene)


def test_slow_requests_and_those_whose_client_left_have_a_line_where_only_errors_have(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "convoy.access")

    async def scene(house: House, workshop: Workshop) -> None:
        gate, (first, second) = await busy(house, workshop)
        first.leave()
        (left,) = [record.getMessage() for record in caplog.records]
        assert f"POST {ROWS} left" in left
        gate.set()
        await second.reply()
        assert len(caplog.records) == 1
        house.express.entry._options = replace(OPTIONS, access_log="errors", slow_request_ms=0.0)
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


def test_an_idle_connection_is_closed_after_its_time_and_not_earlier(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        await house.taught()
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
        assert house.usual == 0

    play(workshop, scene)


def test_who_follows_a_refused_request_is_not_idle(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        await house.taught()
        clock = Clock()
        connection = house.connect(clock)
        gate, take = held(workshop), house.core.take
        refusals = [Overloaded("the queue is full", reason="queue_full", retry_after_s=1.0)]

        def refuse_once(request: Request, on_done: Callable[[Any], None]) -> None:
            if refusals:
                raise refusals.pop()
            take(request, on_done)

        monkeypatch.setattr(house.core, "take", refuse_once)
        connection.send(rows(1.0) + rows(2.0))
        clock.pass_s(10 * connection.protocol.timeout_keep_alive)
        assert not connection.is_closing()
        gate.set()
        refused, answered = await connection.reply(2)
        assert refused.status == 429
        assert shift(answered) == 102.0

    play(workshop, scene)


def test_empty_lines_do_not_hold_an_idle_connection(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        await house.taught()
        clock = Clock()
        connection = house.connect(clock)
        await connection.ask(rows(1.0))
        connection.send(b"\r\n")
        clock.pass_s(1.1 * connection.protocol.timeout_keep_alive)
        assert connection.is_closing()

    play(workshop, scene)


def test_a_trailer_that_never_ends_is_too_long(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection = await house.taught()
        start = head(ROWS, {"Transfer-Encoding": "chunked"})
        connection.send(start + chunk(b"{}") + b"0\r\nX-Trailer: ")
        for _ in range(100):
            if not connection.is_closing():
                connection.send(b"a" * 1024)
        assert connection.is_closing()
        assert connection.replies[0].status == 431

    play(workshop, scene)


def test_a_trailer_is_no_header(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection = await house.taught()
        header, data = parts(1.0)
        start = head(ROWS, {"Transfer-Encoding": "chunked", LENGTH: str(len(header))})
        reply = await connection.ask(start + chunk(header + data) + b"0\r\n" + f"{LENGTH}: 7\r\n\r\n".encode())
        assert shift(reply) == 101.0

    play(workshop, scene)


def test_the_end_of_headers_is_awaited_for_as_long_as_nobody_reads_them(workshop: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        await house.taught()
        clock = Clock()
        connection = house.connect(clock)
        gate = held(workshop)
        await running(workshop, connection, rows(1.0))
        connection.send(rows(2.0) + rows(3.0)[:40])
        clock.pass_s(2 * connection.protocol.limits.header_timeout_s)
        assert not connection.is_closing()
        gate.set()
        first, second = await connection.reply(2)
        assert (shift(first), shift(second)) == (101.0, 102.0)
        clock.pass_s(2 * connection.protocol.limits.header_timeout_s)
        assert connection.is_closing()
        assert connection.replies[0].status == 408

    play(workshop, scene)
