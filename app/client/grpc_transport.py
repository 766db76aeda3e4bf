"""Sends over gRPC, from threads or on an event loop.

What is asked again is settled in `asking`, as over HTTP: the library's own retries are off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import grpc
from tritonclient.grpc import service_pb2_grpc

from convoy.app.client.errors import NOT_A_SERVER, of_grpc_code
from convoy.app.client.own_headers import OwnHeaders, headers_of
from convoy.app.client.retry import Send
from convoy.app.client.trust import Trust
from convoy.models.errors import BodyTooLarge, DeadlineExceeded, RequestError, Unavailable, UsageError
from convoy.models.tls import ClientTls

_PORTS = {"grpc": 8001, "grpcs": 443}
_CHANNEL = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    # A server that has just come back is met at the next try.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # A proxy meant for the internet must not come between a program and localhost.
    ("grpc.enable_http_proxy", 0),
)
# Convoy sends it with every end of a call, so that one without it never reached a server.
_ITS_ID = "x-request-id"
# gRPC's own word (gRFC A6): milliseconds; below 0, or no number, is "do not come back".
_PUSHBACK, _RETRY_AFTER = "grpc-retry-pushback-ms", "retry-after"
_NEVER_S = float("inf")
# PEM of the CA, the key and the chain, as the library takes them.
_Papers: TypeAlias = tuple[bytes | None, bytes | None, bytes | None]


@dataclass(frozen=True)
class GrpcTarget:
    """Where to connect. `papers` None: in the clear; of them the CA None: as the library trusts."""

    url: str
    address: str
    papers: _Papers | None = field(repr=False)
    metadata: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, url: str, api_key: str | None, trust: Trust) -> GrpcTarget:
        """Raises UsageError for a URL, key or trust that cannot be one."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or _PORTS[parts.scheme]
        except ValueError as error:
            raise UsageError(f"the URL {url!r} is none ({error})") from None
        if not host or parts.path.strip("/") or parts.query or parts.username:
            raise UsageError(f"the URL {url!r} should look like grpc://localhost:8001")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("the API key has characters that metadata cannot carry; check where it came from")
        metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return cls(url, address, _papers(trust) if parts.scheme == "grpcs" else None, metadata)

    def open(self, library: Any) -> Any:
        """A channel of `grpc` or of `grpc.aio`."""
        if self.papers is None:
            return library.insecure_channel(self.address, options=_CHANNEL)
        credentials = grpc.ssl_channel_credentials(*self.papers)
        return library.secure_channel(self.address, credentials, options=_CHANNEL)

    def error(self, error: grpc.RpcError, within_s: float) -> RequestError:
        """What became of a call, as the server's error, or as that of who did not reach one."""
        code, words, trailer = error.code(), error.details() or "", dict(error.trailing_metadata() or ())
        if _ITS_ID not in trailer and code is grpc.StatusCode.UNAVAILABLE:
            hint = f"nobody answers at {self.url} ({words}); start it with `convoy serve`, or check the URL"
            if self.papers is not None:  # the library does not tell a handshake that failed from a server that left
                hint += ", who signed its certificate (--ca-file, verify=) and your own (--client-cert-file, cert=)"
            return Unavailable(hint, retry_after_s=0.0)
        if _ITS_ID not in trailer and code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{self.url} did not answer within {within_s:.3g} s; look at the server's log")
        if _ITS_ID not in trailer and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return BodyTooLarge(f"{words}; --max-body-mb of the server is the limit")  # by the library there
        words = words or f"{code.name} without an explanation; {NOT_A_SERVER}"
        return of_grpc_code(code.name, words, _retry_after_s(trailer))


class GrpcTransport:
    """From any number of threads."""

    def __init__(self, target: GrpcTarget, own: OwnHeaders | None) -> None:
        self._target, self._own = target, own
        self._channel = target.open(grpc)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def send(self, step: Send) -> Any:
        """The reply's message. Raises RequestError."""
        try:
            return _call(self._stub, step, self._target, self._own)
        except grpc.RpcError as error:
            raise self._target.error(error, step.within_s) from None

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcTransport:
    """On one event loop: that of the first question."""

    def __init__(self, target: GrpcTarget, own: OwnHeaders | None) -> None:
        self._target, self._own = target, own
        self._channel: Any = None
        self._stub: Any = None

    async def send(self, step: Send) -> Any:
        """The reply's message. Raises RequestError."""
        if self._channel is None:  # the library takes the loop that runs
            self._channel = self._target.open(grpc.aio)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        try:
            return await _call(self._stub, step, self._target, self._own)
        except grpc.RpcError as error:
            raise self._target.error(error, step.within_s) from None

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


def _call(stub: Any, step: Send, target: GrpcTarget, own: OwnHeaders | None) -> Any:
    method: Callable[..., Any] = getattr(stub, step.message.method)
    metadata = (*target.metadata, *headers_of(own).items())
    return method(step.message.request, timeout=step.within_s, metadata=metadata)


def _papers(trust: Trust) -> _Papers:
    if trust is True:
        return None, None, None
    if isinstance(trust, ClientTls):
        return trust.texts()
    raise UsageError(
        "over grpcs:// `verify` must be a file of certificates, or True; a certificate of your own goes into `cert`"
    )


def _retry_after_s(trailer: dict[str, str | bytes]) -> float:
    """Within how many seconds nobody should come back; 0 where the server says nothing of it."""
    if _PUSHBACK in trailer:
        with suppress(ValueError):
            if (pushback_ms := int(trailer[_PUSHBACK])) >= 0:
                return pushback_ms / 1000
        return _NEVER_S
    with suppress(ValueError):
        return max(0.0, float(trailer.get(_RETRY_AFTER, 0)))
    return 0.0
