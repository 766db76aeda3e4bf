"""Accepts connections from a socket, with TLS if the server has a certificate.

An event loop's own server accepts one connection per iteration, which takes milliseconds under load: the last of 64
clients that connected at once waited for 70 ms. It also keeps one TLS context for ever, and does not count connections
during their handshake.
"""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import logging
import socket
import ssl
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from convoy.models.tls import ServerTls

_log = logging.getLogger("convoy")
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Mistakes of a client, and not probes that leave: worth a log line.
_TELLING = frozenset({"HTTP_REQUEST", "PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED"})


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds a client may take, the size of its headers, and the number of connections.

    A TLS handshake may take as long as headers, and the end of TLS as long as a write.
    """

    header_timeout_s: float = 10.0
    header_bytes: int = 64 << 10
    write_timeout_s: float = 30.0
    linger_s: float = 10.0
    max_connections: int = 4096


class Acceptor:
    """Makes a protocol for each connection, from `open` to `close`."""

    def __init__(self, listener: socket.socket, limits: ConnectionLimits, tls: Callable[[], ServerTls | None]) -> None:
        """`tls` returns the certificate for a new connection, or None for no TLS."""
        self._listener, self._limits, self._tls = listener, limits, tls
        self._handshakes: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections on the current event loop."""
        self._loop, self._make_protocol = asyncio.get_running_loop(), make_protocol
        self._listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting; connections that wait at the socket are refused."""
        self._is_closed = True
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept_some)

    def _accept_some(self) -> None:
        # Each costs others a tenth of a millisecond. With 16 per iteration, the last of 1,000 clients that connect at
        # once waits 1.7 times as long; with 128 it does not wait less.
        for _ in range(64):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # all are accepted, or the client has gone
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                _log.error("cannot accept a connection: %s", error.strerror)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(0.5, self._resume)  # a connection may have ended by then
                return
            if len(self._handshakes) >= self._limits.max_connections and self._tls() is not None:
                connection.close()  # before the handshake, no reply can be sent
                continue
            task = self._loop.create_task(self._set_up(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _set_up(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls, limits = self._tls(), self._limits
            context = None if tls is None else _context_of(tls)
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=limits.header_timeout_s if context else None,
                ssl_shutdown_timeout=limits.write_timeout_s if context else None,
            )
        except ssl.SSLError as error:
            if error.reason in _TELLING:
                _log.warning("TLS handshake with a client failed: %s", error)
        except OSError:
            pass  # the client has gone already


@lru_cache(1)
def _context_of(tls: ServerTls) -> ssl.SSLContext:
    """A new one after each change of the certificate, without earlier sessions."""
    return tls.context()


def unsent_bytes(transport: Any) -> int:
    """Bytes that the client has not taken yet, in our buffer and in the kernel's, which is refilled in large steps."""
    return int(transport.get_write_buffer_size()) + _bytes_in_kernel(transport, termios.TIOCOUTQ)


def unread_bytes(transport: Any) -> int:
    """Bytes that the client has sent and that have not been read yet."""
    return _bytes_in_kernel(transport, termios.FIONREAD)


def _bytes_in_kernel(transport: Any, question: int) -> int:
    """The kernel's count for a connection; 0 if it is unknown."""
    answer, socket = array.array("i", [0]), transport.get_extra_info("socket")
    if socket is not None:
        with suppress(OSError):
            fcntl.ioctl(socket.fileno(), question, answer)
    return answer[0]
