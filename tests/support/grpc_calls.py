"""The protocol over gRPC by its bare stubs, where a client of Triton's would say too much or too little."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from tests.support.servers import Server


@contextmanager
def asking(server: Server) -> Iterator[Any]:
    """The stub of a connection."""
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
