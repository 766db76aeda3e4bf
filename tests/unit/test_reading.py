"""Outputs that come in one turn of the event loop: read together, each for whoever still waits."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from convoy.app.edge.oip.reading import PictureQuestion, Readings

from convoy.app.batch import Answer
from convoy.app.edge.oip.answering import Answering, Wanted
from convoy.app.edge.oip.call import Call
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


class Calls:
    """Calls as far as reading knows them: so many are open in their core, and some have ended."""

    def __init__(self, open_calls: int) -> None:
        self.core, self.open_calls, self.has_ended = self, open_calls, False


def read(readings: Readings, calls: Calls, number: int, wanted: Wanted, found: dict[int, Any]) -> None:
    """An output that says its number, which is to be found."""
    output = cast(list[Answer], [Output((1,), memoryview(np.float32([number]).tobytes()))])
    done = Done(cast(Request, None), Outcome.ANSWERED, tuple(output))
    readings.read(cast(Call, calls), PictureQuestion(SPEC, (1, 1), wanted), done, partial(found.__setitem__, number))


def test_those_of_a_turn_that_want_the_same_are_read_at_once() -> None:
    async def scene() -> None:
        readings, answering, found = Readings(), Counting(), dict[int, Any]()
        several = [Calls(9) for _ in range(5)]
        for number, top_k in enumerate((1, 2, 1, 1, 2)):
            read(readings, several[number], number, Wanted(answering, top_k), found)
        several[2].has_ended = True
        assert answering.at_once == []
        await asyncio.sleep(0)
        assert found == {0: 0.0, 1: 1.0, 3: 3.0, 4: 4.0}
        assert sorted(answering.at_once) == [2, 2]

    asyncio.run(scene())


def test_who_is_alone_waits_for_nobody() -> None:
    async def scene() -> None:
        found: dict[int, Any] = {}
        read(Readings(), Calls(1), 7, Wanted(Counting()), found)
        assert found == {7: 7.0}

    asyncio.run(scene())


@pytest.mark.parametrize("open_calls", [1, 9])
def test_a_bug_in_reading_ends_the_wait_of_all(open_calls: int) -> None:
    async def scene() -> None:
        readings, found = Readings(), dict[int, Any]()
        for number in range(3):
            read(readings, Calls(open_calls), number, Wanted(Counting(), 0), found)
        await asyncio.sleep(0)
        assert [type(one) for one in found.values()] == [ZeroDivisionError] * 3

    asyncio.run(scene())
