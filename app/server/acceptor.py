"""Takes connections from a socket, and agrees on TLS where that is spoken.

An event loop's own server takes one in each of its turns, which last for milliseconds where requests are many: the last
of 64 clients that connect at once waited for 70 ms. It also keeps one TLS context for ever, and counts nobody who has
not agreed on a key yet.
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
from typing import Any, NamedTuple

from convoy.models.tls import ServerTls

_log = logging.getLogger("convoy")
# Taken in one turn of the loop. Each costs a tenth of a millisecond, for which others wait. With 16 the last of 1,000
# clients that connect at once waits 1.7 times as long, and with 128 no shorter.
_MOST_IN_A_TURN = 64
# Without a free descriptor there is nothing to do but to wait until a connection ends.
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_S = 0.5
# What a client must have got wrong, rather than a probe that leaves: worth a line.
_TELLING = frozenset({"HTTP_REQUEST", "PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED"})


class Handshakes(NamedTuple):
    """How connections become TLS. `tls` is what is shown to those that come now. At most `most` are under way; one may
    take `within_s` to come about, and `end_within_s` to end in good order.
    """

    tls: Callable[[], ServerTls | None]
    within_s: float
    end_within_s: float
    most: int


class Acceptor:
    """Makes a protocol for each connection, until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        handshakes: Handshakes,
    ) -> None:
        self._listener, self._make_protocol, self._handshakes = listener, make_protocol, handshakes
        self._shown: ServerTls | None = None
        self._context: ssl.SSLContext | None = None
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_closed = False
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Take no more; who waits at the socket is refused."""
        self._is_closed = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._somebody_comes)

    def _somebody_comes(self) -> None:
        for _ in range(_MOST_IN_A_TURN):
            if not self._accept():
                return

    def _accept(self) -> bool:
        """Whether others may wait, too."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # all are taken, or the client has gone
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                raise
            _log.error("a connection cannot be taken now: %s", error.strerror)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(_PAUSE_S, self._resume)
            return False
        if len(self._opening) >= self._handshakes.most and self._handshakes.tls() is not None:
            connection.close()  # before there is a key nothing can be said to it
            return True
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return True

    async def _open(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            context, handshakes = self._current_context(), self._handshakes
            timeouts = (handshakes.within_s, handshakes.end_within_s) if context is not None else (None, None)
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=timeouts[0],
                ssl_shutdown_timeout=timeouts[1],
            )
        except ssl.SSLError as error:
            if error.reason in _TELLING:
                _log.warning("a client could not agree on TLS: %s", error)
        except OSError:
            pass  # the client has gone already

    def _current_context(self) -> ssl.SSLContext | None:
        """Another one as soon as something else is to be shown, with no memory of earlier sessions."""
        tls = self._handshakes.tls()
        if tls is not self._shown:
            self._shown, self._context = tls, None if tls is None else tls.context()
        return self._context


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds a client may take, how long its headers may be, and how many connections there may be."""

    header_timeout_s: float = 10.0
    header_bytes: int = 64 << 10
    write_timeout_s: float = 30.0
    linger_s: float = 10.0
    max_connections: int = 4096

    def handshakes(self, tls: Callable[[], ServerTls | None]) -> Handshakes:
        """A client that has not agreed on a key yet may be as slow as one that sends headers."""
        return Handshakes(tls, self.header_timeout_s, self.write_timeout_s, self.max_connections)


def unsent_bytes(transport: Any) -> int:
    """What the client has not taken yet, in our buffer and in the kernel's, which is refilled in large steps."""
    # Where the kernel does not say, our own buffer tells nearly as much.
    return int(transport.get_write_buffer_size()) + _bytes_in_kernel(transport, termios.TIOCOUTQ)


def unread_bytes(transport: Any) -> int:
    """What the client has sent that has not been read yet."""
    return _bytes_in_kernel(transport, termios.FIONREAD)


def _bytes_in_kernel(transport: Any, question: int) -> int:
    """What the kernel says of a connection; 0 where it says nothing, or there is no socket, or no more."""
    answer, socket = array.array("i", [0]), transport.get_extra_info("socket")
    if socket is not None:
        with suppress(OSError):
            fcntl.ioctl(socket.fileno(), question, answer)
    return answer[0]
