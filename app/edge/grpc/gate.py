"""What every gRPC call passes, on the way in and on the way out; the twin of `gate` for HTTP.

In: a request id, the API key, the bytes as a message. Out: the id, a status with words for every error, the
access log. Messages are parsed here and not by the library, which answers bytes that it cannot parse with
an internal error.

The library's context must not be touched after its call has ended: its C object is gone then, and the process with
it. So what is known of a call is read when it begins, and whoever handles it never sees the context.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message

from convoy.app.edge.entry import KEY_IS_WRONG, Entry
from convoy.app.host.logs import request_id
from convoy.app.scheduling.request import MILLISECOND_NS, SECOND_NS
from convoy.models.errors import InvalidRequest, RequestError, Unauthorized

_errors = logging.getLogger("convoy")
# A client's own bytes may stand in an error, and metadata has a limit of 8 KiB.
_MOST_DETAILS = 2000
# Probes come from machines that have no key; the admin token is a key to the other two, and to nothing else.
_NO_KEY_NEEDED = frozenset({"ServerLive", "ServerReady", "ModelReady"})
_ADMIN = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})


@dataclass(slots=True)
class GrpcCall:
    """One call as far as it is known. `client` is its address, `deadline_ns` on the clock of `time.monotonic_ns`."""

    method: str
    metadata: dict[str, bytes]
    id: bytes
    client: str
    deadline_ns: int | None = None
    status: str = "OK"
    started_ns: int = field(default_factory=time.monotonic_ns)

    def timeout_ms(self) -> float | None:
        """What is left of the client's deadline; None where it has none."""
        if self.deadline_ns is None:
            return None
        return max(0.001, (self.deadline_ns - time.monotonic_ns()) / MILLISECOND_NS)


Unary = Callable[[Any, GrpcCall], Awaitable[Message]]
# An asynchronous generator: the gate closes it when its call ends.
Stream = Callable[[AsyncIterator[bytes], GrpcCall], AsyncGenerator[Message]]


class GrpcGate:
    """Wraps every method of the service."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def unary(self, method: str, message: type[Message], handle: Unary) -> Any:
        """The library's handler for a method with one request and one response."""

        async def guarded(data: bytes, context: Any) -> bytes:
            call = self._enter(method, context)
            try:
                self._check_key(call)
                reply: bytes = (await handle(parse(message, data), call)).SerializeToString()
                return reply
            except BaseException as error:
                await self._fail(call, context, error)
            finally:
                self._log(call)

        return grpc.unary_unary_rpc_method_handler(guarded)

    def stream(self, method: str, handle: Stream) -> Any:
        """The library's handler for a method with a stream of each."""

        # Not a generator: of a call that is cancelled the library forgets one as it stands, and what it has to end
        # would end at some later time.
        async def guarded(messages: AsyncIterator[bytes], context: Any) -> None:
            call = self._enter(method, context)
            try:
                self._check_key(call)
                async with aclosing(handle(messages, call)) as replies:
                    async for reply in replies:
                        with _until_the_client_leaves():
                            await context.write(reply.SerializeToString())
            except BaseException as error:
                await self._fail(call, context, error)
            finally:
                self._log(call)

        return grpc.stream_stream_rpc_method_handler(guarded)

    def _enter(self, method: str, context: Any) -> GrpcCall:
        metadata = {name: _as_bytes(value) for name, value in context.invocation_metadata() or ()}
        own_id = self._entry.request_id(metadata.get("x-request-id"))
        request_id.set(own_id.decode())
        call = GrpcCall(method, metadata, own_id, _address(context.peer()), _deadline_ns(context.time_remaining()))
        context.set_trailing_metadata(_trailer(call))
        return call

    def _check_key(self, call: GrpcCall) -> None:
        keys, given = self._entry.keys, call.metadata.get("authorization")
        if keys.is_key(given) or call.method in _NO_KEY_NEEDED:
            return
        if not (keys.is_admin_token(given) and call.method in _ADMIN):
            raise Unauthorized(KEY_IS_WRONG)

    async def _fail(self, call: GrpcCall, context: Any, error: BaseException) -> NoReturn:
        """End the call with the error's status. Raises, as the library wants it."""
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            call.status = "CANCELLED"  # by the client, by its deadline, or by the end of the process
            raise error
        if isinstance(error, RequestError):
            call.status, words, retry_after_s = error.grpc_code, str(error), error.retry_after_s
        else:
            _errors.error("%s failed; this is a bug", call.method, exc_info=error)
            call.status, retry_after_s = "INTERNAL", None
            words = f"internal error; the log has it under request {call.id.decode()}"
        trailer = _trailer(call)
        if retry_after_s is not None:
            trailer += (("retry-after", str(max(1, math.ceil(retry_after_s)))),)
        with _until_the_client_leaves():
            await context.abort(getattr(grpc.StatusCode, call.status), words[:_MOST_DETAILS], trailer)
        raise AssertionError("abort always raises")

    def _log(self, call: GrpcCall) -> None:
        took_ms = (time.monotonic_ns() - call.started_ns) / 1e6
        trace = call.metadata.get("traceparent")
        line = f"gRPC {call.method}"
        self._entry.log(call.client, line, call.status, took_ms, is_error=call.status != "OK", trace=trace)


def parse(message: type[Message], data: bytes) -> Any:
    """The bytes as a message. Raises InvalidRequest."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the request is not a {message.DESCRIPTOR.name}; use the protocol's own stubs") from error


@contextmanager
def _until_the_client_leaves() -> Iterator[None]:
    """Raises CancelledError where it has left, which the library learns as it sends, before it tells."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def _trailer(call: GrpcCall) -> tuple[tuple[str, str], ...]:
    own: tuple[tuple[str, str], ...] = (("x-request-id", call.id.decode()),)
    trace = call.metadata.get("traceparent")
    return own if trace is None else (*own, ("traceparent", trace.decode("ascii", "replace")))


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _deadline_ns(remaining_s: float | None) -> int | None:
    """Without a deadline the library says some centuries, or nothing, by version."""
    if remaining_s is None or remaining_s > 1e6:
        return None
    return time.monotonic_ns() + int(remaining_s * SECOND_NS)


def _address(peer: str) -> str:
    """The host alone, as in the other log lines: `ipv4:127.0.0.1:34512` without kind and port."""
    return peer.partition(":")[2].rpartition(":")[0].removeprefix("%5B").removesuffix("%5D") or peer
