"""Plays calls over gRPC without a stub: bytes go in, and what comes back is shown as the protocol's own messages."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf import text_format
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from tests.oracle.records import Answer, GrpcAsk, Part

INFERENCE, HEALTH = "/inference.GRPCInferenceService/", "/grpc.health.v1.Health/"
_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
METHODS = tuple(method.name for method in _SERVICE.methods)
_OUTPUTS = {INFERENCE + one.name: getattr(service_pb2, one.output_type.name) for one in _SERVICE.methods}
_OUTPUTS |= {HEALTH + name: health_pb2.HealthCheckResponse for name in ("Check", "Watch")}
# What the library at the client makes of the answer, and not the server.
_LIBRARYS = frozenset({"grpc-accept-encoding", "accept-encoding"})


class GrpcPlayer:
    """One client of one server."""

    def __init__(self, port: int) -> None:
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_retries", 0),
        ]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)

    def play(self, ask: GrpcAsk) -> Answer:
        metadata = tuple(zip(ask.metadata[::2], ask.metadata[1::2], strict=True))
        compression = grpc.Compression.Gzip if ask.is_compressed else None
        if ask.is_stream:
            call = self._channel.stream_stream(ask.method)(
                iter(ask.messages), timeout=ask.timeout_s, metadata=metadata, compression=compression
            )
            return _ended(ask, call, _taken(call))
        call = self._channel.unary_stream(ask.method)(
            ask.messages[0], timeout=ask.timeout_s, metadata=metadata, compression=compression
        )
        # The health service's watch never ends by itself; every other call has one message.
        first = next(iter(_taken(call)), None)
        if ask.method.endswith("/Watch"):
            call.cancel()
        return _ended(ask, call, [] if first is None else [first])

    def close(self) -> None:
        self._channel.close()


def _taken(call: Any) -> Iterable[bytes]:
    with suppress(grpc.RpcError):  # its code is asked for below
        yield from call


def _ended(ask: GrpcAsk, call: Any, messages: Iterable[bytes]) -> Answer:
    answers = [Part(f"message {number}", _shown(ask.method, data)) for number, data in enumerate(messages)]
    initial = _lines("initial", call.initial_metadata())
    trailing = _lines("trailing", call.trailing_metadata())
    return (*answers, Part("\n".join([f"{call.code()} {call.details()}", *initial, *trailing])))


def _lines(kind: str, metadata: Any) -> list[str]:
    return sorted(f"{kind} {name}: {value!r}" for name, value in metadata or () if name not in _LIBRARYS)


def _shown(method: str, data: bytes) -> bytes:
    """Fields in their order; the bytes of a map have none."""
    output = _OUTPUTS.get(method)
    if output is None:
        return data
    message = output.FromString(data)
    return text_format.MessageToString(message, print_unknown_fields=True).encode()
