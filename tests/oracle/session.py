"""A build of which servers are started, and a session with one: asked over HTTP and gRPC, every answer kept by name."""

from __future__ import annotations

import io
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import text_format
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from tests.oracle.normal import Answers, Part
from tests.support.servers import Server
from tests.support.stores import ROOT
from tests.support.wire import Wire, read_reply

Headers = Mapping[str, str]
Ask = Callable[["Session"], None]
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


@dataclass(frozen=True, slots=True)
class Build:
    """The files in `tree`, run by the Python that runs this, in the corpus' folder. Caches and logs go to `scratch`."""

    tree: Path
    corpus: Path
    scratch: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """A command that ends by itself."""
        with self._begun(arguments, subprocess.PIPE, subprocess.PIPE) as process:
            said, wrong = process.communicate(timeout=120)
            return subprocess.CompletedProcess(arguments, process.returncode, said, wrong)

    @contextmanager
    def serve(self, name: str, *options: str) -> Iterator[Server]:
        """`convoy serve` on free ports, ready; it is killed afterwards unless it has ended."""
        log_path = self.scratch / f"{name}.log"
        command = ("serve", "--port", "0", "--grpc-port", "0", *options)
        with log_path.open("wb") as log, self._begun(command, log, log) as process:
            server = Server(process, log_path)
            try:
                server.await_port()
                server.await_ready()
                yield server
            finally:
                process.kill()

    def _begun(self, arguments: tuple[str, ...], stdout: object, stderr: object) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CONVOY_", "PYTHON"))}
        # Sets have one order in every process, or the framework would list allowed methods in another each time.
        own = {"PYTHONPATH": str(self.tree), "PYTHONHASHSEED": "0", "XDG_CACHE_HOME": str(self.scratch)}
        return subprocess.Popen(
            [sys.executable, "-m", "convoy", *arguments],
            cwd=self.corpus,
            env={**kept, **own, "COLUMNS": "200", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,  # type: ignore[arg-type]
            stderr=stderr,  # type: ignore[arg-type]
        )


@contextmanager
def build_of(place: str, corpus: Path) -> Iterator[Build]:
    """The build in a folder, or of a revision, whose files are unpacked for as long as it is used.

    Raises ValueError when there is neither.
    """
    with tempfile.TemporaryDirectory(prefix="convoy-oracle-build-") as folder:
        scratch, tree = Path(folder), Path(place).resolve()
        if not tree.is_dir():
            tree = scratch / "tree"
            tree.mkdir()
            archive = subprocess.run(["git", "archive", place], cwd=ROOT, capture_output=True, check=False)
            if archive.returncode:
                raise ValueError(f"{place!r} is neither a folder nor a revision: {archive.stderr.decode().strip()}")
            subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        yield Build(tree, corpus, scratch)


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

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def among(self, connections: int, ask: Ask) -> None:
        """While as many others are open."""
        with ExitStack() as crowd:
            for _ in range(connections):
                crowd.enter_context(Wire(self.port))
            ask(self)


# Steps that a session takes later, so that what it asks is a list.
get, post, ask, raw, fresh, broken, call, stream, region, command, pause, among = (
    partial(methodcaller, way)
    for way in (
        *("get", "post", "ask", "raw", "fresh", "broken"),
        *("call", "stream", "region", "command", "pause", "among"),
    )
)


def _asked(wire: Wire, pieces: Sequence[bytes], replies: int) -> list[Part]:
    _send(wire, pieces)
    parts: list[Part] = []
    while replies:
        try:
            reply = wire.reply(is_head=pieces[0].startswith(b"HEAD "))
        except OSError as error:
            # Whether a connection is closed or reset is chance.
            return [*parts, Part("connection closed" if error.errno else f"connection closed: {error}")]
        parts.append(Part(reply.head, reply.body))
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
            reply = read_reply(file)
        except (OSError, ValueError, IndexError):
            return [*parts, Part("no whole answer", data[start:])]
        parts.append(Part(reply.head, reply.body))
    return parts


def _shown(path: str, data: bytes) -> bytes:
    """Fields in their order; the bytes of a map have none."""
    if path not in _OUTPUTS:
        return data
    return text_format.MessageToString(_OUTPUTS[path].FromString(data), print_unknown_fields=True).encode()
