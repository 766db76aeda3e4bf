"""What a call leaves behind: nothing that only the garbage collector could take away.

It stops everything while it looks, for longer the more there is, and what it has to look through are the requests.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.fake_devices import Workshop
from tests.support.wire import head
from tests.unit.test_connection import ROWS, Connection, House, held, play, rows

CALLS = 20

Ask = Callable[[Connection], Awaitable[object]]


async def short(connection: Connection) -> None:
    assert (await connection.ask(rows(1.0))).status == 200


async def usual(connection: Connection) -> None:
    document = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
    request = head(ROWS, {"Content-Length": str(len(document))}) + document
    assert (await connection.ask(request)).status == 200


async def unknown(connection: Connection) -> None:
    assert (await connection.ask(rows(1.0, path="/v2/models/nobody/infer"))).status == 404


async def late(connection: Connection) -> None:
    assert (await connection.ask(rows(1.0, path=f"{ROWS}?timeout_ms=1"))).status in (429, 504)


async def garbage_of(ask: Ask, connection: Connection) -> int:
    """How many objects the collector finds after some calls, of those that have been made since then."""
    gc.disable()
    gc.freeze()  # or it would look through all that the tests before have loaded
    try:
        for _ in range(CALLS):
            await ask(connection)
        return gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize("ask", [short, usual, unknown, late])
def test_a_call_leaves_nothing_to_the_garbage_collector(tmp_path: Path, ask: Ask) -> None:
    async def scene(house: House, workshop: Workshop) -> None:
        connection = await house.used()
        if ask is late:
            held(workshop)
            connection.send(rows(0.0))
            connection = house.connect()
        for _ in range(3):  # what is kept for the next one has been kept by then
            await ask(connection)
        gc.collect()
        # What threads of earlier tests leave when they end is not the calls', and comes once.
        assert min([await garbage_of(ask, connection) for _ in range(3)]) < CALLS

    play(Workshop(tmp_path), scene)
