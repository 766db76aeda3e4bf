"""Questions and answers over gRPC: messages of the Open Inference Protocol. Sends nothing.

docs/protocol.md says how an image is asked for there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from tritonclient.grpc import service_pb2

from convoy.app.client.errors import NOT_A_SERVER
from convoy.app.client.records import RemoteModel, Sight
from convoy.app.client.response import sight_of
from convoy.app.client.retry import WireQuestion
from convoy.app.client.tensors import NamedTensor, array_from, tensors_of
from convoy.models.errors import RequestError
from convoy.models.tensors import pack

_TENSOR = service_pb2.ModelInferRequest.InferInputTensor
_OUTPUT = service_pb2.ModelInferRequest.InferRequestedOutputTensor


class GrpcMessage(NamedTuple):
    """What is to be sent: a method of the service by its name, and its request."""

    method: str
    request: Any


def look(
    model: str, version: str | None, image: bytes, top_k: int | None, threshold: float | None
) -> WireQuestion[Sight]:
    """What is in an image, as the model's task has it."""
    request = _request(model, version)
    request.inputs.append(_TENSOR(name="image", datatype="BYTES", shape=[1]))
    request.raw_input_contents.append(bytes(pack((image,))))
    if top_k is not None:
        request.parameters["top_k"].int64_param = top_k
    if threshold is not None:
        request.parameters["threshold"].double_param = threshold
    return _asked("ModelInfer", request, _sight)


def infer(
    model: str,
    version: str | None,
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str] | None,
    priority: int,
) -> WireQuestion[dict[str, np.ndarray]]:
    """Raises InvalidRequest."""
    request = _request(model, version)
    for name, datatype, shape, data in tensors_of(inputs):
        request.inputs.append(_TENSOR(name=name, datatype=datatype, shape=shape))
        request.raw_input_contents.append(data)
    request.outputs.extend(_OUTPUT(name=name) for name in outputs or ())
    if priority:
        request.parameters["priority"].int64_param = priority
    return _asked("ModelInfer", request, _tensors)


def models() -> WireQuestion[tuple[RemoteModel, ...]]:
    """What is served, and what was refused and why."""
    return _asked("RepositoryIndex", service_pb2.RepositoryIndexRequest(), _models)


def _request(model: str, version: str | None) -> Any:
    return service_pb2.ModelInferRequest(model_name=model, model_version=version or "")


def _asked(method: str, request: Any, read: Any) -> WireQuestion[Any]:
    # The call's own deadline tells the server how much time is left.
    return WireQuestion(lambda _: GrpcMessage(method, request), read)


def _sight(reply: Any) -> Sight:
    if len(reply.raw_output_contents) != 1:
        raise RequestError(f"the answer is not a prediction; {NOT_A_SERVER}")
    (packed,) = _tensors(reply).values()
    try:
        document = orjson.loads(packed.item())
    except (ValueError, TypeError):
        raise RequestError(f"the answer is not a prediction; {NOT_A_SERVER}") from None
    return sight_of(document)


def _tensors(reply: Any) -> dict[str, np.ndarray]:
    if len(reply.outputs) != len(reply.raw_output_contents):
        raise RequestError(f"the answer is not a protocol's; {NOT_A_SERVER}")
    return {
        output.name: array_from(NamedTensor(output.name, output.datatype, list(output.shape), data))
        for output, data in zip(reply.outputs, reply.raw_output_contents, strict=True)
    }


def _models(reply: Any) -> tuple[RemoteModel, ...]:
    try:
        return tuple(RemoteModel(one.name, int(one.version), one.state, one.reason) for one in reply.models)
    except ValueError:
        raise RequestError(f"the answer is not a list of models; {NOT_A_SERVER}") from None
