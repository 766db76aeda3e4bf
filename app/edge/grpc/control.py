"""The gRPC methods that do not infer: health, metadata, configuration, statistics, the repository.

They answer with the same documents as the HTTP routes, in protobuf's form.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import ParseDict
from tritonclient.grpc import model_config_pb2, service_pb2

from convoy.app.core import Core
from convoy.app.edge.grpc.gate import GrpcCall, Unary
from convoy.app.edge.oip import documents
from convoy.app.edge.oip.lookup import find_served
from convoy.app.edge.oip.model_config import model_config
from convoy.models.errors import Unsupported


class GrpcControl:
    """One method per row of `methods`."""

    def __init__(self, core: Core, server_name: str) -> None:
        self._core, self._server_name = core, server_name

    def methods(self) -> dict[str, Unary]:
        return {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
        }

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


def unsupported(method: str) -> Unary:
    """A method of the protocol that this server does not offer."""

    async def refuse(_: Any, __: GrpcCall) -> Any:
        raise Unsupported(f"{method} is not offered by this server; docs/protocol.md lists what is")

    return refuse
