"""A guard around uvicorn's HTTP/1.1 protocol. It guards against:

    - slow headers (408) and long headers or trailers (431); `http.body` handles slow bodies
    - floods of pipelined requests: one read of them waits unparsed, the others stay with their client
    - responses that the client does not read, and endless bodies after an early response
    - upgrades to other protocols, which are ignored (RFC 9110, 7.8), and CONNECT (405)
    - too many connections (503)
    - early errors, such as 413 or 401, that a client which still sends would never read: the close lingers
    - parser errors in plain text: all errors are JSON

A client that closes its side has disconnected. After the process was paused (SIGSTOP), all timers are late; that time
does not count against the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from convoy.app.http.replies import error_reply
from convoy.app.server.acceptor import ConnectionLimits, unread_bytes, unsent_bytes
from convoy.models.errors import (
    HeadersTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    RequestError,
    RequestTimeout,
    Unavailable,
)

_log = logging.getLogger("convoy")
# Data is parsed in pieces, because the parser does not stop at the end of a request. One piece has up to 450 requests.
_PIECE_BYTES = 8 << 10


class _Flow(FlowControl):
    """uvicorn's flow control. It does not resume reading while `ahead` holds bytes that were read and must wait."""

    ahead = b""

    def resume_reading(self) -> None:
        if not self.ahead:
            super().resume_reading()


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    on_too_many: ClassVar[Callable[[], None]]
    cycle: Any  # uvicorn's, whose transport is replaced
    flow: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answering: Any = None
        self._in_headers = True
        self._timers: dict[str, asyncio.TimerHandle] = {}  # the running timers, by name
        self._header_bytes = 0
        self._unparsed_bytes = 0  # since the parser last reported anything but a header
        self._has_hung_up = False  # the last answer is written
        self._read_closed = False  # nothing more is parsed
        self._final_error: RequestError | None = None  # to be sent when all requests before have their answers

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport)
        # The transport for uvicorn's cycle, which closes it as soon as the last response is written.
        self._line = SimpleNamespace(write=transport.write, is_closing=transport.is_closing, close=self.hang_up)
        if len(self.connections) > self.limits.max_connections:
            type(self).on_too_many()
            self._write_error(Unavailable(f"{self.limits.max_connections} connections are open; send it again later"))
            self._close()
        else:
            self._arm_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in [*self._timers]:
            self._stop_timer(name)  # it would keep the connection's memory until it fires
        if self._answering is not None and not self._answering.response_complete:
            # uvicorn notifies only the latest request; with pipelining, an earlier one is being answered.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)
        self._line.close = self.transport.close  # avoid a reference cycle

    def shutdown(self) -> None:
        # The time to drain is over. uvicorn cancels running tasks; requests that wait behind them have none.
        if self.pipeline:
            self.pipeline.clear()
            self.cycle = self._answering  # the connection ends with it
        super().shutdown()
        if self._has_hung_up:
            self._close()

    def data_received(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            if self._read_closed or self.transport.is_closing():
                return
            if self.pipeline or self.flow.ahead:
                # The rest waits until the earlier requests have been answered; nothing more is read meanwhile.
                self.flow.ahead += view[start:]
                self.flow.pause_reading()
                return
            self._feed(view[start : start + _PIECE_BYTES])
        if self._has_hung_up or self._read_closed or self.transport.is_closing():
            return
        if self._in_headers and "header" not in self._timers:
            self._arm_header_timer()
        # The parser reports only complete headers. This bounds an endless header or trailer, and empty lines.
        if self._unparsed_bytes > self.limits.header_bytes:
            self._refuse_headers()

    def _read_on(self) -> None:
        """Parse what was kept, when no request waits before it."""
        if self.transport.is_closing():
            return
        ahead, self.flow.ahead = self.flow.ahead, b""
        self.data_received(ahead)
        self.flow.resume_reading()

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse data, ignoring offers to upgrade the protocol."""
        self._unparsed_bytes += len(data)
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser has read the headers and treats the rest as the other protocol's.
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                if method == b"CONNECT":
                    self._refuse(MethodNotAllowed("this server is not a proxy; send GET or POST", allow="GET, POST"))
                    return
                kept = b"".join([b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"])
                head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, kept)
                data = head + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            except httptools.HttpParserError:
                if self._header_bytes > self.limits.header_bytes:
                    self._refuse_headers()
                else:
                    self._refuse(InvalidRequest("this is not an HTTP/1.1 request; use an HTTP client such as curl"))
                return

    def on_message_begin(self) -> None:
        self._stop_timer("idle")  # only for a message: empty lines are not a request
        super().on_message_begin()
        self._header_bytes = 0
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Also called for the trailers of a chunked body, which nothing else bounds.
        self._count_header(len(name) + len(value) + 4)
        if self._in_headers:  # a trailer must not be taken for a checked header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # parsed again, without the upgrade
        self._unparsed_bytes = 0
        self._in_headers = False
        self._stop_timer("header")
        if not self._has_hung_up:
            self.expect_100_continue &= self.parser.get_http_version() != "1.0"  # uvicorn has no such response
            super().on_headers_complete()
            self.cycle.transport = self._line

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        if not self._has_hung_up:  # otherwise it is read to its end and discarded
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._unparsed_bytes = 0
        super().on_message_complete()
        if self._has_hung_up:
            self._close()
        elif "linger" in self._timers:
            # The rest of a body that had been answered early has arrived; the connection is idle now.
            self._stop_timer("linger")
            self._start_timer("idle", self.timeout_keep_alive, self._close)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            if "write" not in self._timers and self.transport.get_write_buffer_size():
                self._watch_reader()  # it closes when the client has read what is left
            return
        if self._has_hung_up:
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            if not self.pipeline and self.flow.ahead:
                self.loop.call_soon(self._read_on)
            return
        if self.cycle.more_body:
            # A client that still sends does not read yet. uvicorn would discard the rest of the body for ever.
            self._start_linger_timer()
        if self._final_error is not None:
            self._write_error(self._final_error)
            self.hang_up()
        elif not self.cycle.more_body and not self._in_headers:  # these have their own time limits
            self._start_timer("idle", self.timeout_keep_alive, self._close)

    def pause_writing(self) -> None:
        super().pause_writing()
        if "write" not in self._timers:
            self._watch_reader()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._stop_timer("write")
        super().resume_writing()

    def hang_up(self) -> None:
        """Close after the last response was written.

        A client that still sends does not read yet, and loses the response if its bytes are not accepted. So the close
        lingers until the client has closed, has sent its whole request, or has had enough time.
        """
        if self._has_hung_up or self.transport.is_closing():
            return
        self._has_hung_up = True
        is_sending = self._in_headers or (self.cycle is not None and self.cycle.more_body)
        if not (self._read_closed or self.pipeline or (self._is_answered() and is_sending)):
            self.transport.close()
            return
        self.pipeline.clear()
        self.flow.ahead = b""
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has gone, and `connection_lost` follows
                self.transport.write_eof()
        self._start_linger_timer()

    def _start_timer(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` after `seconds`. Replaces a running timer of the same name."""

        def fire() -> None:
            del self._timers[name]
            if name in ("header", "idle") and unread_bytes(self.transport):
                self._start_timer(name, 0.1, callback)  # the client is not silent: the server has not read
            else:
                callback()

        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, fire)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def _count_header(self, nbytes: int) -> None:
        self._header_bytes += nbytes
        if self._header_bytes > self.limits.header_bytes:
            raise httptools.HttpParserError("the headers are too long")  # which stops the parser

    def _arm_header_timer(self) -> None:
        self._start_timer("header", self.limits.header_timeout_s, self._end_slow_headers)

    def _end_slow_headers(self) -> None:
        if self.flow.read_paused or self.pipeline or not self._is_answered():
            # until earlier requests are answered, the server may be the one that does not read
            self._arm_header_timer()
        elif not self._has_hung_up and not self.transport.is_closing():
            seconds = self.limits.header_timeout_s
            self._write_error(RequestTimeout(f"the headers did not arrive within {seconds:g} s; send them faster"))
            self._close()

    def _watch_reader(self) -> None:
        """Check again after the write timeout; a client that reads slowly may continue."""
        unsent, seconds = unsent_bytes(self.transport), self.limits.write_timeout_s

        def look_again() -> None:
            if unsent_bytes(self.transport) < unsent:
                self._watch_reader()
                return
            _log.info("a client did not read its answer for %g s; its connection is closed", seconds)
            self.transport.abort()

        self._start_timer("write", seconds, look_again)

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse_headers(self) -> None:
        most = self.limits.header_bytes
        self._refuse(HeadersTooLarge(f"the headers are longer than {most} bytes; send fewer or shorter ones"))

    def _refuse(self, error: RequestError) -> None:
        """Stop parsing, send the error after earlier requests have been answered, and close.

        A request whose response has begun, or that was answered early, gets no error.
        """
        if self._has_hung_up or self._read_closed or self.transport.is_closing():
            return
        self._read_closed, self._final_error = True, error
        if self._is_answered() and not self.pipeline:
            if "linger" not in self._timers:
                self._write_error(error)
            self.hang_up()
        elif not self.cycle.more_body:
            return
        elif self.pipeline:  # the last request is the one that cannot be parsed
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering
        elif self.cycle.response_started:
            self._final_error, self.cycle.keep_alive = None, False
            self._start_linger_timer()  # it may wait for the rest
        else:
            self._write_error(error)
            self.cycle.disconnected = True  # its handler has nothing to send any more
            self.cycle.message_event.set()
            self.hang_up()

    def _write_error(self, error: RequestError) -> None:
        reply = error_reply(error)
        start = f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\ncontent-type: {reply.content_type}\r\n"
        headers = ((b"content-length", b"%d" % reply.length), *reply.headers, (b"connection", b"close"))
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join([start.encode(), *lines, b"\r\n", *reply.pieces]))

    def _start_linger_timer(self) -> None:
        if "linger" not in self._timers:
            self._start_timer("linger", self.limits.linger_s, self._close)

    def _close(self) -> None:
        """Close when everything has been sent, and at the latest after the write timeout."""
        if not self.transport.is_closing():
            self.transport.close()
            self._start_timer("abort", self.limits.write_timeout_s, self.transport.abort)


def guarded_protocol(limits: ConnectionLimits, on_too_many: Callable[[], None] = lambda: None) -> type[GuardedProtocol]:
    """The protocol class with these limits, for uvicorn. `on_too_many` is called per connection above the limit."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits, "on_too_many": staticmethod(on_too_many)})
