"""The gRPC listener: inference, standard health and reflection on one port.

The methods that do not infer are here and answer with the same documents as the HTTP routes. Imported only when gRPC is
wanted and HTTP already listens, because the library takes a while to load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection, reflection_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from convoy.app.calls.access import AccessLog, Authenticator, ServeOptions
from convoy.app.calls.call import find_served
from convoy.app.core import Core
from convoy.app.grpc.gate import GrpcCall, GrpcGate, ReadOn, Unary, parse
from convoy.app.grpc.infer import GrpcInference
from convoy.app.grpc.room import MessageRoom
from convoy.app.pictures.decoder import Decoder
from convoy.app.protocol import documents
from convoy.app.protocol.repository import check_repository, load_model, unload_model
from convoy.models.errors import Unsupported
from convoy.models.tls import ServerTls

METHOD = "ServerReflectionInfo"
SERVICE_NAMES = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")


class GrpcServices:
    """The service's methods that do not infer. `methods` has one for each protocol method that this server offers."""

    def __init__(self, core: Core, server_name: str, keys: Authenticator) -> None:
        self._core, self._server_name, self._keys = core, server_name, keys
        self.methods: dict[str, Unary] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": self._status,
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
        }

    # What is served

    async def _server_live(self, _: Any, __: GrpcCall) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    async def _server_ready(self, _: Any, __: GrpcCall) -> Any:
        return service_pb2.ServerReadyResponse(ready=self._core.ready)

    async def _model_ready(self, message: Any, _: GrpcCall) -> Any:
        served = find_served(self._core.catalog, message.name, message.version or None)
        return service_pb2.ModelReadyResponse(ready=served.ready and not self._core.leaving)

    async def _server_metadata(self, _: Any, __: GrpcCall) -> Any:
        return service_pb2.ServerMetadataResponse(**documents.server_metadata(self._core, self._server_name))

    async def _model_metadata(self, message: Any, _: GrpcCall) -> Any:
        document = documents.model_metadata(self._core, message.name, message.version or None)
        return ParseDict(document, service_pb2.ModelMetadataResponse())

    async def _model_config(self, message: Any, _: GrpcCall) -> Any:
        served = find_served(self._core.catalog, message.name, message.version or None)
        document = documents.model_config(served, self._core.control.policy_of(message.name))
        return service_pb2.ModelConfigResponse(config=ParseDict(document, model_config_pb2.ModelConfig()))

    async def _model_statistics(self, message: Any, _: GrpcCall) -> Any:
        document = documents.model_statistics(self._core, message.name or None, message.version or None)
        return ParseDict(document, service_pb2.ModelStatisticsResponse())

    # The repository

    async def _index(self, message: Any, _: GrpcCall) -> Any:
        check_repository(message.repository_name)
        models = await documents.repository_index(self._core, only_ready=message.ready)
        return ParseDict({"models": models}, service_pb2.RepositoryIndexResponse())

    async def _load(self, message: Any, call: GrpcCall) -> Any:
        self._check(message, call)
        await load_model(self._core, message.model_name, _parameters(message))
        return service_pb2.RepositoryModelLoadResponse()

    async def _unload(self, message: Any, call: GrpcCall) -> Any:
        self._check(message, call)
        await unload_model(self._core, message.model_name, _parameters(message))
        return service_pb2.RepositoryModelUnloadResponse()

    def _check(self, message: Any, call: GrpcCall) -> None:
        check_repository(message.repository_name)
        self._core.control.check_explicit()
        self._keys.check_admin(call.metadata.get("authorization"))

    # Shared memory

    async def _status(self, message: Any, _: GrpcCall) -> Any:
        response = service_pb2.SystemSharedMemoryStatusResponse()
        for region in documents.regions(self._core.shared_memory.status(message.name or None)):
            status = service_pb2.SystemSharedMemoryStatusResponse.RegionStatus(**region)
            response.regions[region["name"]].CopyFrom(status)
        return response

    async def _register(self, message: Any, _: GrpcCall) -> Any:
        self._core.shared_memory.register(message.name, message.key, message.offset, message.byte_size)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    async def _unregister(self, message: Any, _: GrpcCall) -> Any:
        self._core.shared_memory.unregister(message.name or None)
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    async def _cuda_status(self, message: Any, _: GrpcCall) -> Any:
        if message.name:
            raise documents.no_cuda_region(message.name)
        return service_pb2.CudaSharedMemoryStatusResponse()

    async def _cuda_register(self, _: Any, __: GrpcCall) -> Any:
        raise Unsupported(documents.CUDA_IS_NOT_OFFERED)

    async def _cuda_unregister(self, _: Any, __: GrpcCall) -> Any:
        # Clients unregister all regions before they begin; an empty set is not an error.
        return service_pb2.CudaSharedMemoryUnregisterResponse()


def _parameters(message: Any) -> dict[str, object]:
    """Convert a map of ModelRepositoryParameter to plain values."""
    kinds = ((name, one, one.WhichOneof("parameter_choice")) for name, one in message.parameters.items())
    return {name: getattr(one, kind) if kind else None for name, one, kind in kinds}


def unsupported(method: str) -> Unary:
    """The handler for a method of the protocol that this server does not offer."""

    async def refuse(_: Any, __: GrpcCall) -> Any:
        raise Unsupported(f"{method} is not supported by this server; see docs/protocol.md")

    return refuse


class GrpcReflection:
    """The reflection service, for these services and itself."""

    def __init__(self, services: Iterable[str]) -> None:
        self._library = reflection.aio.ReflectionServicer((*services, reflection.SERVICE_NAME))

    async def stream(self, read: ReadOn, _: GrpcCall) -> AsyncGenerator[bytes]:
        """Answer each question, in their order."""

        async def questions() -> AsyncGenerator[Any]:
            while (data := await read()) is not None:
                yield parse(reflection_pb2.ServerReflectionRequest, data)

        async for answer in self._library.ServerReflectionInfo(questions(), None):
            yield answer.SerializeToString()


_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
# The names under which the standard health service answers: the server and the service.
_HEALTH_NAMES = ("", _SERVICE.full_name)
# Limits concurrent calls per connection; clients queue further ones. Cancelled calls count until they are processed, so
# the library cheaply refuses clients that begin and reset calls without end. Beyond its limit for pending calls the
# library cancels calls at random, so that limit is higher than what many such clients can reach.
_MOST_STREAMS = 128
_MOST_PENDING = 64 * _MOST_STREAMS


class GrpcServer:
    """One gRPC listener of a core. It shares the process's decoder."""

    def __init__(self, core: Core, options: ServeOptions, decoder: Decoder, *, max_calls: int) -> None:
        self._core, self._options = core, options
        self._health = _Health(core, max_calls)
        self._server = grpc.aio.server(
            options=[
                # The same limit as for HTTP, applied after decompression. The library takes at most protobuf's own
                # limit.
                ("grpc.max_receive_message_length", min(options.body.max_bytes, (1 << 31) - 1)),
                ("grpc.max_send_message_length", -1),
                # Two servers on one port would share calls at random; an error is better.
                ("grpc.so_reuseport", 0),
                # Limits unread data to 64 KiB per call, however fast the connection is.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.max_concurrent_streams", _MOST_STREAMS),
                ("grpc.server.max_pending_requests", _MOST_PENDING),
                ("grpc.server.max_pending_requests_hard_limit", 2 * _MOST_PENDING),
                # Closes the connection of a client that has disappeared after this time.
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
            ],
        )
        inference = GrpcInference(core, options, decoder)
        access_log = AccessLog(options)
        methods = GrpcServices(core, options.server_name, access_log.keys).methods
        room = MessageRoom(core.slab, options.body)
        gate = GrpcGate(
            *(access_log, room, max_calls, inference.turned_away, core.current_load),
            lambda call: inference.begin_span(call) if call.method == "ModelInfer" else None,
        )
        told = GrpcReflection((_SERVICE.full_name, health.SERVICE_NAME))
        handlers = _handlers(gate, inference, methods)
        handlers |= {f"/{name}/{METHOD}": gate.stream(METHOD, told.stream) for name in SERVICE_NAMES}
        self._server.add_generic_rpc_handlers((_Services(gate, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, host: str, port: int) -> None:
        """Start to listen; then the core may be ready. Raises RuntimeError if the port is taken."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self._options.tls is None:
            self._server.add_insecure_port(address)
        else:
            self._server.add_secure_port(address, _credentials(self._options))
        await self._server.start()
        self._core.listeners_opening -= 1
        self._watching = asyncio.ensure_future(self._health.watch())

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls and cancel those that still run after `grace_s`."""
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _credentials(options: ServeOptions) -> Any:
    """TLS credentials, read from the options for each new connection."""
    shown = options.tls

    def changed() -> Any:
        nonlocal shown
        if options.tls is shown:
            return None
        shown = options.tls
        return _certificates(shown)

    asks = shown is not None and shown.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(_certificates(shown), changed, require_client_authentication=asks)


def _certificates(tls: ServerTls | None) -> Any:
    assert tls is not None  # lives as long as the server
    ca = None if tls.client_ca is None else tls.client_ca.encode()
    return grpc.ssl_server_certificate_configuration([(tls.key.encode(), tls.chain.encode())], root_certificates=ca)


class _Services(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a call. At the limit it returns a handler that refuses without reading a message."""

    def __init__(self, gate: GrpcGate, handlers: Mapping[str, Any]) -> None:
        """`handlers` maps paths such as `/service/method` to handlers."""
        self._gate, self._handlers = gate, handlers

    def service(self, details: Any) -> Any:
        path = details.method
        if self._gate.is_full and path in self._handlers:
            return self._gate.refusal(path.rpartition("/")[2])
        return self._handlers.get(path)


def _handlers(gate: GrpcGate, inference: GrpcInference, methods: Mapping[str, Unary]) -> dict[str, Any]:
    """The library's handlers for the service's methods, by path."""
    handlers: dict[str, Any] = {}
    for method in _SERVICE.methods:
        name, message = method.name, getattr(service_pb2, method.input_type.name)
        if name == "ModelStreamInfer":
            handler = gate.stream(name, inference.stream)
        elif name == "ModelInfer":
            handler = gate.raw_unary(name, inference.infer)
        else:
            handler = gate.unary(name, message, methods.get(name) or unsupported(name))
        handlers[f"/{_SERVICE.full_name}/{name}"] = handler
    return handlers


class _Health(health_aio.HealthServicer):  # type: ignore[misc]
    """The standard health service: SERVING while the core is ready."""

    def __init__(self, core: Core, max_watchers: int) -> None:
        super().__init__()
        self._core = core
        self._max_watchers, self._watchers = max_watchers, 0
        self._was_ready: bool | None = None

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the library's name
        await self._refresh()  # probes must never see a stale state
        return await super().Check(request, context)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - the library's name
        if self._watchers >= self._max_watchers:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the limit of {self._watchers} health watches is reached; retry later",
            )
        self._watchers += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watchers -= 1

    async def watch(self) -> None:
        """Notify watchers about changes until cancelled."""
        while True:
            await self._refresh()
            await asyncio.sleep(0.25)

    async def _refresh(self) -> None:
        is_ready = self._core.ready
        if is_ready == self._was_ready:
            return
        self._was_ready = is_ready
        statuses = health_pb2.HealthCheckResponse
        for name in _HEALTH_NAMES:
            await self.set(name, statuses.SERVING if is_ready else statuses.NOT_SERVING)
