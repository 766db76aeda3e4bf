"""Connections that come together, at one process and at one of several."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from convoy.app.host.acceptor import Acceptor, Handshakes

PLAIN = Handshakes(lambda: None, within_s=10.0, end_within_s=10.0, most=4)


def turns_until_taken(clients: int, patience_s: Callable[[int], float], wanted: int) -> tuple[int, int]:
    """In how many turns of the loop so many of the clients have a connection, and how many were told of then."""

    async def scenario() -> tuple[int, int]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=clients)
        connected = [socket.create_connection(listener.getsockname()) for _ in range(clients)]
        made: list[asyncio.Protocol] = []
        opening: list[int] = []

        def make() -> asyncio.Protocol:
            made.append(asyncio.Protocol())
            return made[-1]

        acceptor = Acceptor(listener, make, PLAIN, lambda: patience_s(len(opening)), opening.append)
        turns = 0
        while len(made) < wanted:
            await asyncio.sleep(0)
            turns += 1
        acceptor.close()
        for one in connected:
            one.close()
        return turns, len(opening)

    return asyncio.run(scenario())


def test_those_who_connect_together_do_not_wait_for_a_turn_of_the_loop_each() -> None:
    turns, _ = turns_until_taken(100, lambda taken: 0.0, wanted=100)
    assert turns < 10


def test_a_process_that_has_more_than_another_leaves_it_the_rest() -> None:
    _, taken = turns_until_taken(10, lambda taken: 0.0 if taken < 3 else 60.0, wanted=3)
    assert taken == 3
