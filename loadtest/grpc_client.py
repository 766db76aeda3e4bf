"""The gRPC client for everything but the load. /metrics is only available over HTTP."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2, service_pb2_grpc

from convoy.loadtest import bodies
from convoy.loadtest.answers import AnswerCheck
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.grpc_channel import channel_options, open_channel
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.problems import one_line
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.server_side import ProcessReading, Snapshot, TriedRequests, inputs_of, snapshot, without_protocol
from convoy.models.errors import JobError, UsageError

# An overloaded server can be measured.
SHED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


class GrpcServerClient:
    """`ServerClient` over gRPC."""

    def __init__(self, endpoint: Endpoint, options: LoadTestOptions) -> None:
        self.endpoint = endpoint
        self._timeout_s = options.timeout_s
        self._metadata = tuple((name.lower(), value) for name, value in bodies.auth_headers(options.api_key))
        self._channel = open_channel(grpc, endpoint, channel_options(endpoint))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def server(self) -> dict[str, object]:
        try:
            return _document(self._call("ServerMetadata", service_pb2.ServerMetadataRequest()))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise without_protocol(self.endpoint.url) from None
            raise self._unexpected(error) from None

    def models(self) -> list[str] | None:
        try:
            index = self._call("RepositoryIndex", service_pb2.RepositoryIndexRequest(ready=True))
        except grpc.RpcError:
            return None
        return sorted({model.name for model in index.models if model.state in ("", "READY")})

    def metadata(self, model: str) -> dict[str, object] | None:
        try:
            return _document(self._call("ModelMetadata", service_pb2.ModelMetadataRequest(name=model)))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return None
            raise self._unexpected(error) from None

    def try_requests(self, model: str, metadata: dict[str, object], options: LoadTestOptions) -> TriedRequests:
        if options.body in ("image", "json"):
            raise UsageError(f"--body {options.body} is for HTTP; leave it out, gRPC always sends binary tensors")
        if options.images is not None or options.deadline_ms is not None:
            raise UsageError("--images and --deadline-ms are for HTTP; leave them out over gRPC")
        inputs = inputs_of(metadata)
        requests = [infer_message(model, inputs, tensors) for tensors in bodies.draw_tensors(inputs, options.seed)]
        try:
            answer = self._call("ModelInfer", service_pb2.ModelInferRequest.FromString(requests[0]))
            if not answer.outputs:
                raise JobError(f"{self.endpoint.url} answered without outputs; it cannot be tested like this")
        except grpc.RpcError as error:
            if error.code() not in SHED:
                raise self._unexpected(error) from None
        return TriedRequests("binary", RequestPool(requests, AnswerCheck("infer"), "grpc", self._metadata))

    def snapshot(self, model: str) -> Snapshot | None:
        try:
            statistics = self._call("ModelStatistics", service_pb2.ModelStatisticsRequest(name=model))
        except grpc.RpcError:
            return None
        return snapshot(_document(statistics), "", model)

    def processes(self) -> tuple[ProcessReading, ...]:
        """Always empty: the protocol has no such figures, and the address of /metrics is not known."""
        return ()

    def _call(self, method: str, message: Any) -> Any:
        return getattr(self._stub, method)(message, timeout=self._timeout_s, metadata=self._metadata)

    def _unexpected(self, error: Any) -> JobError:
        code, words = error.code().name, one_line(error.details() or "")
        if code == "DEADLINE_EXCEEDED":
            return JobError(
                f"{self.endpoint.url} did not answer within {self._timeout_s:g} s; "
                "see the log of the server, or raise --timeout"
            )
        hint = {
            "UNAUTHENTICATED": "give --api-key-file",
            "UNAVAILABLE": "check that --url is a gRPC address of an inference server",
        }.get(code, "see the log of the server")
        return JobError(f"{self.endpoint.url} answered {code}: {words}; {hint}")


def _document(message: Any) -> dict[str, object]:
    found = MessageToDict(message, preserving_proto_field_name=True)
    assert isinstance(found, dict)
    return found


def infer_message(model: str, inputs: list[bodies.Input], tensors: list[bodies.Tensor]) -> bytes:
    """The bytes of one request."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for one, tensor in zip(inputs, tensors, strict=True):
        request.inputs.add(name=one.name, datatype=one.datatype, shape=one.sent_shape)
        request.raw_input_contents.append(tensor.tobytes())
    message = request.SerializeToString()
    assert isinstance(message, bytes)
    return message
