"""Calls over gRPC: every method, unary and in streams, right and wrong, with metadata, compressed, no message."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from tests.e2e.test_grpc import TYPED_FIELDS
from tests.oracle.asks_tensors import REGION_BYTES
from tests.oracle.session import Ask, call, region, stream
from tests.support.wire_forms import DTYPES, Sample, extremes, nothing, scalar

_METADATA = {"x-request-id": "mine", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
_NOT_THERE = (
    *("TraceSetting", "LogSettings", "CudaSharedMemoryStatus", "CudaSharedMemoryRegister"),
    *("CudaSharedMemoryUnregister", "NoSuchMethod"),
)
_PARAMETERS = (
    *(("priority", 1), ("priority", "1"), ("timeout", 60_000_000), ("timeout", 1), ("timeout", -1)),
    *(("own", "text"), ("triton_mine", True), ("triton_enable_empty_final_response", True)),
    *(("sequence_id", 3), ("share", 0.5)),
)


def grpc_calls(given: str, target: str) -> list[Ask]:
    """Both are the names of regions that exist; see `asks_tensors.tensors`."""
    return [*_about(), *_requests(), *_tensors(), *_shared(given, target), *_streams()]


def infer(model: str, sample: Sample, **fields: Any) -> Any:
    """A ModelInferRequest with raw contents; `fields` replace its own."""
    own = {"model_name": model, "inputs": [_tensor(sample)], "raw_input_contents": [sample.data]}
    return pb.ModelInferRequest(**{**own, **fields})


def add_sub(rows: int = 1, **fields: Any) -> Any:
    """A good request for the model of two inputs."""
    sample = Sample("INT32", (rows, 16), np.arange(16 * rows, dtype=np.int32).tobytes())
    own = {"inputs": [_tensor(sample, "INPUT0"), _tensor(sample, "INPUT1")], "raw_input_contents": [sample.data] * 2}
    return pb.ModelInferRequest(**{"model_name": "simple", **own, **fields})


def _tensor(sample: Sample, name: str = "x", **fields: Any) -> Any:
    own = {"name": name, "datatype": sample.dtype, "shape": sample.shape}
    return pb.ModelInferRequest.InferInputTensor(**{**own, **fields})


def _wanted(name: str, **parameters: Any) -> Any:
    return _with(pb.ModelInferRequest.InferRequestedOutputTensor(name=name), **parameters)


def _with(message: Any, **parameters: Any) -> Any:
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(type(value), "string_param")
        setattr(message.parameters[key], kind, value)
    return message


def _about() -> list[Ask]:
    asks = [
        call(method, health_pb2.HealthCheckRequest(service=service), f"of {service!r}")
        for service in ("", "inference.GRPCInferenceService", "nobody")
        for method in ("Check", "Watch")
    ]
    for method in ("ServerLive", "ServerReady", "ServerMetadata"):
        message = getattr(pb, f"{method}Request")()
        asks += [
            call(method, message),
            call(method, message, "with metadata", _METADATA),
            call(method, message, "with a wrong id", {"x-request-id": "not fit for a log"}),
        ]
    return [
        *asks,
        *(
            call(method, getattr(pb, f"{method}Request")(name=name, version=version), f"{name!r} {version!r}")
            for method in ("ModelReady", "ModelMetadata", "ModelConfig")
            for name, version in (("digits", ""), ("simple", "1"), ("simple", "7"), ("simple", "x"), ("nobody", ""))
        ),
        *(
            call("RepositoryIndex", pb.RepositoryIndexRequest(repository_name=name, ready=ready), f"{name!r} {ready}")
            for name, ready in (("", False), ("", True), ("other", False))
        ),
        *(
            call(
                f"RepositoryModel{order}",
                getattr(pb, f"RepositoryModel{order}Request")(model_name=model, repository_name=repository),
                f"{model!r} {repository!r}",
            )
            for model, repository in (("simple", ""), ("nobody", ""), ("simple", "other"))
            for order in ("Load", "Unload")
        ),
        *(call(method, b"") for method in _NOT_THERE),
    ]


def _requests() -> list[Ask]:
    """One request, wrong or odd in every way."""
    first, both = extremes("INT32"), ("INPUT0", "INPUT1")

    def inputs(*names: str, **fields: Any) -> dict[str, Any]:
        return {"inputs": [_tensor(first, name, **{"shape": [1, 16], **fields}) for name in names]}

    ways: dict[str, dict[str, Any]] = {
        "no model": {"model_name": "nobody"},
        "no version": {"model_version": "7"},
        "no number": {"model_version": "one"},
        "no inputs": {"inputs": [], "raw_input_contents": []},
        "one input": {**inputs("INPUT0"), "raw_input_contents": [bytes(64)]},
        "too few raw": {"raw_input_contents": [bytes(64)]},
        "too many raw": {"raw_input_contents": [bytes(64)] * 3},
        "a short one": {"raw_input_contents": [bytes(64), bytes(60)]},
        "a long one": {"raw_input_contents": [bytes(64), bytes(68)]},
        "another shape": inputs(*both, shape=[1, 15]),
        "a negative shape": inputs(*both, shape=[-1, 16]),
        "another type": inputs(*both, datatype="FP32"),
        "no such type": inputs(*both, datatype="X"),
        "no such input": inputs("A", "B"),
        "twice the same": inputs("INPUT0", "INPUT0"),
        "no such output": {"outputs": [_wanted("OUTPUT9")]},
        "an output twice": {"outputs": [_wanted("OUTPUT0")] * 2},
        "classes of it": {"outputs": [_wanted("OUTPUT0", classification=2)]},
        "wrong classes": {"outputs": [_wanted("OUTPUT0", classification="2")]},
        "one output": {"outputs": [_wanted("OUTPUT1")]},
        "an id": {"id": "mine"},
    }
    failing = Sample("FP32", (1, 3), bytes(12))
    return [
        *(call("ModelInfer", add_sub(**fields), what) for what, fields in ways.items()),
        *(
            call("ModelInfer", _with(add_sub(), **{name: value}), f"with {name} {value!r}")
            for name, value in _PARAMETERS
        ),
        *(
            call(method, data, "no message")
            for data in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"no message at all", b"")
            for method in ("ModelInfer", "ServerMetadata", "ModelStatistics")
        ),
        call("ModelInfer", add_sub(33), "of 33 rows"),
        call("ModelInfer", infer("identity_uint8", Sample("UINT8", (1, 5 << 20), bytes(5 << 20))), "too large"),
        call("ModelInfer", add_sub(), "compressed", compression=grpc.Compression.Gzip),
        call("ModelInfer", infer("picky", failing), "the model itself fails"),
        call("ModelInfer", infer("digits", failing), "of the wrong form"),
        call("ModelInfer", add_sub(), "with metadata", {**_METADATA, "authorization": "Bearer nobody asked"}),
    ]


def _tensors() -> list[Ask]:
    asks = []
    for dtype in DTYPES:
        name, whole = dtype.lower(), extremes(dtype)
        classes = infer(f"identity_{name}", extremes(dtype, text=True), outputs=[_wanted("y", classification=1000)])
        asks += [
            call("ModelInfer", infer(f"identity_{name}", whole), f"identity {name}"),
            call("ModelInfer", infer(f"scalar_{name}", scalar(dtype)), f"scalar {name}"),
            call("ModelInfer", infer(f"whole_{name}", nothing(dtype)), f"nothing {name}"),
            call("ModelInfer", classes, f"classes {name}"),
        ]
        shape = whole.shape
        if dtype == "BYTES":
            shape, contents = (2, 2), {"bytes_contents": [b"one", b"\xff", b"", b"4"]}
        elif dtype in TYPED_FIELDS:
            contents = {TYPED_FIELDS[dtype]: list(np.nan_to_num(whole.array.reshape(-1)))}
        else:
            continue
        tensor = _tensor(whole, shape=shape, contents=pb.InferTensorContents(**contents))
        for what, raw in (("typed", []), ("typed and raw", [whole.data])):
            message = infer(f"identity_{name}", whole, inputs=[tensor], raw_input_contents=raw)
            asks.append(call("ModelInfer", message, f"{what} {name}"))
    return asks


def _shared(given: str, target: str) -> list[Ask]:
    register, status, unregister = (f"SystemSharedMemory{order}" for order in ("Register", "Status", "Unregister"))
    message = pb.SystemSharedMemoryRegisterRequest
    asks = [
        *(
            call(register, message(name=name, key=f"/{name}", offset=0, byte_size=REGION_BYTES))
            for name in (given, target, given)
        ),
        call(register, message(name="r", key="/nowhere", byte_size=8), "wrong"),
        call(status, pb.SystemSharedMemoryStatusRequest()),
        call(status, pb.SystemSharedMemoryStatusRequest(name="nobody"), "of none"),
    ]
    output = _wanted("y", shared_memory_region=target, shared_memory_byte_size=REGION_BYTES)
    for what, name, nbytes in (("whole", given, 32), ("too small", given, 31), ("none", "nobody", 32)):
        place = {"shared_memory_region": name, "shared_memory_byte_size": nbytes}
        model = {"model_name": "identity_fp32", "inputs": [_with(_tensor(Sample("FP32", (2, 4), b"")), **place)]}
        asks += [
            call("ModelInfer", pb.ModelInferRequest(**model), f"shared {what} 0"),
            call("ModelInfer", pb.ModelInferRequest(**model, outputs=[output]), f"shared {what} 1"),
            region(target, f"over gRPC {what}"),
        ]
    return [
        *asks,
        call(unregister, pb.SystemSharedMemoryUnregisterRequest(name=given)),
        call(unregister, pb.SystemSharedMemoryUnregisterRequest(), "all"),
    ]


def _streams() -> list[Ask]:
    good, flag = add_sub(id="1"), "triton_enable_empty_final_response"
    return [
        stream("none"),
        stream("with a final flag", _with(add_sub(id="f"), **{flag: True}), _with(add_sub(), **{flag: False})),
        stream("right and wrong", good, add_sub(model_name="nobody"), add_sub(id="3", raw_input_contents=[])),
        stream("no message", b"\xff", good),
        stream("many", *(add_sub(id=str(number)) for number in range(100))),
        stream("with metadata", good, metadata=_METADATA),
    ]
