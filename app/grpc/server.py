"""The gRPC listener: the inference service, the standard health service and reflection on one port.

The methods that do not infer are here, too: they answer with the same documents as the HTTP routes, in protobuf's form.
Imported only when gRPC is wanted and HTTP already listens, because the library takes a while to load.
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
    """`methods` has one for each name in the protocol that this server offers and that does not infer."""

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
        # Clients tidy up all regions before they begin; that there are none is no error.
        return service_pb2.CudaSharedMemoryUnregisterResponse()


def _parameters(message: Any) -> dict[str, object]:
    """A map of ModelRepositoryParameter as plain values."""
    kinds = ((name, one, one.WhichOneof("parameter_choice")) for name, one in message.parameters.items())
    return {name: getattr(one, kind) if kind else None for name, one, kind in kinds}


def unsupported(method: str) -> Unary:
    """A method of the protocol that this server does not offer."""

    async def refuse(_: Any, __: GrpcCall) -> Any:
        raise Unsupported(f"{method} is not supported by this server; see docs/protocol.md")

    return refuse


class GrpcReflection:
    """Tells of these services, and of itself."""

    def __init__(self, services: Iterable[str]) -> None:
        self._library = reflection.aio.ReflectionServicer((*services, reflection.SERVICE_NAME))

    async def stream(self, read: ReadOn, _: GrpcCall) -> AsyncGenerator[bytes]:
        """One answer per question, in their order."""

        async def questions() -> AsyncGenerator[Any]:
            while (data := await read()) is not None:
                yield parse(reflection_pb2.ServerReflectionRequest, data)

        async for answer in self._library.ServerReflectionInfo(questions(), None):
            yield answer.SerializeToString()


_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
# What the standard health service is asked for: the server, or the service by its name.
_HEALTH_NAMES = ("", _SERVICE.full_name)
# Calls of one connection at once; a client keeps further ones back. Cancelled calls count until they have been seen, so
# the library refuses a client that begins and resets calls without end, at little cost. Above the limit for pending
# calls it cancels calls at random, so that limit is higher than what many such clients can bring.
_MOST_STREAMS = 128
_MOST_PENDING = 64 * _MOST_STREAMS


class GrpcServer:
    """One listener over one core; the decoder is the process's, which others use, too."""

    def __init__(self, core: Core, options: ServeOptions, decoder: Decoder, *, max_calls: int) -> None:
        self._core, self._options = core, options
        self._health = _Health(core, max_calls)
        self._server = grpc.aio.server(
            options=[
                # One limit for both wires; the library applies it after decompression, too. It takes no larger number
                # than this one, which is protobuf's own limit.
                ("grpc.max_receive_message_length", min(options.body.max_bytes, (1 << 31) - 1)),
                ("grpc.max_send_message_length", -1),
                # Two servers on one port would share the calls at random; better to be told.
                ("grpc.so_reuseport", 0),
                # What is not read yet is held up at 64 KiB a call, however fast the line is.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.max_concurrent_streams", _MOST_STREAMS),
                ("grpc.server.max_pending_requests", _MOST_PENDING),
                ("grpc.server.max_pending_requests_hard_limit", 2 * _MOST_PENDING),
                # A client whose machine has gone holds its connection no longer than this.
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
        """Take calls; from then on the core may be ready. Raises RuntimeError when the port is taken."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self._options.tls is None:
            self._server.add_insecure_port(address)
        else:
            self._server.add_secure_port(address, _credentials(self._options))
        await self._server.start()
        self._core.listeners_opening -= 1
        self._watching = asyncio.ensure_future(self._health.watch())

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and end those that still run after `grace_s`."""
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _credentials(options: ServeOptions) -> Any:
    """What TLS shows and asks, by the options as they are whenever a client comes."""
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
    assert tls is not None  # it begins and ends with the server
    ca = None if tls.client_ca is None else tls.client_ca.encode()
    return grpc.ssl_server_certificate_configuration([(tls.key.encode(), tls.chain.encode())], root_certificates=ca)


class _Services(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Where a call's handler is found. While too many run it is one that refuses before a message is read."""

    def __init__(self, gate: GrpcGate, handlers: Mapping[str, Any]) -> None:
        """`handlers`: by path, as `/service/method`."""
        self._gate, self._handlers = gate, handlers

    def service(self, details: Any) -> Any:
        path = details.method
        if self._gate.is_full and path in self._handlers:
            return self._gate.refusal(path.rpartition("/")[2])
        return self._handlers.get(path)


def _handlers(gate: GrpcGate, inference: GrpcInference, methods: Mapping[str, Unary]) -> dict[str, Any]:
    """The library's handler for each method of the service, by its path."""
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
    """The standard health service: serving while the core is ready."""

    def __init__(self, core: Core, max_watchers: int) -> None:
        super().__init__()
        self._core = core
        self._max_watchers, self._watchers = max_watchers, 0
        self._was_ready: bool | None = None

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the library's name
        await self._refresh()  # so that a probe never sees what was true a moment ago
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
        """Tell the watchers about changes, until cancelled."""
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
