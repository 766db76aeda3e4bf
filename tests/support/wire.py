"""A connection without manners: sends exactly the bytes it is told to, when it is told to."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

import httpx

from convoy.models.errors import error_kinds


@dataclass(frozen=True, slots=True)
class WireReply:
    """An answer as it came; header names in lower case. `head` is the status line and the headers, unchanged."""

    status: int
    headers: dict[str, str]
    body: bytes
    head: str = ""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The words of an error, which must stand in the one form that errors have."""
        document = self.json()
        assert list(document) == ["error", "code"], document
        assert document["code"] in error_kinds()
        assert isinstance(document["error"], str)
        assert document["error"]
        return document["error"]


class Wire:
    """One TCP connection."""

    def __init__(self, port: int, *, timeout_s: float = 60.0, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout_s)
        self.socket.connect(("127.0.0.1", port))
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def reset(self) -> None:
        """Leave without a goodbye."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(
        self, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> WireReply:
        """One request with a declared length, and its answer."""
        self.send(head(path, {"Content-Length": str(len(body)), **(headers or {})}, method) + body)
        return self.reply()

    def reply(self, *, is_head: bool = False) -> WireReply:
        """The next answer. Raises ConnectionError when the server closes instead."""
        return read_reply(self._file, is_head=is_head)

    def left_over(self) -> bytes:
        """What has come beyond the answers that were read, without waiting; empty too when the server has closed."""
        waits_s = self.socket.gettimeout()
        self.socket.settimeout(0)
        try:
            return self._file.peek(1)
        except (BlockingIOError, ConnectionError):
            return b""
        finally:
            self.socket.settimeout(waits_s)

    def is_closed(self) -> bool:
        """Whether the server closes the connection within the time limit, sending nothing more."""
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False


def read_reply(file: BinaryIO, *, is_head: bool = False) -> WireReply:
    """The next answer in the file; that to a HEAD has no body. Raises ConnectionError when there is none."""
    lines = [file.readline()]
    if not lines[0]:
        raise ConnectionError("the server closed the connection")
    status = int(lines[0].split(b" ", 2)[1])
    while lines[-1] != b"\r\n":
        lines.append(file.readline() or _closed_early())
    head = b"".join(lines[:-1]).decode("latin-1")
    headers: dict[str, str] = {}
    for line in head.splitlines()[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return WireReply(status, headers, b"" if is_head else _read_body(file, headers), head)


def _read_body(file: BinaryIO, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return _read_whole(file, int(headers.get("content-length", 0)))
    pieces = []
    while size := int(file.readline() or _closed_early(), 16):
        pieces.append(_read_whole(file, size))
        file.readline()
    file.readline()
    return b"".join(pieces)


def _closed_early() -> NoReturn:
    raise ConnectionError("the server closed the connection before the end of its answer")


def _read_whole(file: BinaryIO, nbytes: int) -> bytes:
    data = file.read(nbytes)
    if len(data) < nbytes:
        raise ConnectionError(f"the server closed the connection after {len(data)} of {nbytes} bytes")
    return data


def head(path: str, headers: Mapping[str, str] | None = None, method: str = "POST") -> bytes:
    """A request's first part, up to its body."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: test",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body; the empty one ends it."""
    return b"%x\r\n" % len(data) + data + b"\r\n"


def check_refused(answer: WireReply | httpx.Response, status: int, *words: str, code: str = "") -> None:
    """The answer is an error of this status and with this code, if one is given, and all of these words are in it."""
    found = answer.status if isinstance(answer, WireReply) else answer.status_code
    assert found == status, answer
    if isinstance(answer, httpx.Response):
        assert ("WWW-Authenticate" in answer.headers) == (status == 401), answer.headers
    document = answer.json()
    error = document["error"]
    assert error_kinds()[document["code"]].http_status == status, document
    assert code in ("", document["code"]), document
    missing = [word for word in words if word not in error]
    assert not missing, f"{missing} not in {error!r}"
