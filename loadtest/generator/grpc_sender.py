"""Calls ModelInfer over a few gRPC channels and records how each call ends.

Messages are serialised before the run and responses stay bytes, because this work would take time from the run. Each
call is a task, the cheapest way that the library offers. No deadline is sent, because a server may schedule by it; only
the generator applies the timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
from tritonclient.grpc import service_pb2

from convoy.loadtest.answers import FULL_EVERY, FULL_FIRST
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.grpc_channel import channel_options, open_channel
from convoy.loadtest.problems import Fault, Problem, one_line
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.rows import Recorder
from convoy.loadtest.units import NS_PER_S

METHOD = "/inference.GRPCInferenceService/ModelInfer"
SWEEP_S = 0.05
# A connection carries many calls. Several are used, because a server may have one thread per connection.
MOST_CHANNELS = 8


# Messages of the library for errors without a response of the server.
NOBODY_THERE = ("failed to connect", "connection refused", "connect failed")
CUT_OFF = ("socket closed", "connection reset", "goaway", "broken pipe", "connection closed")


class GrpcSender:
    """`loops.Sender` over gRPC."""

    def __init__(
        self, endpoint: Endpoint, request_pool: RequestPool, recorder: Recorder, *, connections: int, timeout_s: float
    ) -> None:
        self._requests = request_pool.requests
        self._metadata = request_pool.metadata
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._timeout_ns = int(timeout_s * NS_PER_S)
        # By default the library puts all channels on one connection.
        options = [*channel_options(endpoint), ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [open_channel(grpc.aio, endpoint, options) for _ in range(min(connections, MOST_CHANNELS))]
        self._methods = [channel.unary_unary(METHOD) for channel in self._channels]
        self._calls: dict[int, asyncio.Task[None]] = {}  # by ticket, the oldest first
        self._loop = asyncio.get_running_loop()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self.on_done: Callable[[bool], None] = lambda arrived: None
        self.in_flight = 0
        self.waited = 0

    async def warm(self, count: int) -> None:
        """Connect every channel. The run reports those that fail."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        except TimeoutError:
            pass

    def fire(self, intended_ns: int, now_ns: int) -> None:
        ticket = self._recorder.begin(intended_ns, now_ns)
        self.in_flight += 1
        self._calls[ticket] = self._loop.create_task(self._call(ticket))

    async def close(self) -> None:
        self._sweeper.cancel()
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for channel in self._channels:
            await channel.close(None)

    async def _call(self, ticket: int) -> None:
        method = self._methods[ticket % len(self._methods)]
        try:
            body = await method(self._requests[ticket % len(self._requests)], metadata=self._metadata)
            problem = check(ticket, body)
        except grpc.aio.AioRpcError as error:
            problem = problem_of(error.code().name, error.details() or "")
        self._end(ticket, problem)

    def _end(self, ticket: int, problem: Problem | None) -> None:
        if self._calls.pop(ticket, None) is None:
            return  # already timed out
        self.in_flight -= 1
        self._recorder.finish(ticket, time.monotonic_ns(), problem)
        self.on_done(problem is None or problem.fault in (Fault.GRPC, Fault.GARBAGE))

    def _sweep(self) -> None:
        """Time out old calls. One check per 50 ms is cheaper than a timer per call."""
        before_ns = time.monotonic_ns() - self._timeout_ns
        late = []
        for ticket in self._calls:
            if self._recorder.intended_ns(ticket) >= before_ns:
                break
            late.append(ticket)
        for ticket in late:
            self._calls[ticket].cancel()
            self._end(ticket, Problem(Fault.TIMEOUT, f"no answer within {self._timeout_s:g} s"))
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)


def check(ticket: int, body: bytes) -> Problem | None:
    """None for a valid response. The first hundred and then every 64th are parsed in full."""
    if not body:
        return Problem(Fault.GARBAGE, "OK without outputs: (empty message)")
    if ticket >= FULL_FIRST and ticket % FULL_EVERY:
        return None
    try:
        answer = service_pb2.ModelInferResponse.FromString(body)
    except Exception as error:  # the DecodeError of the library is not public everywhere
        return Problem(Fault.GARBAGE, f"OK with a message that cannot be read: {one_line(str(error))}")
    return None if answer.outputs else Problem(Fault.GARBAGE, "OK without outputs")


def problem_of(code: str, details: str) -> Problem:
    """The problem of a status other than OK. UNAVAILABLE comes from the server or from the library."""
    words = details.lower()
    if code == "UNAVAILABLE" and any(sign in words for sign in NOBODY_THERE):
        return Problem(Fault.REFUSED, "the server does not accept connections any more")
    if code == "UNAVAILABLE" and any(sign in words for sign in CUT_OFF):
        return Problem(Fault.RESET, "the server closed the connection without an answer")
    return Problem(Fault.GRPC, f"{code}: {one_line(details)}")
