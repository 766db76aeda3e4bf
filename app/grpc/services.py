"""The gRPC methods that do not infer: health, metadata, configuration, statistics, the repository.

They answer with the same documents as the HTTP routes, in protobuf's form.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import ParseDict
from tritonclient.grpc import model_config_pb2, service_pb2

from convoy.app.calls.access import Authenticator
from convoy.app.calls.call import find_served
from convoy.app.core import Core
from convoy.app.grpc.gate import GrpcCall, Unary
from convoy.app.protocol import documents
from convoy.app.protocol.documents import model_config
from convoy.app.protocol.repository import check_repository, load_model, unload_model
from convoy.models.errors import Unsupported


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
        document = model_config(served, self._core.control.policy_of(message.name))
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
        raise Unsupported(f"{method} is not offered by this server; docs/protocol.md lists what is")

    return refuse
