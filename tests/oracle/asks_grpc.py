"""Calls over gRPC: every method, unary and in streams, right and wrong, with metadata, compressed, no message."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from tests.e2e.test_grpc import TYPED_FIELDS
from tests.oracle.asks_tensors import REGION_BYTES
from tests.oracle.session import Session
from tests.support.wire_forms import DTYPES, Sample, extremes, nothing, scalar

_METADATA = {"x-request-id": "mine", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def grpc_calls(session: Session, regions: tuple[str, str]) -> None:
    """`regions` exist; see `asks_tensors.tensors`."""
    _about(session)
    _requests(session)
    _tensors(session)
    _shared(session, regions)
    _streams(session)


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


def _about(session: Session) -> None:
    for service in ("", "inference.GRPCInferenceService", "nobody"):
        for method in ("Check", "Watch"):
            session.call(method, health_pb2.HealthCheckRequest(service=service), f"of {service!r}")
    for method in ("ServerLive", "ServerReady", "ServerMetadata"):
        message = getattr(pb, f"{method}Request")()
        session.call(method, message)
        session.call(method, message, "with metadata", _METADATA)
        session.call(method, message, "with a wrong id", {"x-request-id": "not fit for a log"})
    for method in ("ModelReady", "ModelMetadata", "ModelConfig"):
        for name, version in (("digits", ""), ("simple", "1"), ("simple", "7"), ("simple", "x"), ("nobody", "")):
            session.call(method, getattr(pb, f"{method}Request")(name=name, version=version), f"{name!r} {version!r}")
    for repository, ready in (("", False), ("", True), ("other", False)):
        message = pb.RepositoryIndexRequest(repository_name=repository, ready=ready)
        session.call("RepositoryIndex", message, f"{repository!r} {ready}")
    for model, repository in (("simple", ""), ("nobody", ""), ("simple", "other")):
        for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
            message = getattr(pb, f"{method}Request")(model_name=model, repository_name=repository)
            session.call(method, message, f"{model!r} {repository!r}")
    for method in (
        *("TraceSetting", "LogSettings", "CudaSharedMemoryStatus", "CudaSharedMemoryRegister"),
        *("CudaSharedMemoryUnregister", "NoSuchMethod"),
    ):
        session.call(method, b"")


def _requests(session: Session) -> None:
    """One request, wrong or odd in every way."""
    first = extremes("INT32")

    def inputs(*names: str, **fields: Any) -> dict[str, Any]:
        return {"inputs": [_tensor(first, name, **{"shape": [1, 16], **fields}) for name in names]}

    both = ("INPUT0", "INPUT1")
    for what, fields in {
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
    }.items():
        session.call("ModelInfer", add_sub(**fields), what)
    for name, value in (
        *(("priority", 1), ("priority", "1"), ("timeout", 60_000_000), ("timeout", 1), ("timeout", -1)),
        *(("own", "text"), ("triton_mine", True), ("triton_enable_empty_final_response", True)),
        *(("sequence_id", 3), ("share", 0.5)),
    ):
        session.call("ModelInfer", _with(add_sub(), **{name: value}), f"with {name} {value!r}")
    for data in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"no message at all", b""):
        for method in ("ModelInfer", "ServerMetadata", "ModelStatistics"):
            session.call(method, data, "no message")
    session.call("ModelInfer", add_sub(33), "of 33 rows")
    session.call("ModelInfer", infer("identity_uint8", Sample("UINT8", (1, 5 << 20), bytes(5 << 20))), "too large")
    session.call("ModelInfer", add_sub(), "compressed", compression=grpc.Compression.Gzip)
    for model, what in (("picky", "the model itself fails"), ("digits", "of the wrong form")):
        session.call("ModelInfer", infer(model, Sample("FP32", (1, 3), bytes(12))), what)
    session.call("ModelInfer", add_sub(), "with metadata", {**_METADATA, "authorization": "Bearer nobody asked"})


def _tensors(session: Session) -> None:
    for dtype in DTYPES:
        name = dtype.lower()
        session.call("ModelInfer", infer(f"identity_{name}", extremes(dtype)), f"identity {name}")
        session.call("ModelInfer", infer(f"scalar_{name}", scalar(dtype)), f"scalar {name}")
        session.call("ModelInfer", infer(f"whole_{name}", nothing(dtype)), f"nothing {name}")
        classes = {"outputs": [_wanted("y", classification=1000)]}
        session.call("ModelInfer", infer(f"identity_{name}", extremes(dtype, text=True), **classes), f"classes {name}")
        shape, values = extremes(dtype).shape, extremes(dtype).array.reshape(-1)
        if dtype == "BYTES":
            contents = {"bytes_contents": [b"one", b"\xff", b"", b"4"]}
            shape = (2, 2)
        elif dtype in TYPED_FIELDS:
            contents = {TYPED_FIELDS[dtype]: list(np.nan_to_num(values))}
        else:
            continue
        tensor = _tensor(extremes(dtype), shape=shape, contents=pb.InferTensorContents(**contents))
        for what, raw in (("typed", []), ("typed and raw", [extremes(dtype).data])):
            message = infer(f"identity_{name}", extremes(dtype), inputs=[tensor], raw_input_contents=raw)
            session.call("ModelInfer", message, f"{what} {name}")


def _shared(session: Session, regions: tuple[str, str]) -> None:
    register = "SystemSharedMemoryRegister"
    for name in (*regions, regions[0]):
        message = pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", offset=0, byte_size=REGION_BYTES)
        session.call(register, message)
    session.call(register, pb.SystemSharedMemoryRegisterRequest(name="r", key="/nowhere", byte_size=8), "wrong")
    session.call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest())
    session.call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="nobody"), "of none")
    for what, region, nbytes in (("whole", regions[0], 32), ("too small", regions[0], 31), ("none", "nobody", 32)):
        place = {"shared_memory_region": region, "shared_memory_byte_size": nbytes}
        tensor = _with(_tensor(Sample("FP32", (2, 4), b"")), **place)
        output = _wanted("y", shared_memory_region=regions[1], shared_memory_byte_size=REGION_BYTES)
        for outputs in ([], [output]):
            message = pb.ModelInferRequest(model_name="identity_fp32", inputs=[tensor], outputs=outputs)
            session.call("ModelInfer", message, f"shared {what} {len(outputs)}")
        session.region(regions[1], f"over gRPC {what}")
    session.call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=regions[0]))
    session.call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(), "all")


def _streams(session: Session) -> None:
    good, flag = add_sub(id="1"), "triton_enable_empty_final_response"
    session.stream("none")
    session.stream("with a final flag", _with(add_sub(id="f"), **{flag: True}), _with(add_sub(), **{flag: False}))
    session.stream("right and wrong", good, add_sub(model_name="nobody"), add_sub(id="3", raw_input_contents=[]))
    session.stream("no message", b"\xff", good)
    session.stream("many", *(add_sub(id=str(number)) for number in range(100)))
    session.stream("with metadata", good, metadata=_METADATA)
