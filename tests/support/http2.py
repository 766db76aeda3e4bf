"""HTTP/2 without manners: a gRPC connection that begins calls, sends as much of each as it likes, and resets them."""

from __future__ import annotations

import socket
import struct
import threading
from itertools import count
from types import TracebackType

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_CANCEL = 8
METHOD = "/inference.GRPCInferenceService/ModelInfer"


class Connection:
    """One connection, whose settings and pings are answered by a thread of its own.

    `headers` are the bytes of all blocks of headers that came, and `has_ended` says whether an answer is whole.
    """

    def __init__(self, address: str, settings: bytes = b"") -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._ids = count(1, 2)
        self._lock = threading.Lock()
        self.headers, self.has_ended = b"", False
        self._send(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        self._reader = threading.Thread(target=self._answer, daemon=True)
        self._reader.start()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def begin(self, method: str = METHOD, metadata: tuple[tuple[str, str], ...] = ()) -> int:
        """A call, without a message; the number of its stream."""
        stream = next(self._ids)
        self._send(_frame(_HEADERS, _END_HEADERS, stream, _headers(method, metadata)))
        return stream

    def send_part(self, stream: int, message: bytes, nbytes: int) -> None:
        """The length of the message, and no more than the first bytes of it."""
        self._send(_frame(_DATA, 0, stream, struct.pack(">BI", 0, len(message)) + message[:nbytes]))

    def send_more(self, stream: int, data: bytes, *, is_last: bool = False) -> None:
        self._send(_frame(_DATA, _END_STREAM * is_last, stream, data))

    def begin_and_reset(self, times: int) -> None:
        """So many calls that are taken back at once, in one piece."""
        pieces = []
        for stream in (next(self._ids) for _ in range(times)):
            pieces.append(_frame(_HEADERS, _END_HEADERS, stream, _headers(METHOD, ())))
            pieces.append(_frame(_RST_STREAM, 0, stream, struct.pack(">I", _CANCEL)))
        self._send(b"".join(pieces))

    def _send(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(data)

    def _answer(self) -> None:
        with self._socket.makefile("rb") as incoming:
            try:
                while len(head := incoming.read(9)) == 9:
                    kind, flags = head[3], head[4]
                    payload = incoming.read(int.from_bytes(head[:3], "big"))
                    if kind == _SETTINGS and not flags & _ACK:
                        self._send(_frame(_SETTINGS, _ACK, 0))
                    elif kind == _PING and not flags & _ACK:
                        self._send(_frame(_PING, _ACK, 0, payload))
                    elif kind == _HEADERS:
                        self.headers += payload
                        self.has_ended = bool(flags & _END_STREAM)
                    elif kind == _GOAWAY:
                        return
            except OSError:  # the server, or the test, is done with it
                return


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _headers(method: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    """As HPACK has them that remembers nothing, in plain letters."""
    own = ((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "localhost"))
    rest = (("te", "trailers"), ("content-type", "application/grpc"), *metadata)
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in (*own, *rest))


def _text(value: str) -> bytes:
    data = value.encode()
    assert len(data) < 127
    return bytes((len(data),)) + data
