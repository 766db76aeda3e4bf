"""One HTTP/1.1 connection: bytes out, one answer back, nothing more.

Knows asyncio's transport and the parser. Knows nothing of pools, statistics or what an answer means.

Why not a client library: httpx spends 0.5 to 1 ms of CPU on a request, aiohttp a fifth of that; a generator
that is slower than the server measures itself. The parser is httptools (llhttp, the one uvicorn uses), the
requests are bytes made before the run, and no task or future exists per request.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from convoy.loadtest.problems import Fault, Problem

MAX_ANSWER_BYTES = 256 * 1024 * 1024
IDLE = -1

NOT_HTTP = Problem(Fault.GARBAGE, "the server sent something that is not an HTTP answer")
TOO_LARGE = Problem(Fault.GARBAGE, f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
CUT_OFF = Problem(Fault.GARBAGE, "the connection ended in the middle of an answer")
CLOSED = Problem(Fault.RESET, "the server closed the connection without an answer")
RESET = Problem(Fault.RESET, "the server reset the connection")


class Owner(Protocol):
    """Who is told what happens on a connection. Each ticket ends in exactly one of answered and broke."""

    def opened(self, connection: ClientConnection) -> None: ...

    def answered(self, connection: ClientConnection, ticket: int, status: int, body: bytes, reusable: bool) -> None: ...

    def broke(self, connection: ClientConnection, ticket: int, problem: Problem) -> None:
        """The connection is gone; `ticket` is IDLE if nothing was asked."""


class ClientConnection(asyncio.Protocol):
    """At most one request at a time (no pipelining: clients do not, and it would hide queueing)."""

    __slots__ = ("_body", "_body_bytes", "_gone", "_owner", "_parser", "_started", "_transport", "since_ns", "ticket")

    _transport: asyncio.Transport

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser = HttpResponseParser(self)
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._started = False
        self._gone = False
        self.ticket = IDLE
        self.since_ns = 0

    def send(self, request: bytes, ticket: int, since_ns: int) -> None:
        """The connection must be idle. `since_ns`: from when on the request's time-out counts."""
        self.ticket = ticket
        self.since_ns = since_ns
        self._transport.write(request)

    @property
    def usable(self) -> bool:
        return not self._gone and not self._transport.is_closing()

    def give_up(self, problem: Problem) -> None:
        """Ends the connection now; whatever was asked on it ends with `problem`."""
        if self._gone:
            return
        self._gone = True
        self._transport.abort()
        self._owner.broke(self, self.ticket, problem)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast and no check: uvloop's transports do everything that asyncio.Transport does but are none.
        self._transport = cast(asyncio.Transport, transport)
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._gone:
            return
        if self.ticket == IDLE:
            self.give_up(NOT_HTTP)  # an answer to nothing
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self.give_up(NOT_HTTP)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._gone:
            return
        self._gone = True
        cut_off = CUT_OFF if self._started else CLOSED
        self._owner.broke(self, self.ticket, cut_off if exc is None else RESET)

    # httptools

    def on_message_begin(self) -> None:
        self._started = True

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes <= MAX_ANSWER_BYTES:
            self._body.append(body)
        else:
            self.give_up(TOO_LARGE)

    def on_message_complete(self) -> None:
        if self._gone or self.ticket == IDLE:
            return
        ticket, self.ticket = self.ticket, IDLE
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._body_bytes = 0
        self._started = False
        reusable = self._parser.should_keep_alive()
        if not reusable:
            self._gone = True
            self._transport.close()
        self._owner.answered(self, ticket, self._parser.get_status_code(), body, reusable)
