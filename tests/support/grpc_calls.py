"""The protocol over gRPC: requests for models whose input is called x, how a call ends, and servers that are played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.servers import Server


@contextmanager
def asking(server: Server) -> Iterator[Any]:
    """The bare stub of a connection, where a client of Triton's would say too much or too little."""
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@contextmanager
def answering(
    servicer: object, add: Callable[..., None] = service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server
) -> Iterator[str]:
    """The address of a server that answers by these methods, as long as the body lasts."""
    server = grpc.server(ThreadPoolExecutor(4))
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def request(model: str, array: np.ndarray, dtype: str = "FP32", **fields: Any) -> Any:
    """A raw request as a message; `fields` replace its own."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype=dtype, shape=array.shape)
    own = {"model_name": model, "inputs": [tensor], "raw_input_contents": [array.tobytes()]}
    return service_pb2.ModelInferRequest(**{**own, **fields})


def given(name: str, array: np.ndarray, dtype: str = "FP32") -> triton.InferInput:
    """An input as Triton's client takes it."""
    return triton.InferInput(name, list(array.shape), dtype).set_data_from_numpy(array)


def row(value: float = 0.0, name: str = "x") -> triton.InferInput:
    """One sample of the fake model `rows`."""
    return given(name, np.full((1, 4), value, np.float32))


def status_of(client: triton.InferenceServerClient, model: str = "rows", **options: Any) -> str:
    """How a request for one sample ends: `OK`, or the name of its status."""
    try:
        client.infer(model, **{"inputs": [row()], **options})
    except triton.InferenceServerException as error:
        return str(error.status()).removeprefix("StatusCode.")
    return "OK"
