"""Plays requests over TCP and takes the answers as they come, byte by byte."""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress

from tests.oracle.records import Answer, HttpAsk, Part

_PATIENCE_S = 30.0
# A broken request that has no answer by then gets none before its end: the server waits for the rest.
_SILENCE_S = 0.12
_BETWEEN_PIECES_S = 0.03
_READ_BYTES = 256 << 10


class Closed(Exception):
    """The server closed the connection instead of sending the rest of an answer. Holds what there was of it."""


class WirePlayer:
    """One client of one server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._kept: _Connection | None = None
        self._crowd: list[_Connection] = []

    def play(self, ask: HttpAsk) -> Answer:
        """A server that is no more is an answer like any other."""
        try:
            return self._play(ask)
        except ConnectionError as error:
            return (Part(f"no connection: {type(error).__name__}"),)

    def _play(self, ask: HttpAsk) -> Answer:
        if ask.connection == "broken":
            return self._play_broken(ask)
        if ask.connection == "fresh":
            connection = _Connection(self._port)
            try:
                return (*_asked(connection, ask), Part(f"connection {connection.state(_SILENCE_S)}"))
            finally:
                connection.close()
        return self._play_kept(ask)

    def hold(self, connections: int) -> None:
        """Until the next crowd."""
        for connection in self._crowd:
            connection.close()
        self._crowd = [_Connection(self._port) for _ in range(connections)]

    def close(self) -> None:
        self.hold(0)
        self._leave_kept()

    def _play_kept(self, ask: HttpAsk) -> Answer:
        if self._kept is not None and self._kept.state() != "open":
            self._leave_kept()
        if self._kept is None:
            self._kept = _Connection(self._port)
        parts = _asked(self._kept, ask)
        if parts[-1].head == "connection closed" or "\r\nconnection: close\r\n" in parts[-1].head.lower():
            self._leave_kept()  # it closes, or will in a moment
        return parts

    def _leave_kept(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _play_broken(self, ask: HttpAsk) -> Answer:
        connection = _Connection(self._port)
        try:
            connection.send(ask.pieces)
            before = connection.read_until_silence()
            connection.finish()
            after = connection.read_to_end()
        finally:
            connection.close()
        return (*_split(before + after), Part(f"after the client has finished: {len(after)} bytes"))


class _Connection:
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.unread = bytearray()

    def close(self) -> None:
        self._socket.close()

    def state(self, patience_s: float = 0.0) -> str:
        """Open, closed, or that more has come than was asked for."""
        if self.unread or select.select([self._socket], [], [], patience_s)[0]:
            return "unexpected" if self.unread or self._receive() else "closed"
        return "open"

    def send(self, pieces: tuple[bytes, ...]) -> None:
        """A server that closes before it has read everything is no error; its answer, if any, can be read."""
        try:
            for number, piece in enumerate(pieces):
                if number:
                    time.sleep(_BETWEEN_PIECES_S)
                self._socket.sendall(piece)
        except OSError:
            pass

    def finish(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def read_until_silence(self) -> bytes:
        """What comes while something comes."""
        while select.select([self._socket], [], [], _SILENCE_S)[0] and self._receive():
            pass
        taken, self.unread = bytes(self.unread), bytearray()
        return taken

    def read_to_end(self) -> bytes:
        while self._receive():
            pass
        taken, self.unread = bytes(self.unread), bytearray()
        return taken

    def line(self) -> bytes:
        while (end := self.unread.find(b"\n")) < 0:
            self._require()
        return self.take(end + 1)

    def take(self, nbytes: int) -> bytes:
        while len(self.unread) < nbytes:
            self._require()
        taken = bytes(self.unread[:nbytes])
        del self.unread[:nbytes]
        return taken

    def _require(self) -> None:
        if not self._receive():
            raise Closed

    def _receive(self) -> int:
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return 0
        except OSError:
            return 0
        self.unread += data
        return len(data)


def _asked(connection: _Connection, ask: HttpAsk) -> Answer:
    connection.send(ask.pieces)
    is_head = ask.pieces[0].startswith(b"HEAD ")
    parts: list[Part] = []
    awaited = ask.replies
    while awaited:
        try:
            part, status = _reply(connection, is_head=is_head)
        except Closed:
            left = bytes(connection.unread)
            return (*parts, *([Part("cut off", left)] if left else []), Part("connection closed"))
        parts.append(part)
        awaited -= status >= 200
    return tuple(parts)


def _reply(connection: _Connection, *, is_head: bool) -> tuple[Part, int]:
    lines = [connection.line()]
    while lines[-1] not in (b"\r\n", b"\n"):
        lines.append(connection.line())
    status = int(lines[0].split(b" ", 2)[1])
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    head = b"".join(lines[:-1]).decode("latin-1")
    if is_head or status < 200 or status in (204, 304):
        return Part(head), status
    if headers.get(b"transfer-encoding") == b"chunked":
        return Part(head, _chunks(connection)), status
    return Part(head, connection.take(int(headers.get(b"content-length", b"0")))), status


def _chunks(connection: _Connection) -> bytes:
    pieces = []
    while size := int(connection.line(), 16):
        pieces.append(connection.take(size))
        connection.line()
    connection.line()
    return b"".join(pieces)


class _Recorded(_Connection):
    """Bytes that have come already, read as if they came."""

    def __init__(self, data: bytes) -> None:
        self.unread = bytearray(data)

    def _receive(self) -> int:
        return 0


def _split(data: bytes) -> Answer:
    """Raw bytes as answers, and what is none of them as it is."""
    recorded = _Recorded(data)
    parts: list[Part] = []
    while recorded.unread:
        left = bytes(recorded.unread)
        try:
            parts.append(_reply(recorded, is_head=False)[0])
        except (Closed, ValueError, IndexError):
            return (*parts, Part("no whole answer", left))
    return tuple(parts)
