"""What every gRPC call passes on the way in and out; the counterpart of `http/gate.py`.

In: request id, API key, room for the message, parsing. Out: request id, a status with a message for every error, the
access log. Messages are parsed here, because the library answers messages that it cannot parse with an internal error.
For the library every method takes a stream: it reads messages of streams only on request, but reads everything that
clients of unary methods send. On the wire both look the same.

The library's context must not be used after its call has ended: its C object is freed then, and the process would
crash. So the facts about a call are read when it begins, and handlers never see the context.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from convoy.app.calls.access import ASKS, TRAILER, AccessLog, report_message
from convoy.app.calls.call import Call
from convoy.app.grpc.room import MessageRoom, Turn
from convoy.app.lifecycle.load_watch import CoreLoad
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS
from convoy.app.server.logs import request_id
from convoy.app.telemetry.outcomes import Refusal
from convoy.app.telemetry.tracing import RequestSpan
from convoy.models.errors import InvalidRequest, Overloaded, RequestError

_errors = logging.getLogger("convoy")
# Health checks need no key: probes have none. The admin token is a key to the other two methods only.
_NO_KEY_NEEDED = frozenset({"ServerLive", "ServerReady", "ModelReady"})
_ADMIN = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})


@dataclass(slots=True)
class GrpcCall:
    """The facts about one call. `client` is its address; `deadline_ns` is on the clock of `time.monotonic_ns`.

    `inference` is what a unary method asks for, and `span` that request's span, if it is sampled.
    """

    method: str
    metadata: dict[str, bytes]
    id: bytes
    client: str
    turn: Turn
    deadline_ns: int | None = None
    status: str = "OK"
    code: str = ""
    key_name: str = ""
    inference: Call | None = None
    span: RequestSpan | None = None
    started_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def trace(self) -> bytes | None:
        """The `traceparent` of its span, or the client's."""
        return self.metadata.get("traceparent") if self.span is None else self.span.traceparent.encode()

    def timeout_ms(self, since_ns: int) -> float | None:
        """The time that was left until the client's deadline at `at_ns`, or None."""
        if self.deadline_ns is None:
            return None
        return max(0.001, (self.deadline_ns - since_ns) / MILLISECOND_NS)

    @property
    def is_late(self) -> bool:
        """Whether the client's deadline has passed, so that this is why the call is cancelled now."""
        if self.deadline_ns is None:
            return False
        # Clients round their deadline up by a millisecond or a hundredth, and leave at their own. Here it counts from
        # the arrival of the call, which may be some milliseconds later.
        early_ns = 5 * MILLISECOND_NS + (self.deadline_ns - self.started_ns) // 100
        return time.monotonic_ns() >= self.deadline_ns - early_ns


Unary = Callable[[Any, GrpcCall], Awaitable[Message]]
# Returns the next message as bytes. For a unary method it raises if none comes, otherwise it returns None at the end.
# Raises Unauthorized if the call's key was removed meanwhile.
Read = Callable[[], Awaitable[bytes]]
ReadOn = Callable[[], Awaitable[bytes | None]]
# Handles a unary call, bytes to bytes. It may end its turn before it answers.
RawUnary = Callable[[Read, GrpcCall], Awaitable[bytes]]
# Handles a stream with an asynchronous generator, which the gate closes when the call ends.
Stream = Callable[[ReadOn, GrpcCall], AsyncGenerator[bytes]]
_Metadata = tuple[tuple[str, str | bytes], ...]
_Serve = Callable[[GrpcCall, Any], Awaitable[bytes | None]]


class GrpcGate:
    """Wraps every method of the service. At most `max_calls` run at once; `on_turned_away` gets each call above that.

    The library could enforce that limit, but would not report the calls that it refuses.
    """

    def __init__(
        self,
        access_log: AccessLog,
        room: MessageRoom,
        max_calls: int,
        on_turned_away: Callable[[GrpcCall, RequestError], None],
        current_load: Callable[[], CoreLoad],
        begin_span: Callable[[GrpcCall], RequestSpan | None] = lambda call: None,
    ) -> None:
        self._current_load, self._begin_span = current_load, begin_span
        self._access_log, self._room = access_log, room
        self._max_calls, self._on_turned_away = max_calls, on_turned_away
        self._open_calls = 0

    @property
    def is_full(self) -> bool:
        return self._open_calls >= self._max_calls

    def unary(self, method: str, message: type[Message], handle: Unary) -> Any:
        """The library's handler for a unary method."""

        async def raw(read: Read, call: GrpcCall) -> bytes:
            try:
                asked = parse(message, await read())
            except RequestError as error:
                self._on_turned_away(call, error)
                raise
            call.turn.end()
            reply = await handle(asked, call)
            return bytes(reply.SerializeToString())

        return self.raw_unary(method, raw)

    def raw_unary(self, method: str, handle: RawUnary) -> Any:
        """The library's handler for a unary method that reads and writes bytes."""

        async def serve(call: GrpcCall, context: Any) -> bytes:
            self._open(call)
            return await handle(partial(call.turn.read, context), call)

        return grpc.stream_unary_rpc_method_handler(self._guarded(method, serve))

    def stream(self, method: str, handle: Stream) -> Any:
        """The library's handler for a bidirectional stream."""

        # Not a generator: when a call is cancelled, the library drops a generator without closing it, and its cleanup
        # would run at some later time.
        async def serve(call: GrpcCall, context: Any) -> None:
            async def read() -> bytes | None:
                data = await context.read()
                if not isinstance(data, bytes):
                    return None
                self._check_key(call)  # a stream may outlive its key
                return data

            self._open(call)
            async with aclosing(handle(read, call)) as replies:
                async for reply in replies:
                    with _until_the_client_leaves():
                        await context.write(reply)

        return grpc.stream_stream_rpc_method_handler(self._guarded(method, serve))

    def refusal(self, method: str) -> Any:
        """The library's handler for calls above the limit: it reads no message."""

        async def serve(call: GrpcCall, _: Any) -> None:
            self._check(call, is_full=True)

        return grpc.stream_stream_rpc_method_handler(self._guarded(method, serve))

    def _guarded(self, method: str, serve: _Serve) -> Any:
        async def guarded(messages: Any, context: Any) -> bytes | None:
            call = self._enter(method, context)
            try:
                try:
                    return await serve(call, context)
                except (asyncio.CancelledError, GeneratorExit):
                    # Otherwise cancelled by the client, or because the process ends.
                    call.status = "DEADLINE_EXCEEDED" if call.is_late else "CANCELLED"
                    raise
                except BaseException as error:
                    told = self._told(call, error)
                abort = context.abort(*told)
                # The library keeps what abort raises, and that keeps this frame; with the context it would be a
                # reference cycle.
                del messages, context
                with _until_the_client_leaves():
                    await abort
                raise AssertionError("abort always raises")
            finally:
                call.turn.end()
                self._log(call)

        return guarded

    def _enter(self, method: str, context: Any) -> GrpcCall:
        pairs = context.invocation_metadata() or ()
        metadata = {name: value if isinstance(value, bytes) else value.encode() for name, value in pairs}
        own_id = self._access_log.request_id(metadata.get("x-request-id"))
        request_id.set(own_id.decode())
        deadline_ns = _deadline_ns(context.time_remaining())
        peer = context.peer()
        call = GrpcCall(method, metadata, own_id, _address(peer), Turn(self._room, peer), deadline_ns)
        call.span = self._begin_span(call)
        context.set_trailing_metadata(self._trailer(call))
        return call

    def _open(self, call: GrpcCall) -> None:
        """Count the call as running until its answer is sent. Raises Unauthorized and Overloaded."""
        self._check(call, is_full=self.is_full)
        self._open_calls += 1
        task = asyncio.current_task()
        assert task is not None  # the library's task, which also sends the answer
        task.add_done_callback(self._close)

    def _close(self, _: object) -> None:
        self._open_calls -= 1

    def _check(self, call: GrpcCall, *, is_full: bool) -> None:
        try:
            self._check_key(call)
            if is_full:
                words = f"the limit of {self._max_calls} open calls is reached; retry later"
                raise Overloaded(words, reason=Refusal.CALLS, retry_after_s=1.0)
        except RequestError as error:
            self._on_turned_away(call, error)
            raise

    def _check_key(self, call: GrpcCall) -> None:
        keys, given = self._access_log.keys, call.metadata.get("authorization")
        call.key_name = keys.check(
            given,
            is_open=lambda: call.method in _NO_KEY_NEEDED,
            takes_admin_token=lambda: call.method in _ADMIN,
        )

    def _told(self, call: GrpcCall, error: BaseException) -> tuple[Any, str, _Metadata]:
        """The status, message and trailing metadata of an error."""
        if isinstance(error, RequestError):
            call.status, words, retry_after_s = error.grpc_code, str(error), error.retry_after_s
            call.code = error.code
        else:
            _errors.error("%s failed; this is a bug", call.method, exc_info=error)
            call.status, retry_after_s, call.code = "INTERNAL", None, RequestError.code
            words = f"internal error; the log has it under request {call.id.decode()}"
        trailer = (*self._trailer(call), ("error-code", call.code))
        if retry_after_s is not None:
            # The second is gRPC's own key (gRFC A6), which clients with a retry policy follow.
            pushback_ms = max(1, math.ceil(retry_after_s * 1000))
            trailer += (
                ("retry-after", str(max(1, math.ceil(retry_after_s)))),
                ("grpc-retry-pushback-ms", str(pushback_ms)),
            )
        # An error may contain the client's bytes, and metadata has a limit of 8 KiB.
        return getattr(grpc.StatusCode, call.status), words[:2000], trailer

    def _trailer(self, call: GrpcCall) -> _Metadata:
        trailer: _Metadata = (("x-request-id", call.id.decode()),)
        if (trace := call.trace) is not None:
            trailer += (("traceparent", trace.decode("ascii", "replace")),)
        if call.span is not None and call.span.tracestate:
            trailer += (("tracestate", call.span.tracestate),)
        if ASKS in call.metadata:
            trailer += ((TRAILER, report_message(self._current_load())),)
        return trailer

    def _log(self, call: GrpcCall) -> None:
        took_ms = (time.monotonic_ns() - call.started_ns) / 1e6
        # Removed, because the library may keep the call, and with it what it holds.
        inference, call.inference = call.inference, None
        self._access_log.log(
            call.client,
            f"gRPC {call.method}",
            call.status,
            took_ms,
            is_error=call.status != "OK",
            trace=call.trace,
            key_name=call.key_name,
            code=call.code,
            facts=None if inference is None else inference.facts,
        )


def parse(message: type[Message], data: bytes) -> Any:
    """Parse a message. Raises InvalidRequest."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            f"the request is not a valid {message.DESCRIPTOR.name}; use the client stubs of the protocol"
        ) from error


@contextmanager
def _until_the_client_leaves() -> Iterator[None]:
    """Raise CancelledError if the client has left, which the library notices only as it sends."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def _deadline_ns(remaining_s: float | None) -> int | None:
    """The deadline on our clock. Without one, the library returns some centuries or nothing, by version."""
    if remaining_s is None or remaining_s > 1e6:
        return None
    return time.monotonic_ns() + int(remaining_s * SECOND_NS)


def _address(peer: str) -> str:
    """The host without scheme and port, as in the other log lines."""
    return peer.partition(":")[2].rpartition(":")[0].removeprefix("%5B").removesuffix("%5D") or peer
