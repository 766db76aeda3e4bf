"""The clients of one server: they ask it over HTTP and gRPC, and keep every answer under a name."""

from __future__ import annotations

import io
import json
import select
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import text_format
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from tests.oracle.build import Build
from tests.oracle.normal import Answers, Part
from tests.support.servers import Server
from tests.support.wire import Wire, WireReply, read_reply

Headers = Mapping[str, str]
SHARED_MEMORY = Path("/dev/shm")
_INFERENCE, _HEALTH = "/inference.GRPCInferenceService/", "/grpc.health.v1.Health/"
_METHODS = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
_OUTPUTS = {_INFERENCE + one.name: getattr(service_pb2, one.output_type.name) for one in _METHODS}
_OUTPUTS |= {_HEALTH + name: health_pb2.HealthCheckResponse for name in ("Check", "Watch")}
# What the library at the client makes of the answer, and not the server.
_LIBRARYS = frozenset({"grpc-accept-encoding", "accept-encoding"})
# A broken request that has no answer by then gets none before its end: the server waits for the rest.
_SILENCE_S = 0.12
_BETWEEN_PIECES_S = 0.03
_LONGEST_NAME = 100


def request(method: str, path: str, body: bytes = b"", headers: Headers | None = None) -> bytes:
    """One whole request. Its length is declared unless the headers say how the body travels."""
    given = dict(headers or {})
    if (body or method not in ("GET", "HEAD")) and not {"Content-Length", "Transfer-Encoding"} & set(given):
        given = {"Content-Length": str(len(body)), **given}
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in given.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


class Session:
    """All answers of one server are in `answers`. A server that is gone raises OSError."""

    def __init__(self, build: Build, server: Server) -> None:
        self.answers: Answers = {}
        self.port = server.port
        self._build, self._server = build, server
        self._kept: Wire | None = None

    def close(self) -> None:
        self._leave()
        self._channel.close()

    def record(self, name: str, *parts: Part) -> None:
        """Under a name of its own: a second answer of one name gets a number."""
        name = name.encode("ascii", "backslashreplace").decode()[:_LONGEST_NAME].strip()
        own, number = name, 1
        while own in self.answers:
            number += 1
            own = f"{name} #{number}"
        self.answers[own] = parts

    # HTTP

    def get(self, path: str, what: str = "", headers: Headers | None = None) -> None:
        self.ask("GET", path, b"", what, headers)

    def post(self, path: str, body: Any = b"", what: str = "", headers: Headers | None = None) -> None:
        """What is not bytes is sent as JSON."""
        self.ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), what, headers)

    def ask(self, method: str, path: str, body: bytes, what: str = "", headers: Headers | None = None) -> None:
        self.raw(f"{method} {path} {what}", request(method, path, body, headers))

    def raw(self, name: str, data: bytes) -> None:
        """On the connection that the asks before used, as long as that holds."""
        if self._kept is not None and _state(self._kept) != "open":
            self._leave()
        self._kept = self._kept or Wire(self.port)
        parts = _asked(self._kept, [data], 1)
        self.record(name, *parts)
        last = parts[-1].head.lower()
        if last.startswith("connection closed") or "\r\nconnection: close\r\n" in last:
            self._leave()  # it closes, or will in a moment

    def fresh(self, name: str, *pieces: bytes, replies: int = 1) -> None:
        """On a connection of its own, whose state after the last answer counts as well.

        A piece is sent after the one before has had time to be read.
        """
        with Wire(self.port) as wire:
            parts = _asked(wire, pieces, replies)
            self.record(name, *parts, Part(f"connection {_state(wire, _SILENCE_S)}"))

    def broken(self, name: str, data: bytes) -> None:
        """On a connection of its own, where whatever comes is the answer; then the client says that it has finished."""
        with Wire(self.port) as wire:
            _send(wire, [data])
            before = _received(wire.socket, _SILENCE_S)
            with suppress(OSError):
                wire.socket.shutdown(socket.SHUT_WR)
            after = _received(wire.socket, 30.0)
        self.record(name, *split(before + after), Part(f"after the client has finished: {len(after)} bytes"))

    def _leave(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    # gRPC

    @cached_property
    def _channel(self) -> grpc.Channel:
        sizes = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        return grpc.insecure_channel(self._server.grpc_address, [*sizes, ("grpc.enable_retries", 0)])

    def call(self, method: str, message: Any, what: str = "", metadata: Headers | None = None, **more: Any) -> None:
        """A unary call; a message of bytes need not be one."""
        service = _HEALTH if method in ("Check", "Watch") else _INFERENCE
        self._call(f"{method} {what}", service + method, [message], metadata, **more)

    def stream(self, what: str, *messages: Any, metadata: Headers | None = None) -> None:
        self._call(f"ModelStreamInfer {what}", f"{_INFERENCE}ModelStreamInfer", messages, metadata)

    def _call(
        self,
        name: str,
        path: str,
        messages: Iterable[Any],
        metadata: Headers | None,
        compression: grpc.Compression | None = None,
    ) -> None:
        written = [one if isinstance(one, bytes) else one.SerializeToString(deterministic=True) for one in messages]
        given = tuple((metadata or {}).items())
        call = self._channel.stream_stream(path)(iter(written), timeout=60, metadata=given, compression=compression)
        parts: list[Part] = []
        with suppress(grpc.RpcError):  # its code is asked for below
            for message in call:
                parts.append(Part(f"message {len(parts)}", _shown(path, message)))
                if path.endswith("/Watch"):
                    call.cancel()  # it never ends by itself
        lines = [f"{call.code()} {call.details()}"]
        for kind, sent in (("initial", call.initial_metadata()), ("trailing", call.trailing_metadata())):
            lines += sorted(f"{kind} {key}: {value!r}" for key, value in sent or () if key not in _LIBRARYS)
        self.record(name, *parts, Part("\n".join(lines)))

    # Everything else

    def region(self, name: str, what: str) -> None:
        """What lies in a region of shared memory now."""
        self.record(f"region {what}", Part("region", (SHARED_MEMORY / name).read_bytes()))

    def command(self, *arguments: str) -> None:
        """A `convoy` command that ends by itself."""
        ended = self._build.run(*arguments)
        code = Part(f"exit code {ended.returncode}")
        self.record(f"command {' '.join(arguments)}", code, Part("stdout", ended.stdout), Part("stderr", ended.stderr))


def _asked(wire: Wire, pieces: Sequence[bytes], replies: int) -> list[Part]:
    _send(wire, pieces)
    parts: list[Part] = []
    while replies:
        try:
            reply = wire.reply(is_head=pieces[0].startswith(b"HEAD "))
        except OSError as error:
            # Whether a connection is closed or reset is chance.
            return [*parts, Part("connection closed" if error.errno else f"connection closed: {error}")]
        parts.append(_part(reply))
        replies -= reply.status >= 200
    return parts


def _send(wire: Wire, pieces: Iterable[bytes]) -> None:
    """A server that closes before it has read everything is no error; its answer, if any, can be read."""
    with suppress(OSError):
        for number, piece in enumerate(pieces):
            time.sleep(_BETWEEN_PIECES_S if number else 0)
            wire.send(piece)


def _state(wire: Wire, patience_s: float = 0.0) -> str:
    """Open, closed, or that more has come than was asked for."""
    has_come = bool(select.select([wire.socket], [], [], patience_s)[0])
    if wire.left_over():
        return "unexpected"
    return "closed" if has_come else "open"


def _received(connection: socket.socket, patience_s: float) -> bytes:
    """What comes until nothing comes for so long, or until the end."""
    connection.settimeout(patience_s)
    data = bytearray()
    with suppress(OSError):
        while piece := connection.recv(1 << 18):
            data += piece
    return bytes(data)


def split(data: bytes) -> list[Part]:
    """Raw bytes as answers, and what is none of them as it is."""
    file, parts = io.BytesIO(data), []
    while (start := file.tell()) < len(data):
        try:
            parts.append(_part(read_reply(file)))
        except (OSError, ValueError, IndexError):
            return [*parts, Part("no whole answer", data[start:])]
    return parts


def _part(reply: WireReply) -> Part:
    return Part(reply.head, reply.body)


def _shown(path: str, data: bytes) -> bytes:
    """Fields in their order; the bytes of a map have none."""
    if path not in _OUTPUTS:
        return data
    return text_format.MessageToString(_OUTPUTS[path].FromString(data), print_unknown_fields=True).encode()
