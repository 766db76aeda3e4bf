"""Sends HTTP requests over as few connections as needed and records how each one ends.

A request without a free connection waits here in order while a new connection is opened, and its latency includes the
wait. `loops` decides when requests are sent.

It uses no client library: httpx spends 0.5 to 1 ms of CPU per request and aiohttp a fifth of that, and a generator that
is slower than the server measures itself. The parser is httptools (llhttp, as in uvicorn), the requests are bytes made
before the run, and there is no task or future per request.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.problems import Fault, Problem
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.rows import Recorder
from convoy.loadtest.units import NS_PER_S

MAX_ANSWER_BYTES = 256 * 1024 * 1024
IDLE = -1

NOT_HTTP = Problem(Fault.GARBAGE, "the server sent something that is not an HTTP answer")
TOO_LARGE = Problem(Fault.GARBAGE, f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
CUT_OFF = Problem(Fault.GARBAGE, "the connection ended in the middle of an answer")
CLOSED = Problem(Fault.RESET, "the server closed the connection without an answer")
RESET = Problem(Fault.RESET, "the server reset the connection")


class Owner(Protocol):
    """Receives the events of a connection. Each ticket ends in exactly one of answered and broke."""

    def opened(self, connection: ClientConnection) -> None: ...

    def answered(self, connection: ClientConnection, ticket: int, status: int, body: bytes, reusable: bool) -> None: ...

    def broke(self, connection: ClientConnection, ticket: int, problem: Problem) -> None:
        """The connection was lost. `ticket` is IDLE if no request was open."""


class ClientConnection(asyncio.Protocol):
    """One request at a time, without pipelining, which clients do not use and which would hide queueing."""

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
        """Send a request on an idle connection. Its timeout counts from `since_ns`."""
        self.ticket = ticket
        self.since_ns = since_ns
        self._transport.write(request)

    @property
    def usable(self) -> bool:
        return not self._gone and not self._transport.is_closing()

    def give_up(self, problem: Problem) -> None:
        """Close the connection now. An open request ends with `problem`."""
        if self._gone:
            return
        self._gone = True
        self._transport.abort()
        self._owner.broke(self, self.ticket, problem)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because the transports of uvloop are not subclasses of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._gone:
            return
        if self.ticket == IDLE:
            self.give_up(NOT_HTTP)  # a response without a request
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


SWEEP_S = 0.05
# Servers close idle connections (uvicorn after 5 s, some after 2). A request on a connection that is just being closed
# would count as a reset, which client libraries hide.
MAX_IDLE_NS = 1_500_000_000
# A short pause at 50,000 requests/s leaves hundreds waiting; opening a connection for each would cause an outage.
MAX_OPENING = 32

STOPPED = Problem(Fault.NETWORK, "the run was stopped")


class HttpSender:
    """Sends a request per call of `fire`, and calls `on_done(arrived)` when it ends.

    `arrived` is False without an HTTP response. `close` must be called; it ends open requests without recording them.
    """

    def __init__(
        self, endpoint: Endpoint, request_pool: RequestPool, recorder: Recorder, *, connections: int, timeout_s: float
    ) -> None:
        self._endpoint = endpoint
        self._requests = request_pool.requests
        self._check = request_pool.check
        self._recorder = recorder
        self._limit = connections
        self._timeout_s = timeout_s
        self._timeout_ns = int(timeout_s * NS_PER_S)
        self._tls = endpoint.tls_context()
        self._all: set[ClientConnection] = set()
        self._idle: list[ClientConnection] = []
        self._backlog: deque[int] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self._closed = False
        self.on_done: Callable[[bool], None] = lambda arrived: None
        self.in_flight = 0
        self.waited = 0

    async def warm(self, count: int) -> None:
        """Open `count` connections, so that the first requests do not wait. The run reports failed ones."""
        await asyncio.gather(*(self._connect() for _ in range(count)), return_exceptions=True)

    def fire(self, intended_ns: int, now_ns: int) -> None:
        """Send the next request now, or as soon as a connection is free."""
        ticket = self._recorder.begin(intended_ns, now_ns)
        self.in_flight += 1
        connection = self._take_idle(now_ns)
        if connection is not None:
            connection.send(self._request(ticket), ticket, now_ns)
            return
        self._backlog.append(ticket)
        if not self._open_more():
            self.waited += 1

    async def close(self) -> None:
        self._closed = True
        self._sweeper.cancel()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in list(self._all):
            connection.give_up(STOPPED)
        await asyncio.sleep(0)  # lets the transports close their sockets

    # events of a connection

    def opened(self, connection: ClientConnection) -> None:
        self._all.add(connection)
        self._free(connection, time.monotonic_ns())

    def answered(self, connection: ClientConnection, ticket: int, status: int, body: bytes, reusable: bool) -> None:
        now_ns = time.monotonic_ns()
        problem = self._check(ticket, status, body)
        self.in_flight -= 1
        self._recorder.finish(ticket, now_ns, problem)
        if reusable:
            self._free(connection, now_ns)
        else:
            self._all.discard(connection)
            self._open_more()
        self.on_done(True)

    def broke(self, connection: ClientConnection, ticket: int, problem: Problem) -> None:
        self._all.discard(connection)
        if ticket == IDLE:
            if connection in self._idle:
                self._idle.remove(connection)
        else:
            self._fail(ticket, problem)
        self._open_more()

    # inside

    def _request(self, ticket: int) -> bytes:
        return self._requests[ticket % len(self._requests)]

    def _take_idle(self, now_ns: int) -> ClientConnection | None:
        """The connection used last, so that the others become idle and are closed, as in the pools of clients."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now_ns - connection.since_ns < MAX_IDLE_NS:
                return connection
            connection.give_up(STOPPED)
        return None

    def _free(self, connection: ClientConnection, now_ns: int) -> None:
        if self._closed:
            return
        if self._backlog:
            ticket = self._backlog.popleft()
            connection.send(self._request(ticket), ticket, self._recorder.intended_ns(ticket))
        else:
            connection.since_ns = now_ns
            self._idle.append(connection)

    def _fail(self, ticket: int, problem: Problem) -> None:
        if self._closed:
            return
        self.in_flight -= 1
        self._recorder.finish(ticket, time.monotonic_ns(), problem)
        self.on_done(False)

    def _open_more(self) -> bool:
        """Open one connection per waiting request, within the limits. False if all allowed connections exist."""
        while not self._closed and len(self._opening) < min(len(self._backlog), MAX_OPENING):
            if len(self._all) + len(self._opening) >= self._limit:
                return False
            task = self._loop.create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._attempt_over)
        return True

    def _attempt_over(self, task: asyncio.Task[None]) -> None:
        """Open further connections: the server may have closed this one before the attempt ended."""
        self._opening.discard(task)
        self._open_more()

    async def _open(self) -> None:
        problem = await self._connect()
        # Each failed attempt was made for one waiting request, so the oldest fails.
        if problem is not None and self._backlog:
            self._fail(self._backlog.popleft(), problem)

    async def _connect(self) -> Problem | None:
        endpoint = self._endpoint
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._loop.create_connection(
                    lambda: ClientConnection(self),
                    endpoint.address,
                    endpoint.port,
                    ssl=self._tls,
                    server_hostname=endpoint.host if self._tls else None,
                )
        except TimeoutError:
            return Problem(Fault.TIMEOUT, f"no connection within {self._timeout_s:g} s")
        except ConnectionRefusedError:
            return Problem(Fault.REFUSED, "the server does not accept connections any more")
        except OSError as error:
            return Problem(Fault.NETWORK, error.strerror or str(error))
        return None

    def _sweep(self) -> None:
        """Time out old requests. One check per 50 ms is cheaper than a timer per request."""
        before_ns = time.monotonic_ns() - self._timeout_ns
        for connection in [c for c in self._all if c.ticket != IDLE and c.since_ns < before_ns]:
            connection.give_up(Problem(Fault.TIMEOUT, f"no answer within {self._timeout_s:g} s"))
        while self._backlog and self._recorder.intended_ns(self._backlog[0]) < before_ns:
            self._fail(self._backlog.popleft(), Problem(Fault.TIMEOUT, f"no free connection for {self._timeout_s:g} s"))
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
