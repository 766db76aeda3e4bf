"""A list of asks while it is written: every ask has a name of its own that says what is asked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tests.oracle.grpc_player import HEALTH, INFERENCE
from tests.oracle.records import Ask, CommandAsk, CrowdAsk, GrpcAsk, HttpAsk, RegionAsk

Headers = Mapping[str, str]
_LONGEST_NAME = 100


def request(
    method: str, path: str, body: bytes = b"", headers: Headers | None = None, host: str = "localhost"
) -> bytes:
    """One whole request. A length is declared unless the headers say how the body travels."""
    given = dict(headers or {})
    framed = {name.lower() for name in given} & {"content-length", "transfer-encoding"}
    if not framed and (body or method not in ("GET", "HEAD")):
        given = {"Content-Length": str(len(body)), **given}
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in given.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


class Book:
    """The asks of one setup."""

    def __init__(self) -> None:
        self._asks: dict[str, Ask] = {}

    @property
    def asks(self) -> tuple[Ask, ...]:
        return tuple(self._asks.values())

    def extend(self, other: Book) -> Book:
        for ask in other.asks:
            self._add(type(ask), **{name: getattr(ask, name) for name in ask.__slots__})
        return self

    def get(self, path: str, what: str = "", headers: Headers | None = None, **more: Any) -> None:
        self.ask("GET", path, b"", what, headers, **more)

    def post(self, path: str, body: bytes = b"", what: str = "", headers: Headers | None = None, **more: Any) -> None:
        self.ask("POST", path, body, what, headers, **more)

    def post_json(self, path: str, document: Any, what: str = "", headers: Headers | None = None, **more: Any) -> None:
        self.ask("POST", path, json.dumps(document).encode(), what, headers, **more)

    def ask(
        self, method: str, path: str, body: bytes, what: str = "", headers: Headers | None = None, **more: Any
    ) -> None:
        """One whole request."""
        self._add(
            HttpAsk, name=f"{method} {path} {what}".strip(), pieces=(request(method, path, body, headers),), **more
        )

    def raw(self, name: str, *pieces: bytes, **more: Any) -> None:
        self._add(HttpAsk, name=name, pieces=pieces, **more)

    def broken(self, name: str, *pieces: bytes) -> None:
        self._add(HttpAsk, name=name, pieces=pieces, connection="broken")

    def call(
        self,
        method: str,
        message: Any,
        what: str = "",
        metadata: Iterable[str] = (),
        *,
        is_health: bool = False,
        **more: Any,
    ) -> None:
        """A unary call; the message may be bytes, which need not be one."""
        data = message if isinstance(message, bytes) else message.SerializeToString(deterministic=True)
        path = (HEALTH if is_health else INFERENCE) + method
        self._add(
            GrpcAsk, name=f"{method} {what}".strip(), method=path, messages=(data,), metadata=tuple(metadata), **more
        )

    def stream(self, what: str, *messages: Any, metadata: Iterable[str] = ()) -> None:
        written = tuple(
            one if isinstance(one, bytes) else one.SerializeToString(deterministic=True) for one in messages
        )
        self._add(
            GrpcAsk,
            name=f"ModelStreamInfer {what}",
            method=f"{INFERENCE}ModelStreamInfer",
            messages=written,
            metadata=tuple(metadata),
            is_stream=True,
        )

    def region(self, name: str, what: str) -> None:
        self._add(RegionAsk, name=f"region {what}", region=name)

    def crowd(self, connections: int, what: str) -> None:
        self._add(CrowdAsk, name=f"crowd {what}", connections=connections)

    def command(self, *arguments: str) -> None:
        self._add(CommandAsk, name=f"command {' '.join(arguments)}", arguments=arguments)

    def _add(self, kind: type, name: str, **fields: Any) -> None:
        own = name = name.encode("ascii", "backslashreplace").decode()[:_LONGEST_NAME].strip()
        number = 1
        while own in self._asks:
            number += 1
            own = f"{name} #{number}"
        self._asks[own] = kind(name=own, **fields)
