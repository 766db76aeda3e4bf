"""A guard around uvicorn's HTTP/1.1 protocol. It guards against:

- headers that come slowly (408) or are too long, trailers included (431); slow bodies are for `http.body`
- floods of pipelined requests: one read of them waits unparsed, the others stay with their client
- answers that the client does not read, and bodies that go on without end after an early answer
- offers of another protocol, which are ignored (RFC 9110, 7.8), and CONNECT (405)
- too many connections (503)
- an early error, such as a 413 or 401, that a client which still sends would never read: the close lingers
- errors of the parser in plain text: all are JSON

A client that closes its side has left. After a stop of the process (SIGSTOP) all timers are late; that time does not
count against the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from convoy.app.http.body import LOOK_AGAIN_S
from convoy.app.http.replies import error_body
from convoy.app.server.acceptor import ConnectionLimits, unread_bytes, unsent_bytes

_log = logging.getLogger("convoy")
# Between two pieces of what was read it is looked whether a request waits. Of the shortest ones this is 450.
_PIECE_BYTES = 8 << 10


class HeadersTooLong(Exception):
    """Stops the parser; the connection ends with a 431."""


class _Flow(FlowControl):
    """uvicorn's flow control. It does not resume reading while `ahead` holds bytes that were read and must wait."""

    ahead = b""

    def resume_reading(self) -> None:
        if not self.ahead:
            super().resume_reading()


class _Line:
    """The transport as uvicorn's cycle has it: there an answer that is the last one closes at once."""

    def __init__(self, connection: GuardedProtocol) -> None:
        self.write, self.is_closing = connection.transport.write, connection.transport.is_closing
        self.close = connection.hang_up


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
        self._timers: dict[str, asyncio.TimerHandle] = {}  # the time limits that run, by name
        self._header_bytes = 0
        self._unparsed_bytes = 0  # since the parser last got anywhere
        self._has_moved = False
        self._unread_bytes = 0
        self._has_hung_up = False
        # What comes cannot be read any more; and what is to be said of it when all requests before have their answers.
        self._read_closed = False
        self._final_error: tuple[int, str] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._line = _Line(self)
        if len(self.connections) > self.limits.max_connections:
            type(self).on_too_many()
            self._refuse(503, f"{self.limits.max_connections} connections are open; try again", retry_after=True)
            return
        self._arm_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in [*self._timers]:
            self._stop_timer(name)  # it would keep the connection's memory until it fires
        if self._answering is not None and not self._answering.response_complete:
            # uvicorn tells only the latest request; with pipelining an earlier one is being answered.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)
        self._line.close = self.transport.close  # else the two would keep each other

    def shutdown(self) -> None:
        # The time to drain is over. uvicorn cancels the tasks that are left; what waits behind them has none.
        if self.pipeline:
            self.pipeline.clear()
            self.cycle = self._answering  # whose end is that of the connection
        super().shutdown()
        if self._has_hung_up:
            self._close()

    def data_received(self, data: bytes) -> None:
        if self._read_closed:
            return
        if self.pipeline or self.flow.ahead:
            self._keep(data)
            return
        self._has_moved = False
        self._feed(data)
        if self._has_hung_up or self._read_closed or self.transport.is_closing():
            return
        if self._in_headers and "header" not in self._timers:
            self._arm_header_timer()
        # The parser reports only whole headers. This counts one that never ends, such trailers, and empty lines.
        self._unparsed_bytes = 0 if self._has_moved else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > self.limits.header_bytes:
            self._refuse_headers()

    def _keep(self, data: bytes | memoryview) -> None:
        """Until the requests before it have been answered; nothing more is read meanwhile."""
        self.flow.ahead += data
        self.flow.pause_reading()

    def _read_on(self) -> None:
        """Nothing waits any more before what was kept."""
        if self.transport.is_closing():
            return
        ahead, self.flow.ahead = self.flow.ahead, b""
        self.data_received(ahead)
        self.flow.resume_reading()

    def _feed(self, data: bytes) -> None:
        """Let the parser read until a request waits, and keep the rest: no parser stops at the end of a request."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            if self._read_closed or self.transport.is_closing():
                return
            if self.pipeline:
                self._keep(view[start:])
                return
            self._feed_piece(view[start : start + _PIECE_BYTES])

    def _feed_piece(self, data: bytes | memoryview) -> None:
        """Let the parser read, whatever other protocol a request offers to speak."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser has read the headers and takes all the rest for the other protocol's.
                if self.parser.get_method() == b"CONNECT":
                    self._refuse_all(405, "this server is no proxy; send the request to where it is to be answered")
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        kept = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"".join((method, b" ", self.url, b" HTTP/", version, b"\r\n", *kept, b"\r\n"))

    def on_message_begin(self) -> None:
        self._stop_timer("idle")  # not for any bytes: empty lines are no request
        super().on_message_begin()
        self._header_bytes = 0
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Also called for the trailers of a chunked body, which nothing else bounds.
        self._count_header(len(name) + len(value) + 4)
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = self.parser.get_http_version() != "1.0"  # which knows no such answer
        if self._in_headers:  # a trailer must not pass for a header that has been looked at
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # they come again, without the offer
        self._has_moved = True
        self._in_headers = False
        self._stop_timer("header")
        if not self._has_hung_up:
            super().on_headers_complete()
            self.cycle.transport = self._line

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        if not self._has_hung_up:  # else it is read to its end and thrown away
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._has_moved = True
        super().on_message_complete()
        if self._has_hung_up:
            self._close()
        elif "linger" in self._timers:
            # The rest of a body that had been answered early is there; the connection is idle now.
            self._stop_timer("linger")
            self._arm_keep_alive()

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
        waits_for_rest = not self.pipeline and self.cycle is not None and self.cycle.more_body
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            if not self.pipeline and self.flow.ahead:
                self.loop.call_soon(self._read_on)
        elif self._final_error is not None:
            self._send_final_error()
        elif not waits_for_rest and not self._in_headers:  # those have time limits of their own
            self._arm_keep_alive()
        if waits_for_rest:
            # Answered before the body was read. The rest is thrown away for a while, because a client that
            # still sends does not read yet; uvicorn would do so for ever.
            self._start_timer("linger", self.limits.linger_s, self._close)

    def pause_writing(self) -> None:
        super().pause_writing()
        if "write" not in self._timers:
            self._watch_reader()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._stop_timer("write")
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that it cannot parse, in our words."""
        if self._header_bytes > self.limits.header_bytes:
            self._refuse_headers()
        else:
            self._refuse_all(400, "this is not an HTTP/1.1 request")

    def hang_up(self) -> None:
        """Close, now that the last answer is written."""
        if self._has_hung_up or self.transport.is_closing():
            return
        self._has_hung_up = True
        if self._read_closed or self.pipeline or (self._is_answered() and self._is_sent_to()):
            self._drain_then_close()
        else:
            self.transport.close()

    def _start_timer(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` after `seconds`. Replaces a running timer of the same name."""

        def fire() -> None:
            del self._timers[name]
            callback()

        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, fire)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def _count_header(self, nbytes: int) -> None:
        self._header_bytes += nbytes
        if self._header_bytes > self.limits.header_bytes:
            raise HeadersTooLong

    def _arm_header_timer(self) -> None:
        self._start_timer("header", self.limits.header_timeout_s, self._headers_are_too_slow)

    def _headers_are_too_slow(self) -> None:
        if self.flow.read_paused or self.pipeline or not self._is_answered():
            self._arm_header_timer()  # until earlier requests are answered, it may be we that do not read
            return
        if unread_bytes(self.transport):
            self._start_timer("header", LOOK_AGAIN_S, self._headers_are_too_slow)
            return
        self._refuse(408, f"the headers did not arrive within {self.limits.header_timeout_s:g} s")

    def _refuse_headers(self) -> None:
        most = self.limits.header_bytes
        self._refuse_all(431, f"the headers are longer than {most} bytes; send fewer or shorter ones")

    def _watch_reader(self) -> None:
        """Look again after the time that a client may refuse to read; one that reads slowly may go on."""
        self._unread_bytes = unsent_bytes(self.transport)
        self._start_timer("write", self.limits.write_timeout_s, self._check_reader)

    def _check_reader(self) -> None:
        if unsent_bytes(self.transport) < self._unread_bytes:
            self._watch_reader()
            return
        _log.info("a client did not read its answer for %g s; its connection is closed", self.limits.write_timeout_s)
        self.transport.abort()

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _is_sent_to(self) -> bool:
        """Whether the client is in the midst of a request."""
        return self._in_headers or (self.cycle is not None and self.cycle.more_body)

    def _refuse(self, status: int, message: str, *, retry_after: bool = False) -> None:
        """Answer a client that sends nothing at the moment, and close."""
        if self._tell(status, message, b"retry-after: 1\r\n" if retry_after else b""):
            self._close()

    def _refuse_all(self, status: int, message: str) -> None:
        """Close, because neither this can be read as a request nor what follows; when those before have been answered.

        Its client is told what is wrong where it still waits for an answer to it, which the rest of a body that has
        been answered early does not get, nor one whose answer has begun.
        """
        if self._read_closed or self._has_hung_up or self.transport.is_closing():
            return
        self._read_closed, self._final_error = True, (status, message)
        if self._is_answered() and not self.pipeline:
            if "linger" not in self._timers:
                self._send_final_error()
            else:
                self._final_error, self._has_hung_up = None, True
                self._drain_then_close()
        elif not self.cycle.more_body:
            return
        elif self.pipeline:  # it is the last one there that cannot be read
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering
        elif getattr(self.cycle, "response_started", False):
            self._final_error, self.cycle.keep_alive = None, False
            if "linger" not in self._timers:  # it may wait for the rest
                self._start_timer("linger", self.limits.linger_s, self._close)
        else:
            self._send_final_error()

    def _send_final_error(self) -> None:
        assert self._final_error is not None, "there is something to say; this is a bug"
        words, self._final_error = self._final_error, None
        if not self._tell(*words):
            return
        self._has_hung_up = True
        if not self._is_answered():  # nothing else is to be said of it
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._drain_then_close()

    def _tell(self, status: int, message: str, extra: bytes = b"") -> bool:
        """Write the last answer; False where there has been one."""
        if self._has_hung_up or self.transport.is_closing():
            return False
        body = error_body(message)
        phrase = HTTPStatus(status).phrase
        start = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(start.encode() + extra + b"connection: close\r\n\r\n" + body)
        return True

    def _drain_then_close(self) -> None:
        """Close when the client has done so, has sent all of its request, or has had time enough.

        A client that still sends does not read yet, and loses what was said to it when its bytes are not taken.
        """
        self.pipeline.clear()
        self.flow.ahead = b""
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has gone, which is told in a moment
                self.transport.write_eof()
        if "linger" not in self._timers:
            self._start_timer("linger", self.limits.linger_s, self._close)

    def _close(self) -> None:
        """Close when everything has been sent, and not later than the write time-out."""
        if not self.transport.is_closing():
            self.transport.close()
            self._start_timer("abort", self.limits.write_timeout_s, self.transport.abort)

    def _arm_keep_alive(self) -> None:
        self._start_timer("idle", self.timeout_keep_alive, self._close_if_idle)

    def _unset_keepalive_if_required(self) -> None:
        pass  # uvicorn calls it for any bytes; a request that begins ends the idle time

    def _close_if_idle(self) -> None:
        if unread_bytes(self.transport):
            self._start_timer("idle", LOOK_AGAIN_S, self._close_if_idle)
        else:
            self._close()


def guarded_protocol(limits: ConnectionLimits, on_too_many: Callable[[], None] = lambda: None) -> type[GuardedProtocol]:
    """The protocol class for these limits; uvicorn takes a class, not an object.

    `on_too_many` is called for each connection above the limit.
    """
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits, "on_too_many": staticmethod(on_too_many)})
