"""The repository extension over gRPC; `repository` has its HTTP routes."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2

from convoy.app.core import Core
from convoy.app.edge.access import Authenticator
from convoy.app.edge.grpc.gate import GrpcCall, Unary
from convoy.app.edge.oip import documents
from convoy.app.edge.oip.repository import check_repository, load_model, unload_model


class GrpcRepository:
    """One method per row of `methods`."""

    def __init__(self, core: Core, keys: Authenticator) -> None:
        self._core, self._keys = core, keys

    def methods(self) -> dict[str, Unary]:
        return {
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }

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


def _parameters(message: Any) -> dict[str, object]:
    """A map of ModelRepositoryParameter as plain values."""
    kinds = ((name, one, one.WhichOneof("parameter_choice")) for name, one in message.parameters.items())
    return {name: getattr(one, kind) if kind else None for name, one, kind in kinds}
