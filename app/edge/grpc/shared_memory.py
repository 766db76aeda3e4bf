"""The shared memory extensions over gRPC; the regions are the same as over HTTP."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2

from convoy.app.core import Core
from convoy.app.edge.grpc.gate import GrpcCall, Unary
from convoy.app.edge.oip import documents
from convoy.models.errors import Unsupported


class GrpcSharedMemory:
    """One method per row of `methods`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def methods(self) -> dict[str, Unary]:
        return {
            "SystemSharedMemoryStatus": self._status,
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
        }

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
