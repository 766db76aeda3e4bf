"""Server reflection: what the port serves, told to tools that have no stubs, such as grpcurl.

The library answers; its answers pass the gate as those of every other method do. It speaks v1alpha, whose messages
are, byte by byte, those of v1, so tools find both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

from grpc_reflection.v1alpha import reflection, reflection_pb2

from convoy.app.edge.grpc.gate import GrpcCall, ReadOn, parse

METHOD = "ServerReflectionInfo"
SERVICE_NAMES = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")


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
