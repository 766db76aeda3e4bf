"""gRPC: messages of the Open Inference Protocol, sent from threads or on an event loop.

The client's own retry policy applies, as over HTTP; the library's retries are off. docs/protocol.md describes requests
for images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from convoy.app.client.options import OwnHeaders, Trust, headers_of
from convoy.app.client.records import (
    NOT_A_SERVER,
    NamedTensor,
    RemoteModel,
    Sight,
    models_of,
    of_grpc_code,
    sight_of,
    tensors_of,
)
from convoy.app.client.retry import WireQuestion
from convoy.models.errors import BodyTooLarge, DeadlineExceeded, RequestError, Unavailable, UsageError
from convoy.models.tensors import pack
from convoy.models.tls import ClientTls

_TENSOR = service_pb2.ModelInferRequest.InferInputTensor
_OUTPUT = service_pb2.ModelInferRequest.InferRequestedOutputTensor
# Where the value of an option is in a parameter of the protocol.
_FIELDS = {"top_k": "int64_param", "threshold": "double_param", "iou": "double_param", "masks": "string_param"}
_PORTS = {"grpc": 8001, "grpcs": 443}
_CHANNEL = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    # So that the next try finds a server that has just come back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # A proxy meant for the internet must not be used for localhost.
    ("grpc.enable_http_proxy", 0),
)
# Convoy sends it with the end of every call, so without it the call never reached a server.
_ITS_ID = "x-request-id"
# gRPC's own key (gRFC A6), in milliseconds; negative or not a number means: do not retry.
_PUSHBACK, _RETRY_AFTER = "grpc-retry-pushback-ms", "retry-after"
_OF_MODEL = ("name", "version", "state", "reason")
# A method of the service by name, and its request.
_Message: TypeAlias = tuple[str, Any]
# PEM of the CA, the key and the chain, as the library takes them.
_Papers: TypeAlias = tuple[bytes | None, bytes | None, bytes | None]


class GrpcWire:
    """A server over gRPC. Raises UsageError for an invalid URL, key or trust; does not connect yet."""

    def __init__(self, url: str, api_key: str, trust: Trust, own: OwnHeaders | None, *, is_async: bool) -> None:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        if parts.path.strip("/") or parts.query or parts.username:
            raise UsageError(f"the URL {url!r} should look like grpc://localhost:8001")
        self._url, self._own = url, own
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._papers = _papers(trust) if parts.scheme == "grpcs" else None
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel: Any = None
        if not is_async:  # otherwise the first call opens it, on its event loop
            self._open(grpc)

    def look(
        self,
        model: str,
        version: str | None,
        image: bytes,
        options: Mapping[str, int | float | str],
    ) -> WireQuestion[Sight]:
        """Predict by the model's task, with `options` as parameters."""
        request = _request(model, version)
        request.inputs.append(_TENSOR(name="image", datatype="BYTES", shape=[1]))
        request.raw_input_contents.append(bytes(pack((image,))))
        for name, value in options.items():
            setattr(request.parameters[name], _FIELDS[name], value)
        return _asked("ModelInfer", request, _sight)

    def infer(
        self,
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

    def models(self) -> WireQuestion[tuple[RemoteModel, ...]]:
        """The served models, and those that were refused, with the reason."""
        return _asked(
            "RepositoryIndex",
            service_pb2.RepositoryIndexRequest(),
            lambda reply: models_of([{name: getattr(row, name) for name in _OF_MODEL} for row in reply.models]),
        )

    def send(self, message: _Message, within_s: float) -> Any:
        """Send a request and return the reply. Raises RequestError."""
        try:
            return self._call(message, within_s)
        except grpc.RpcError as error:
            raise self._error(error, within_s) from None

    async def send_async(self, message: _Message, within_s: float) -> Any:
        """Like `send`."""
        if self._channel is None:
            self._open(grpc.aio)
        try:
            return await self._call(message, within_s)
        except grpc.RpcError as error:
            raise self._error(error, within_s) from None

    def close(self) -> None:
        self._channel.close()

    async def close_async(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _open(self, library: Any) -> None:
        """Open a channel of `grpc` or of `grpc.aio`."""
        if self._papers is None:
            self._channel = library.insecure_channel(self._address, options=_CHANNEL)
        else:
            credentials = grpc.ssl_channel_credentials(*self._papers)
            self._channel = library.secure_channel(self._address, credentials, options=_CHANNEL)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _call(self, message: _Message, within_s: float) -> Any:
        metadata = (*self._metadata, *headers_of(self._own).items())
        method, request = message
        return getattr(self._stub, method)(request, timeout=within_s, metadata=metadata)

    def _error(self, error: grpc.RpcError, within_s: float) -> RequestError:
        """The error of a call: the server's, or why no server was reached."""
        code, words, trailer = error.code(), error.details() or "", dict(error.trailing_metadata() or ())
        if _ITS_ID not in trailer and code is grpc.StatusCode.UNAVAILABLE:
            hint = f"cannot connect to {self._url} ({words}); start it with `convoy serve`, or check the URL"
            if self._papers is not None:  # the library does not distinguish a failed handshake from a server that left
                hint += ", the CA of its certificate (--ca-file, verify=) and your own (--client-cert-file, cert=)"
            return Unavailable(hint, retry_after_s=0.0)
        if _ITS_ID not in trailer and code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{self._url} did not answer within {within_s:.3g} s; check the server's log")
        if _ITS_ID not in trailer and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return BodyTooLarge(f"{words}; the limit is the server's --max-body-mb")  # raised by the library there
        words = words or f"{code.name} without an explanation; {NOT_A_SERVER}"
        return of_grpc_code(code.name, words, _retry_after_s(trailer), str(trailer.get("error-code", "")))


def _request(model: str, version: str | None) -> Any:
    return service_pb2.ModelInferRequest(model_name=model, model_version=version or "")


def _asked(method: str, request: Any, read: Any) -> WireQuestion[Any]:
    # The call's own deadline tells the server how much time is left.
    return WireQuestion(lambda _: (method, request), read)


def _sight(reply: Any) -> Sight:
    if len(reply.raw_output_contents) != 1:
        raise RequestError(f"the response is not a prediction; {NOT_A_SERVER}")
    (packed,) = _tensors(reply).values()
    try:
        document = json.loads(packed.item())
    except (ValueError, TypeError):
        raise RequestError(f"the response is not a prediction; {NOT_A_SERVER}") from None
    return sight_of(document)


def _tensors(reply: Any) -> dict[str, np.ndarray]:
    if len(reply.outputs) != len(reply.raw_output_contents):
        raise RequestError(f"the response does not follow the protocol; {NOT_A_SERVER}")
    return {
        output.name: NamedTensor(output.name, output.datatype, list(output.shape), data).array()
        for output, data in zip(reply.outputs, reply.raw_output_contents, strict=True)
    }


def _papers(trust: Trust) -> _Papers:
    if trust is True:
        return None, None, None
    if isinstance(trust, ClientTls):
        return trust.texts()
    raise UsageError(
        "over grpcs:// `verify` must be a file with certificates, or True; pass your client certificate in `cert`"
    )


def _retry_after_s(trailer: dict[str, str | bytes]) -> float:
    """Seconds until the next try; 0 if the server does not say."""
    if _PUSHBACK in trailer:
        with suppress(ValueError):
            if (pushback_ms := int(trailer[_PUSHBACK])) >= 0:
                return pushback_ms / 1000
        return float("inf")  # never
    with suppress(ValueError):
        return max(0.0, float(trailer.get(_RETRY_AFTER, 0)))
    return 0.0
