"""The gRPC listener: the inference service and the standard health service on one port.

Imported only when gRPC is wanted and HTTP already listens, because the library takes a while to load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from tritonclient.grpc import service_pb2

from convoy.app.edge.decode_pool import DecodePool
from convoy.app.edge.entry import Entry
from convoy.app.edge.grpc.control import GrpcControl, unsupported
from convoy.app.edge.grpc.gate import GrpcGate, Unary
from convoy.app.edge.grpc.infer import GrpcInference
from convoy.app.edge.grpc.repository import GrpcRepository
from convoy.app.edge.grpc.shared_memory import GrpcSharedMemory
from convoy.app.edge.options import EdgeOptions
from convoy.app.submission.management import ManagedCore

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
# What the standard health service is asked for: the server, or the service by its name.
_HEALTH_NAMES = ("", _SERVICE.full_name)
_WATCH_EVERY_S = 0.25
_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS = 60_000, 20_000


class GrpcServer:
    """One listener over one core."""

    def __init__(self, core: ManagedCore, options: EdgeOptions, *, max_calls: int) -> None:
        self._core = core
        self._pool = DecodePool(options.decode_threads, options.max_decoding)
        self._health = _Health(core)
        self._server = grpc.aio.server(
            options=[
                # One limit for both wires; the library applies it after decompression, too.
                ("grpc.max_receive_message_length", options.body.max_bytes),
                ("grpc.max_send_message_length", -1),
                # Two servers on one port would share the calls at random; better to be told.
                ("grpc.so_reuseport", 0),
                # A client whose machine has gone holds its connection no longer than this.
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ],
            maximum_concurrent_rpcs=max_calls,
        )
        inference = GrpcInference(core, options, self._pool)
        entry = Entry(options)
        methods = {
            "ModelInfer": inference.infer,
            **GrpcControl(core, options.server_name).methods(),
            **GrpcRepository(core, entry.keys).methods(),
            **GrpcSharedMemory(core).methods(),
        }
        handlers = _handlers(GrpcGate(entry), inference, methods)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, host: str, port: int) -> None:
        """Take calls; from then on the core may be ready. Raises RuntimeError when the port is taken."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._server.add_insecure_port(address)
        await self._server.start()
        self._core.listeners_opening -= 1
        self._watching = asyncio.ensure_future(self._health.watch())

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; what still runs has so long to end."""
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        self._pool.close()


def _handlers(gate: GrpcGate, inference: GrpcInference, methods: Mapping[str, Unary]) -> dict[str, Any]:
    """The library's handler for each method of the service, by name."""
    handlers = {}
    for method in _SERVICE.methods:
        name, message = method.name, getattr(service_pb2, method.input_type.name)
        if name == "ModelStreamInfer":
            handlers[name] = gate.stream(name, inference.stream)
        else:
            handlers[name] = gate.unary(name, message, methods.get(name) or unsupported(name))
    return handlers


class _Health(health_aio.HealthServicer):  # type: ignore[misc]
    """The standard health service: serving while the core is ready."""

    def __init__(self, core: ManagedCore) -> None:
        super().__init__()
        self._core = core
        self._was_ready: bool | None = None

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the library's name
        await self._refresh()  # so that a probe never sees what was true a moment ago
        return await super().Check(request, context)

    async def watch(self) -> None:
        """Tell those who watch, until cancelled."""
        while True:
            await self._refresh()
            await asyncio.sleep(_WATCH_EVERY_S)

    async def _refresh(self) -> None:
        is_ready = self._core.ready
        if is_ready == self._was_ready:
            return
        self._was_ready = is_ready
        statuses = health_pb2.HealthCheckResponse
        for name in _HEALTH_NAMES:
            await self.set(name, statuses.SERVING if is_ready else statuses.NOT_SERVING)
