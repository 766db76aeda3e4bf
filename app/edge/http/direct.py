"""A call to a hot route on a connection of our own: from the parser to the route and back, without ASGI between.

ASGI costs a task, a scope, a body that is copied twice and an answer in two writes, which is more than the inference of
a small request. Here the body goes from the parser into its slot as it comes, the route's coroutine begins in the very
turn in which the body is whole, and goes on when what it waits for has come.

What a route does, and what is counted and logged, is the same as with ASGI, which any other server may use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from convoy.app.core import Core
from convoy.app.edge.entry import SHUT_DOWN, Entry
from convoy.app.edge.http.body import LOOK_AGAIN_S, BodyReader
from convoy.app.edge.http.compression import is_long_enough, reply_encoding
from convoy.app.edge.http.gate import Visit
from convoy.app.edge.http.hot_route import HotRoute, HttpHead, parsed_query
from convoy.app.edge.http.hot_routes import HotRoutes
from convoy.app.edge.http.infer import HEADER_LENGTH, InferRoute
from convoy.app.edge.http.known_requests import Known, id_in, is_plain
from convoy.app.edge.http.replies import Reply, answer_head, error_reply, lines_of
from convoy.app.edge.oip.call import Call, ClientGone, Terms
from convoy.app.edge.options import EdgeOptions
from convoy.app.host.logs import request_id
from convoy.app.lifecycle.catalog import Served
from convoy.app.outcomes import CANCELLED, FAILED, CallEnd
from convoy.models.errors import RequestError, Unavailable

_LONGEST_TARGET_BYTES = 512  # that is worth remembering
_MOST_FIELDS = 16
_LONGEST_HEAD_BYTES = 4096
_MOST_DIGITS = 18
_GATHERED_BYTES = 64 << 10
_CONTENT_LENGTH = b"content-length"
# What CORS says of an answer to a request that comes from no page; those that do take the other way.
_ORIGIN, _VARY = b"origin", (b"vary", b"Origin")
# Requests with one of these are parsed each time.
_UNUSUAL = frozenset((b"content-encoding", b"transfer-encoding", b"expect", b"x-request-id", b"traceparent"))


class Connection(Protocol):
    """What a call asks of the connection that it came by: `GuardedProtocol`, most of it by what uvicorn keeps."""

    url: bytes
    headers: list[tuple[bytes, bytes]]
    expect_100_continue: bool
    client: tuple[str, int] | None
    transport: Any
    config: Any
    loop: asyncio.AbstractEventLoop

    def has_unread_bytes(self) -> bool: ...

    def goes_on_with(self, call: DirectCall) -> None: ...

    def hang_up(self) -> None: ...

    def on_response_complete(self) -> None: ...


class Found(NamedTuple):
    """Where a request's target leads: the route, the names in its path, the path, and what is asked behind it."""

    route: HotRoute
    names: dict[str, str]
    path: str
    query: Mapping[str, str]


class Repetition(NamedTuple):
    """A whole request as it came in one piece; one that differs in its id and its tensors alone need not be parsed.

    `before` and `after` are all else, from the method to the end of the JSON, around an id of `id_bytes`. It holds for
    one `edition` of the catalog and of the options, on the connection that sent it, between two requests.
    """

    before: bytes
    after: bytes
    id_bytes: int
    nbytes: int
    body_at: int
    edition: tuple[int, int]
    key_name: str
    found: Found
    served: Served
    known: Known
    terms: Terms
    head: HttpHead
    lines: list[tuple[bytes, bytes]]

    def repeated(self, data: bytes) -> Known | None:
        """What is known of these bytes; None where they differ in more."""
        id_at = len(self.before)
        id_end = id_at + self.id_bytes
        if len(data) != self.nbytes or not data.startswith(self.before) or not data.startswith(self.after, id_end):
            return None
        if not self.id_bytes:
            return self.known
        own_id = data[id_at:id_end]
        return self.known.with_id(own_id) if is_plain(own_id) else None


class RepeatedHead(NamedTuple):
    """The head of a request that came in one piece: one that differs in its body and the length of it is not parsed.

    `before` and `after` are all of it, around the digits of the Content-Length.
    """

    before: bytes
    after: bytes
    options_edition: int
    found: Found
    head: HttpHead
    lines: list[tuple[bytes, bytes]]

    def repeated(self, data: bytes) -> DeclaredBody | None:
        """Where the body lies in these bytes, which end with it; None where they differ in more."""
        digits_at = len(self.before)
        digits_end = data.find(b"\r", digits_at, digits_at + _MOST_DIGITS + 1)
        if digits_end < 0:  # compiled, a slice of bytes whose end lies before its start is an error
            return None
        digits = data[digits_at:digits_end]
        if not digits.isdigit():
            return None
        body_at = digits_end + len(self.after)
        if len(data) - body_at != int(digits) or not data.startswith(self.before):
            return None
        return DeclaredBody(digits, body_at) if data.startswith(self.after, digits_end) else None


class DeclaredBody:
    """How long a body is by its request, and where it begins."""

    __slots__ = ("at", "digits")

    def __init__(self, digits: bytes, at: int) -> None:
        self.digits, self.at = digits, at


Memory = Repetition | RepeatedHead


class DirectWay:
    """The way from our connections to the hot routes."""

    def __init__(self, routes: HotRoutes, core: Core, options: EdgeOptions) -> None:
        self.core, self.entry, self.options, self._routes = core, Entry(options), options, routes
        self._find = lru_cache(1024)(self._found)
        self._due: list[DirectCall] = []

    @property
    def _edition(self) -> tuple[int, int]:
        """Another one whenever something else is found than before, or something else holds."""
        return self.core.catalog.edition, self.options.edition

    def find(self, target: bytes) -> Found | None:
        """Where the target leads; None where that is not for here."""
        return self._find(target) if len(target) <= _LONGEST_TARGET_BYTES else None

    def _found(self, target: bytes) -> Found | None:
        path, _, query = target.partition(b"?")
        if not path.isascii() or b"%" in path or b"#" in target:  # the framework knows how to read them
            return None
        if query.count(b"&") >= _MOST_FIELDS:  # they take far more memory than their bytes
            return None
        found = self._routes.find(path.decode())
        return None if found is None else Found(*found, path.decode(), parsed_query(query))

    def send_soon(self, call: DirectCall) -> None:
        """Send its answer in a moment, with what else is ready in this turn of the event loop.

        To wake a process that sleeps costs whoever writes to it more than the write, in a virtual machine most of all.
        Of answers that are made and written in turns each finds the client asleep again; written together they do not.
        Measured with PNGs at 16 and 64 connections: 1.2 times the rate for 0.86 of the CPU.
        """
        self._due.append(call)
        if len(self._due) == 1:
            call.loop.call_soon(self.send_due)

    def send_due(self) -> None:
        """Send all that `send_soon` was told."""
        due, self._due = self._due, []
        for call in due:
            call.send_due()

    def leaves_to_asgi(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """A request of a page's, where pages of other origins may ask: Starlette has the rules for its answer."""
        return bool(self.options.cors_origins) and any(name == _ORIGIN for name, _ in headers)

    def repeat(self, connection: Connection, memory: Memory, data: bytes) -> bool:
        """Answer these bytes, or begin to, if they need not be parsed; else False, and nothing has happened."""
        if isinstance(memory, RepeatedHead):
            body = memory.repeated(data)
            if body is None or self.options.edition != memory.options_edition:
                return False
            headers = {**memory.head.headers, _CONTENT_LENGTH: body.digits}
            head = HttpHead(headers, memory.head.query)
            call = DirectCall(self, connection, memory.found, head, memory.lines)
            connection.goes_on_with(call)
            call.begin_whole(memory, data[body.at :])
            return True
        known = memory.repeated(data)
        if known is None or self._edition != memory.edition:
            return False
        call = DirectCall(self, connection, memory.found, memory.head, memory.lines)
        connection.goes_on_with(call)
        call.repeat(memory, known, data)
        return True

    def remember(self, call: DirectCall, data: bytes) -> Memory | None:
        """For requests like this one, which is all of `data`; None where that may not be, or is not worth it."""
        body_at = data.find(b"\r\n\r\n") + 4
        if not _UNUSUAL.isdisjoint(call.head.headers) or len(data) - body_at != call.body_bytes:
            return None
        if isinstance(call.found.route, InferRoute):
            return self._repetition(call, call.found.route, data, body_at)
        return _repeated_head(call, data[:body_at], self.options.edition)

    def _repetition(self, call: DirectCall, route: InferRoute, data: bytes, body_at: int) -> Repetition | None:
        head, served = call.head, call.served
        if served is None or head.query:
            return None
        length = head.headers.get(HEADER_LENGTH, b"")
        if not length.isdigit() or len(length) > 4:
            return None
        header = data[body_at : body_at + int(length)]
        known = route.known.find(served.key, header, len(data) - body_at)
        if known is None or known.answer is None:
            return None
        longest_bytes = len(known.answer) + known.room_bytes + len(header)
        if b"accept-encoding" in head.headers and is_long_enough(longest_bytes):
            return None
        id_at, id_end = (body_at + at for at in id_in(header))
        before, after, edition = data[:id_at], data[id_end : body_at + len(header)], self._edition
        return Repetition(
            *(before, after, id_end - id_at, len(data), body_at, edition, call.key_name),
            call.found,
            served,
            known,
            route.terms_of(known, served),
            head,
            call.lines,
        )


def _repeated_head(call: DirectCall, data: bytes, edition: int) -> RepeatedHead | None:
    name_at = data.lower().find(b"\r\n" + _CONTENT_LENGTH + b": ")
    digits_at = name_at + len(_CONTENT_LENGTH) + 4
    digits_end = data.find(b"\r", digits_at)
    if name_at < 0 or len(data) > _LONGEST_HEAD_BYTES or not data[digits_at:digits_end].isdigit():
        return None
    return RepeatedHead(data[:digits_at], data[digits_end:], edition, call.found, call.head, call.lines)


class _Heard:
    """In the place of the event that uvicorn's cycle wakes its application with."""

    def set(self) -> None:
        pass


class DirectCall:
    """One request on its way. Stands where uvicorn has its cycle, for whoever asks a connection how far it is."""

    message_event: ClassVar = _Heard()

    def __init__(
        self, way: DirectWay, connection: Connection, found: Found, head: HttpHead, lines: list[tuple[bytes, bytes]]
    ) -> None:
        """`lines` are its headers as they came, one of a name after the other."""
        self._way, self._connection, self.found, self.head, self.lines = way, connection, found, head, lines
        self._due: tuple[bytes, CallEnd] | None = None
        self._visit = Visit(way.entry, way.core, self.head.headers)
        self._call = Call(way.core, found.route.protocol)
        found.route.trace(self._call, found.path, head, found.names)
        if self._call.span is not None:
            self._visit.follow(self._call.span)
        self._cors = bool(way.options.cors_origins)
        self._reader: BodyReader | None = None
        self._answering: _Steps | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._awaits_since_s = 0.0
        self._is_dear = self._has_ended = self.response_complete = self.disconnected = False
        self.keep_alive = self.more_body = True
        self.memory: Memory | None = None  # for the next request of the connection

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._connection.loop

    @property
    def served(self) -> Served | None:
        return self._call.served

    @property
    def key_name(self) -> str:
        return self._visit.key_name

    @property
    def body_bytes(self) -> int:
        """Of the body, so far."""
        return 0 if self._reader is None else self._reader.filled_bytes

    @property
    def awaited_bytes(self) -> int:
        """So many are still the body's for sure."""
        return 0 if self._reader is None else self._reader.awaited_bytes

    def repeat(self, repetition: Repetition, known: Known, data: bytes) -> None:
        """All of it has come, and is understood already."""
        self.more_body, self.memory = False, repetition
        self._visit.key_name = repetition.key_name
        try:
            self._call.begin()
            self._call.hold(repetition.served)
            route = self.found.route
            assert isinstance(route, InferRoute)
            body = memoryview(data)[repetition.body_at :]
            route.repeat(self._call, known, repetition.terms, body, self._answered, self._failed)
        except Exception as error:
            self._failed(error)

    def begin_whole(self, memory: RepeatedHead, body: bytes) -> None:
        """All of it has come, and its head is understood already."""
        self.more_body, self.memory = False, memory
        self.begin()
        self.feed(body)
        self.complete(memory)

    def begin(self) -> None:
        """The headers have come: let the call in, or answer at once that it is not."""
        try:
            self._visit.check_key(self.found.path, self.head.headers)
            self._reader = self.found.route.begin(self._call, self.head, self.found.names)
        except Exception as error:
            self._failed(error)
            return
        if self._connection.expect_100_continue:
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def feed(self, piece: bytes) -> None:
        """A piece of the body. What comes behind an answer is thrown away."""
        if self._reader is None:
            return
        try:
            self._reader.feed(piece)
        except Exception as error:
            self._failed(error)

    def wait(self) -> None:
        """The body is not whole, and nothing more of it is here: from now on its time is bounded."""
        if self.more_body and self._reader is not None and self._timer is None:
            self._awaits_since_s = self._connection.loop.time()
            self._timer = self._connection.loop.call_later(self._reader.patience_s, self._look)

    def complete(self, memory: Memory | None) -> None:
        """The body is whole; `memory` is for the next request of the connection."""
        if self._reader is None:
            return
        self.more_body, self.memory = False, memory
        self._stop_timer()
        route, call, head, body = self.found.route, self._call, self.head, self._reader.body()
        self._is_dear = True
        try:
            is_plain = b"content-encoding" not in head.headers
            if is_plain and route.answer_soon(call, head, body, self._answered_soon, self._failed):
                return
        except Exception as error:
            self._failed(error)
        else:
            self._await(route.reply(call, head, body))

    def _await(self, reply: Coroutine[Any, None, Reply]) -> None:
        self._answering = _Steps(reply, self._answered, self._failed)
        self._answering.step()

    def _answered_soon(self, reply: Reply) -> None:
        """It has its answer, which may be long."""
        encoding = reply_encoding(self.head.headers, reply)
        if encoding is None:
            self._answered(reply)
        else:
            self._await(self.found.route.compressed(reply, encoding))

    def client_left(self) -> None:
        """Nobody reads the answer."""
        self.disconnected = True
        if self._answering is None:
            self._failed(ClientGone())
        else:
            self._call.client_left()

    def give_up(self) -> None:
        """The time to answer what was accepted is over."""
        self.keep_alive = False
        if self._due is not None:
            self.send_due()
        elif self._answering is None:
            self._failed(asyncio.CancelledError())
        else:
            self._answering.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._reader is None:
            return
        left_s = self._awaits_since_s + self._reader.patience_s - self._connection.loop.time()
        if left_s <= 0 and self._connection.has_unread_bytes():  # after a time in which the process stood still
            left_s = LOOK_AGAIN_S
        if left_s > 0:
            self._timer = self._connection.loop.call_later(left_s, self._look)
        else:
            self._failed(self._reader.too_slow())

    def _answered(self, reply: Reply) -> None:
        if self.disconnected or self.response_complete:
            self._end(reply.ending)
            return
        answer = self._whole(reply)
        self._due = answer, reply.ending
        # Repetitions follow so close on each other that their clients are awake. Alone it would wait for nobody, and
        # large ones are not to be in memory together.
        if self._is_dear and self._way.core.open_calls > 1 and len(answer) <= _GATHERED_BYTES:
            self._way.send_soon(self)
        else:
            self.send_due()

    def send_due(self) -> None:
        """Send the answer that is ready, unless it has been, or the client has left."""
        if self._due is None:
            return
        answer, ending = self._due
        self._due = None
        if self.disconnected:
            self._failed(ClientGone())
            return
        try:
            self._write(answer)
        except Exception as error:
            self._failed(error)
        else:
            self._end(ending)

    def _failed(self, error: BaseException) -> None:
        """However else it ends: refused, left by its client, given up, or by a bug."""
        ending = CANCELLED
        try:
            if isinstance(error, RequestError):
                reply = error_reply(error)
                ending = reply.ending
                self._send(reply)
            elif isinstance(error, asyncio.CancelledError):
                self._send(error_reply(Unavailable(SHUT_DOWN)))
            elif not isinstance(error, ClientGone):
                ending = FAILED
                with self._log_lines():
                    self._send(self._visit.failed(self._name, error))
        finally:  # whatever becomes of the answer, or it would be open for ever
            self._end(ending)

    def _send(self, reply: Reply) -> None:
        if not self.response_complete and not self.disconnected:
            self._write(self._whole(reply))

    def _whole(self, reply: Reply) -> bytes:
        """The answer as it goes over the wire; `keep_alive` becomes False where that says so."""
        headers = [*reply.headers, *self._visit.headers(reply.status)]
        if self._cors:
            headers.insert(0, _VARY)
        if headers[-1][0] == b"connection":
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append((b"connection", b"close"))
        return b"".join((answer_head(reply), *lines_of(headers), b"\r\n", *reply.pieces))

    def _write(self, answer: bytes) -> None:
        self.response_complete = True
        self._connection.transport.write(answer)
        if not self.keep_alive:
            self._connection.hang_up()

    def _end(self, ending: CallEnd) -> None:
        """Count the call: it has its answer, or nobody waits for one."""
        try:
            self._call.end(ending)
        except Exception as error:  # else the parser would call the client's next request malformed
            if ending is not FAILED:
                self._visit.failed(self._name, error)
        self._leave()

    def _leave(self) -> None:
        if self._has_ended:
            return
        self._has_ended = self.response_complete = True
        self._stop_timer()
        self._reader = self._answering = None
        if self._visit.wants_line():
            with self._log_lines():
                self._visit.log(_client(self._connection, self.lines), self._name, self._call)
        if not self.disconnected:
            self._connection.on_response_complete()

    @property
    def _name(self) -> str:
        return f"POST {self.found.path}"

    @contextmanager
    def _log_lines(self) -> Iterator[None]:
        """Whatever is logged meanwhile is about this request."""
        token = request_id.set(self._visit.own_id.decode())
        yield
        request_id.reset(token)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Steps:
    """Runs a coroutine without a task: its first step at once, each other one when what it waits for has come."""

    __slots__ = ("_coroutine", "_on_error", "_on_result", "_waits_for")

    def __init__(
        self,
        coroutine: Coroutine[Any, None, Reply],
        on_result: Callable[[Reply], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._coroutine, self._on_result, self._on_error = coroutine, on_result, on_error
        self._waits_for: asyncio.Future[Any] | None = None

    def step(self, _: object = None) -> None:
        self._waits_for = None
        try:
            future = self._coroutine.send(None)
        except StopIteration as end:
            self._finish(end.value)
        except BaseException as error:
            self._on_error(error)
            error.__traceback__ = None  # its frames hold the future that holds it, and an upload
        else:
            # What a task does with a future that its coroutine awaits.
            future._asyncio_future_blocking = False
            self._waits_for = future
            future.add_done_callback(self.step)

    def cancel(self) -> None:
        """What it waits for is cancelled, as a task's would be."""
        if self._waits_for is not None:
            self._waits_for.cancel()

    def _finish(self, reply: Reply) -> None:
        try:
            self._on_result(reply)
        except Exception as error:  # else the client would wait for ever
            self._on_error(error)


def _client(connection: Connection, headers: list[tuple[bytes, bytes]]) -> str:
    """Who asked: as uvicorn has it for ASGI, which believes what a proxy on this machine says."""
    host, _ = connection.client or ("-", 0)
    given = [value for name, value in headers if name == b"x-forwarded-for"]
    middleware = connection.config.loaded_app
    if not given or not isinstance(middleware, ProxyHeadersMiddleware) or host not in middleware.trusted_hosts:
        return host
    forwarded, _ = middleware.trusted_hosts.get_trusted_client_address(b", ".join(given).decode("latin-1"))
    return forwarded or host
