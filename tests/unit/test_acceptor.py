"""Connections that come together."""

from __future__ import annotations

import asyncio
import socket

from convoy.app.server.acceptor import Acceptor, ConnectionLimits

CLIENTS = 100


def test_those_who_connect_together_do_not_wait_for_a_turn_of_the_loop_each() -> None:
    async def scenario() -> int:
        """In how many turns all of them have a connection."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=CLIENTS)
        connected = [socket.create_connection(listener.getsockname()) for _ in range(CLIENTS)]
        made: list[asyncio.Protocol] = []

        def make() -> asyncio.Protocol:
            made.append(asyncio.Protocol())
            return made[-1]

        acceptor = Acceptor(listener, make, ConnectionLimits(max_connections=4), tls=lambda: None)
        turns = 0
        while len(made) < CLIENTS:
            await asyncio.sleep(0)
            turns += 1
        acceptor.close()
        for one in connected:
            one.close()
        return turns

    assert asyncio.run(scenario()) < 10
