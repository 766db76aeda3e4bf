"""Outputs that come in one turn of the event loop: read together, each for whoever still waits."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from convoy.app.batch import Answer
from convoy.app.edge.oip.answering import Answering, Wanted
from convoy.app.edge.oip.call import Call, Read
from convoy.app.edge.oip.reading import PictureQuestion, Readings
from convoy.app.scheduling.request import Done, Outcome, Request
from convoy.models.geometry import Extent
from convoy.models.spec import ModelSpec, TensorSpec

SPEC = ModelSpec("m", (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),), 4, None, "none", ())


class Output(NamedTuple):
    shape: tuple[int, ...]
    data: memoryview


class Counting(Answering):
    """Says of an output what it is, and remembers how many it read at once."""

    key, is_long = "numbers", False

    def __init__(self) -> None:
        self.at_once: list[int] = []

    def outputs(self, spec: ModelSpec) -> tuple[int, ...]:
        return (0,)

    def read(self, answers: Any, spec: ModelSpec, size: Extent, wanted: Wanted) -> Any:
        return float(np.frombuffer(answers[0].data, np.float32)[0])

    def read_each(self, several: Any, spec: ModelSpec, sizes: Any, wanted: Wanted) -> list[Any]:
        self.at_once.append(len(several))
        if wanted.top_k == 0:
            raise ZeroDivisionError("a bug")
        return super().read_each(several, spec, sizes, wanted)


class Asked:
    """A call as far as reading knows it: its answer comes when the test says so."""

    def __init__(self, open_calls: int) -> None:
        self.core = self
        self.open_calls = open_calls
        self.answers: dict[int, tuple[Read, asyncio.Future[Any]]] = {}

    def run(self, request: Request, read: Read) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.answers[request.id] = read, future
        return future

    def answer(self, number: int) -> None:
        read, future = self.answers[number]
        answers = cast(list[Answer], [Output((1,), memoryview(np.float32([number]).tobytes()))])
        read(Done(cast(Request, None), Outcome.ANSWERED, answers), future)


def ask(readings: Readings, asked: Asked, number: int, wanted: Wanted) -> asyncio.Future[Any]:
    request = cast(Request, NamedTuple("Numbered", [("id", int)])(number))
    return readings.run(cast(Call, asked), request, PictureQuestion(SPEC, (1, 1), wanted))


def test_those_of_a_turn_that_want_the_same_are_read_at_once() -> None:
    async def scene() -> None:
        readings, asked, answering = Readings(), Asked(9), Counting()
        wishes = [Wanted(answering, top_k) for top_k in (1, 2, 1, 1, 2)]
        futures = [ask(readings, asked, number, wanted) for number, wanted in enumerate(wishes)]
        for number in range(4):
            asked.answer(number)
        futures[2].cancel()
        asked.answer(4)
        assert answering.at_once == []
        found = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(found.pop(2), asyncio.CancelledError)
        assert [value for _, value in found] == [0.0, 1.0, 3.0, 4.0]
        assert sorted(answering.at_once) == [2, 2]

    asyncio.run(scene())


def test_who_is_alone_waits_for_nobody() -> None:
    async def scene() -> None:
        readings, asked, answering = Readings(), Asked(1), Counting()
        future = ask(readings, asked, 7, Wanted(answering))
        asked.answer(7)
        assert future.done()
        assert (await future)[1] == 7.0

    asyncio.run(scene())


@pytest.mark.parametrize("open_calls", [1, 9])
def test_a_bug_in_reading_ends_the_wait_of_all(open_calls: int) -> None:
    async def scene() -> None:
        readings, asked, answering = Readings(), Asked(open_calls), Counting()
        futures = [ask(readings, asked, number, Wanted(answering, 0)) for number in range(3)]
        for number in range(3):
            asked.answer(number)
        for _, found in await asyncio.gather(*futures):
            assert isinstance(found, ZeroDivisionError)

    asyncio.run(scene())
