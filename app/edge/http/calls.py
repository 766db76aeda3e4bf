"""What the two hot routes share: finding the model, reading the body, counting how it ended."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from convoy.app.edge.decode_pool import DecodePool
from convoy.app.edge.entry import outcome_of
from convoy.app.edge.http.body import Body, declared_length, read_body, too_large
from convoy.app.edge.http.compression import compress, inflate, is_worthwhile, request_encoding, response_encoding
from convoy.app.edge.http.direct import DirectLine, direct_line
from convoy.app.edge.http.replies import Reply, error_reply, headers_of, send_reply
from convoy.app.edge.oip.exchange import ClientGone, Exchange
from convoy.app.edge.oip.lookup import find_served
from convoy.app.edge.options import BodyLimits, EdgeOptions
from convoy.app.submission.inference import InferenceCore, ServedLike
from convoy.models.errors import InvalidRequest, RequestError


@dataclass(slots=True)
class Call:
    """One HTTP call to a hot route, as far as it is known."""

    scope: Scope
    headers: dict[bytes, bytes]
    receive: Receive
    exchange: Exchange
    line: DirectLine | None
    served: ServedLike | None = None
    edition: int = -1  # of the catalog in which it was found

    def query(self) -> dict[str, list[str]]:
        raw: bytes = self.scope["query_string"]
        return parse_qs(raw.decode("latin-1"), keep_blank_values=True) if raw else {}


class HotRoute(ABC):
    """A bare ASGI endpoint. Subclasses turn a body into a reply; everything around that is here."""

    protocol: ClassVar[str]

    def __init__(self, core: InferenceCore, options: EdgeOptions, pool: DecodePool) -> None:
        self.core, self.options, self.pool = core, options, pool

    @abstractmethod
    async def answer(self, call: Call, served: ServedLike, body: Body) -> Reply:
        """The reply to a body that has been read. Raises RequestError or ClientGone."""

    def admit(self, served: ServedLike) -> None:  # noqa: B027 - most routes take every model
        """Refuse a model that this route cannot serve, before the body is read. Raises RequestError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self.core)
        call = Call(scope, dict(scope["headers"]), receive, exchange, direct_line(scope))
        outcome = "cancelled"
        try:
            reply = await self._reply(call)
            outcome = "success" if reply.status < 400 else outcome_of(reply.status)
            encode_ns = time.monotonic_ns()
            await _send(call, reply, send)
            if call.served is not None:
                self.core.stage_took(call.served.key, "encode", time.monotonic_ns() - encode_ns)
        except ClientGone:
            pass  # nobody to answer; counted as cancelled
        except RequestError as error:
            outcome = outcome_of(error.http_status)
            await _send(call, error_reply(error), send)
        finally:
            exchange.close()
            key = None if call.served is None else call.served.key
            self.core.call_ended(key, self.protocol, outcome, time.monotonic_ns() - exchange.arrival_ns)

    async def _reply(self, call: Call) -> Reply:
        call.exchange.begin()
        path = call.scope["path_params"]
        call.served = served = find_served(self.core.catalog, path["model"], path.get("version"))
        call.edition = self.core.catalog.edition
        call.exchange.hold(served)
        self.admit(served)
        encoding = request_encoding(call.headers)
        declared = declared_length(call.headers, self.options.body)
        body = _arrived_body(call, self.options.body)
        if body is None:
            is_here = call.line.has_unread_bytes if call.line is not None else lambda: False
            body = await read_body(call.receive, call.exchange, declared, self.options.body, is_here)
        _watch_client(call)
        if encoding is not None:
            body = await inflate(body, encoding, call.exchange, self.pool, self.options.body)
        reply = await self.answer(call, served, body)
        accepted = call.headers.get(b"accept-encoding")
        return reply if accepted is None else await self._compressed(reply, accepted)

    async def _compressed(self, reply: Reply, accepted: bytes) -> Reply:
        encoding = response_encoding(accepted)
        if encoding is None or not is_worthwhile(reply):
            return reply
        return await self.pool.run_anyway(compress, reply, encoding)

    def timeout_ms(self, call: Call) -> float | None:
        """The client's time from the query, else the default; None: no limit. Raises InvalidRequest."""
        values = call.query().get("timeout_ms")
        if values is None:
            return self.options.default_timeout_ms or None
        try:
            timeout_ms = float(values[-1])
        except ValueError:
            timeout_ms = -1.0
        if not 0 < timeout_ms < 1e9:
            raise InvalidRequest(f"timeout_ms must be a number of milliseconds above 0, got {values[-1][:40]!r}")
        return timeout_ms


def _arrived_body(call: Call, limits: BodyLimits) -> Body | None:
    """The body in the slab, if all of it is there already; nobody has to wait for a small one."""
    arrived = call.line.whole_body() if call.line is not None else None
    if arrived is None:
        return None
    if len(arrived) > limits.max_bytes:
        raise too_large(len(arrived), limits)
    slot = call.exchange.reserve(len(arrived))
    slot.view[:] = arrived
    return Body(slot, len(arrived))


def _watch_client(call: Call) -> None:
    """From now on a client that leaves ends the wait for its answers."""
    if call.line is None:
        call.exchange.watch_client(_until_client_leaves(call.receive))
    else:
        call.line.on_client_gone = call.exchange.client_left
        if call.line.client_is_gone:
            call.exchange.client_left()


async def _send(call: Call, reply: Reply, send: Send) -> None:
    if call.line is None or not call.line.reply(reply.status, headers_of(reply), reply.pieces):
        await send_reply(send, reply)


async def _until_client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
