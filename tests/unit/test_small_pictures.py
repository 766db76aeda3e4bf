"""Small pictures, which are decoded at once, however their calls end.

The fake model gives its input back with a number added, so a picture's class is the brightest of its four pixels.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from convoy.app.engines.batch import EngineFailure
from convoy.models.spec import ImageSpec
from tests.support.fake_devices import Workshop, until
from tests.support.wire import head
from tests.unit.test_connection import Connection, House, held, play, running
from tests.unit.test_garbage import CALLS, garbage_of

FOUR_PIXELS = ImageSpec(2, 2, 1, "exact", 2, "nearest", False, (0.0,), (1.0,), "float32_nchw")
PATH = "/predictions/rows"
# More than are decoded ahead of the fake engine: whoever was not forgotten would keep the last of them waiting.
MANY = 40


def picture(brightest: int, side: int = 2) -> bytes:
    pixels = np.zeros((side, side), np.uint8)
    pixels[brightest // 2 * (side - 1), brightest % 2 * (side - 1)] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


# Too large for the event loop.
LARGE = picture(3, side=100)


def asks(body: bytes, query: str = "", **headers: str) -> bytes:
    return head(PATH + query, {"Content-Length": str(len(body)), **headers}) + body


def best_of(reply: Any) -> int:
    assert reply.status == 200, reply
    best: int = reply.json()["predictions"][0]["class_id"]
    return best


@pytest.fixture
def pictures(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path, image=FOUR_PIXELS, labels=("a", "b", "c", "d"))


def test_each_is_told_its_own_class(pictures: Workshop) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connections = [house.connect() for _ in range(8)]
        for turn in range(3):
            for number, connection in enumerate(connections):
                connection.send(asks(picture((number + turn) % 4)))
            for number, connection in enumerate(connections):
                (reply,) = await connection.reply()
                assert best_of(reply) == (number + turn) % 4
                assert reply.json()["timing_ms"]["decode_wait"] == 0

    play(pictures, scene)


async def its_client_leaves(house: House, workshop: Workshop) -> None:
    connection = house.connect()
    before = house.core.open_calls
    connection.send(asks(picture(1)))
    await until(lambda: house.core.open_calls > before)
    connection.leave()
    await until(lambda: house.core.open_calls == before)


async def it_is_late(house: House, workshop: Workshop) -> None:
    assert (await house.connect().ask(asks(picture(1), "?timeout_ms=3"))).status in (429, 504)


async def it_is_broken(house: House, workshop: Workshop) -> None:
    assert (await house.connect().ask(asks(picture(1)[:-28]))).status == 400


async def the_engine_fails(house: House, workshop: Workshop) -> None:
    (engine,) = workshop.engines
    engine.failure, engine.gate = EngineFailure("of itself"), None
    assert (await house.connect().ask(asks(picture(1)))).status == 500
    engine.failure = None


End = Callable[[House, Workshop], Awaitable[None]]


@pytest.mark.parametrize("end", [its_client_leaves, it_is_late, it_is_broken, the_engine_fails])
def test_however_many_end_so_the_next_one_is_decoded_at_once(pictures: Workshop, end: End) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection = house.connect()
        assert best_of(await connection.ask(asks(picture(1)))) == 1
        gate = held(workshop)
        for _ in range(MANY):
            await end(house, workshop)
        gate.set()
        await until(lambda: house.core.scheduler.unfinished == 0)
        reply = await connection.ask(asks(picture(3)))
        assert best_of(reply) == 3
        assert reply.json()["timing_ms"]["decode_wait"] == 0

    play(pictures, scene)


def test_a_bug_in_one_answer_is_its_own(pictures: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        gate = held(workshop)
        connections = [house.connect() for _ in range(6)]
        await running(workshop, connections[0], asks(picture(0)))
        for number, connection in enumerate(connections[1:]):
            connection.send(asks(picture(number % 4)))
        write = connections[2].write

        def breaks(data: Any) -> None:
            monkeypatch.setattr(connections[2], "write", write)
            raise ZeroDivisionError("nobody foresaw this")

        monkeypatch.setattr(connections[2], "write", breaks)
        gate.set()
        for number, connection in enumerate(connections[1:]):
            if number != 1:
                (reply,) = await connection.reply()
                assert best_of(reply) == number % 4

    play(pictures, scene)


@pytest.mark.parametrize("body", [picture(1), LARGE], ids=["here", "by-a-thread"])
def test_those_that_fail_leave_nothing_to_the_garbage_collector(pictures: Workshop, body: bytes) -> None:
    async def fails(connection: Connection) -> None:
        assert (await connection.ask(asks(body))).status == 500

    async def scene(house: House, workshop: Workshop) -> None:
        (engine,) = workshop.engines
        engine.failure = EngineFailure("of itself")
        connection = house.connect()
        for _ in range(3):
            await fails(connection)
        assert min([await garbage_of(fails, connection) for _ in range(3)]) < CALLS

    play(pictures, scene)
