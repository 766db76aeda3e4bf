"""uvicorn's HTTP/1.1 protocol, hardened against clients that are slow, many, or not speaking HTTP.

uvicorn limits how long an idle connection may stay between requests. It does not limit how long a client
may take to send its headers, nor how long it may refuse to read an answer; both hold memory for ever.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.edge.replies import error_body

_log = logging.getLogger("convoy")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds a client may take, how long its headers may be, and how many connections there may be."""

    header_timeout_s: float = 10.0
    header_bytes: int = 64 << 10
    write_timeout_s: float = 30.0
    max_connections: int = 4096


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    # uvicorn's base class keeps these; named here for the type checker.
    connections: Any
    transport: Any
    loop: asyncio.AbstractEventLoop

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, f"{self.limits.max_connections} connections are open; try again", retry_after=True)
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._header_timer is not None:  # the headers are not complete yet
            self._header_bytes += len(data)
            if self._header_bytes > self.limits.header_bytes:
                self._refuse(431, f"the headers are longer than {self.limits.header_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._header_timer is None:
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self._reader_is_too_slow)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that are not HTTP, in our words."""
        self._refuse(400, "this is not an HTTP/1.1 request")

    def _await_headers(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._headers_are_too_slow)

    def _headers_are_too_slow(self) -> None:
        self._header_timer = None
        self._refuse(408, f"the headers did not arrive within {self.limits.header_timeout_s:g} s")

    def _reader_is_too_slow(self) -> None:
        self._write_timer = None
        _log.info("a client did not read its answer for %g s; its connection is closed", self.limits.write_timeout_s)
        self.transport.abort()

    def _refuse(self, status: int, message: str, *, retry_after: bool = False) -> None:
        if self.transport.is_closing():
            return
        body = error_body(message)
        extra = b"retry-after: 1\r\n" if retry_after else b""
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n".encode()
        self.transport.write(head + extra + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def guarded_protocol(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """The protocol class for these limits; uvicorn takes a class, not an object."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})
