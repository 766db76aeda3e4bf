"""From a URL to the wire on which its server is asked. What gRPC needs is imported only for gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from convoy.app.client import http_wire
from convoy.app.client.http_transport import AsyncHttpTransport, HttpTransport, http_options
from convoy.app.client.own_headers import OwnHeaders
from convoy.app.client.records import RemoteModel, Sight
from convoy.app.client.retry import Send, WireQuestion
from convoy.app.client.trust import Trust

_GRPC = ("grpc://", "grpcs://")


class Wire(Protocol):
    """What can be asked; a module is one."""

    def look(
        self, model: str, version: str | None, image: bytes, top_k: int | None, threshold: float | None
    ) -> WireQuestion[Sight]: ...

    def infer(
        self,
        model: str,
        version: str | None,
        inputs: Mapping[str, np.ndarray],
        outputs: Sequence[str] | None,
        priority: int,
    ) -> WireQuestion[dict[str, np.ndarray]]: ...

    def models(self) -> WireQuestion[tuple[RemoteModel, ...]]: ...


class Transport(Protocol):
    """Sends, and waits for the reply. Raises RequestError."""

    def send(self, step: Send) -> Any: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """The same for who awaits."""

    async def send(self, step: Send) -> Any: ...

    async def close(self) -> None: ...


def reach(url: str, api_key: str | None, trust: Trust, own: OwnHeaders | None) -> tuple[Wire, Transport]:
    """How to ask the server at this URL. Raises UsageError; connects to nothing yet."""
    if not url.startswith(_GRPC):
        return http_wire, HttpTransport(http_options(url, api_key, trust), own)
    from convoy.app.client import grpc_wire
    from convoy.app.client.grpc_transport import GrpcTarget, GrpcTransport

    return grpc_wire, GrpcTransport(GrpcTarget.of(url, api_key, trust), own)


def reach_async(url: str, api_key: str | None, trust: Trust, own: OwnHeaders | None) -> tuple[Wire, AsyncTransport]:
    """The same for who awaits."""
    if not url.startswith(_GRPC):
        return http_wire, AsyncHttpTransport(http_options(url, api_key, trust), own)
    from convoy.app.client import grpc_wire
    from convoy.app.client.grpc_transport import AsyncGrpcTransport, GrpcTarget

    return grpc_wire, AsyncGrpcTransport(GrpcTarget.of(url, api_key, trust), own)
