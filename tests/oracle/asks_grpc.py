"""Asks over gRPC: every method, unary and in streams, right and wrong, with metadata, compressed, no message at all."""

from __future__ import annotations

from typing import Any

import numpy as np
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from tests.e2e.test_grpc import TYPED_FIELDS
from tests.oracle.asks_tensors import OUTPUT_BYTES
from tests.oracle.book import Book
from tests.support.wire_forms import DTYPES, Sample, extremes, nothing, scalar

_GOOD_ID = ("x-request-id", "mine")
_TRACE = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def grpc_calls(regions: tuple[str, str]) -> Book:
    """`regions` exist; see `asks_tensors.tensors`."""
    return _about().extend(_refused()).extend(_tensors()).extend(_shared(regions)).extend(_streams())


def infer(model: str, sample: Sample, **fields: Any) -> Any:
    """A ModelInferRequest with raw contents; `fields` replace its own."""
    own = {"model_name": model, "inputs": [_tensor(sample)], "raw_input_contents": [sample.data]}
    return pb.ModelInferRequest(**{**own, **fields})


def add_sub(**fields: Any) -> Any:
    """A good request for the model of two inputs."""
    sample = Sample("INT32", (1, 16), np.arange(16, dtype=np.int32).tobytes())
    own = {
        "model_name": "simple",
        "inputs": [_tensor(sample, "INPUT0"), _tensor(sample, "INPUT1")],
        "raw_input_contents": [sample.data] * 2,
    }
    return pb.ModelInferRequest(**{**own, **fields})


def _tensor(sample: Sample, name: str = "x", **fields: Any) -> Any:
    own = {"name": name, "datatype": sample.dtype, "shape": sample.shape}
    return pb.ModelInferRequest.InferInputTensor(**{**own, **fields})


def _wanted(name: str, **parameters: Any) -> Any:
    output = pb.ModelInferRequest.InferRequestedOutputTensor(name=name)
    _fill(output.parameters, parameters)
    return output


def _fill(target: Any, parameters: dict[str, Any]) -> None:
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(type(value), "string_param")
        setattr(target[key], kind, value)


def _with(message: Any, **parameters: Any) -> Any:
    _fill(message.parameters, parameters)
    return message


def _about() -> Book:
    book = Book()
    for service in ("", "inference.GRPCInferenceService", "nobody"):
        request = health_pb2.HealthCheckRequest(service=service)
        book.call("Check", request, f"of {service!r}", is_health=True)
        book.call("Watch", request, f"of {service!r}", is_health=True)
    for name in ("ServerLive", "ServerReady", "ServerMetadata"):
        message = getattr(pb, f"{name}Request")()
        book.call(name, message)
        book.call(name, message, "with an id", (*_GOOD_ID, *_TRACE))
        book.call(name, message, "with a wrong id", ("x-request-id", "not fit for a log"))
    for name in ("ModelReady", "ModelMetadata", "ModelConfig"):
        for model, version in (
            ("digits", ""),
            ("simple", "1"),
            ("simple", "7"),
            ("simple", "x"),
            ("nobody", ""),
            ("", ""),
        ):
            book.call(name, getattr(pb, f"{name}Request")(name=model, version=version), f"{model!r} {version!r}")
    for repository, ready in (("", False), ("", True), ("other", False)):
        message = pb.RepositoryIndexRequest(repository_name=repository, ready=ready)
        book.call("RepositoryIndex", message, f"{repository!r} {ready}")
    for model, repository in (("simple", ""), ("nobody", ""), ("", ""), ("simple", "other")):
        for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
            message = getattr(pb, f"{name}Request")(model_name=model, repository_name=repository)
            book.call(name, message, f"{model!r} {repository!r}")
    book.call("TraceSetting", pb.TraceSettingRequest())
    book.call("LogSettings", pb.LogSettingsRequest())
    book.call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest())
    book.call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="r"), "of one")
    book.call("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="r", raw_handle=b"x", byte_size=8))
    book.call("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest())
    book.call("NoSuchMethod", b"")
    return book


def _refused() -> Book:
    book = Book()
    raw = extremes("INT32")
    wrong = {
        "no model": {"model_name": "nobody"},
        "no version": {"model_version": "7"},
        "no number": {"model_version": "one"},
        "no inputs": {"inputs": [], "raw_input_contents": []},
        "one input": {"inputs": [_tensor(raw, "INPUT0")], "raw_input_contents": [raw.data]},
        "too few raw": {"raw_input_contents": [bytes(64)]},
        "too many raw": {"raw_input_contents": [bytes(64)] * 3},
        "a short one": {"raw_input_contents": [bytes(64), bytes(60)]},
        "a long one": {"raw_input_contents": [bytes(64), bytes(68)]},
        "another shape": {"inputs": [_tensor(raw, "INPUT0", shape=[1, 15]), _tensor(raw, "INPUT1", shape=[1, 15])]},
        "a negative shape": {"inputs": [_tensor(raw, "INPUT0", shape=[-1, 16]), _tensor(raw, "INPUT1", shape=[1, 16])]},
        "another type": {"inputs": [_tensor(raw, "INPUT0", datatype="FP32", shape=[1, 16]), _tensor(raw, "INPUT1")]},
        "no such type": {"inputs": [_tensor(raw, "INPUT0", datatype="X", shape=[1, 16]), _tensor(raw, "INPUT1")]},
        "no such input": {"inputs": [_tensor(raw, "A", shape=[1, 16]), _tensor(raw, "B", shape=[1, 16])]},
        "twice the same": {"inputs": [_tensor(raw, "INPUT0", shape=[1, 16])] * 2},
        "no such output": {"outputs": [_wanted("OUTPUT9")]},
        "an output twice": {"outputs": [_wanted("OUTPUT0")] * 2},
        "classes of it": {"outputs": [_wanted("OUTPUT0", classification=2)]},
        "wrong classes": {"outputs": [_wanted("OUTPUT0", classification="2")]},
        "one output": {"outputs": [_wanted("OUTPUT1")]},
        "an id": {"id": "mine"},
    }
    for what, fields in wrong.items():
        book.call("ModelInfer", add_sub(**fields), what)
    for parameters in (
        *(
            {"priority": 1},
            {"timeout": 60_000_000},
            {"timeout": 1},
            {"timeout": -1},
            {"priority": "1"},
            {"own": "text"},
        ),
        *({"triton_mine": True}, {"triton_enable_empty_final_response": True}, {"sequence_id": 3}, {"share": 0.5}),
    ):
        book.call("ModelInfer", _with(add_sub(), **parameters), f"with {parameters}")
    rows = Sample("INT32", (33, 16), bytes(33 * 64))
    fields = {"inputs": [_tensor(rows, "INPUT0"), _tensor(rows, "INPUT1")], "raw_input_contents": [rows.data] * 2}
    book.call("ModelInfer", add_sub(**fields), "of 33 rows")
    for number, data in enumerate((b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"no message at all", b"")):
        for method in ("ModelInfer", "ServerMetadata", "ModelStatistics"):
            book.call(method, data, f"no message {number}")
    book.call("ModelInfer", infer("identity_uint8", Sample("UINT8", (1, 5 << 20), bytes(5 << 20))), "too large")
    book.call("ModelInfer", add_sub(), "compressed", is_compressed=True)
    book.call("ModelInfer", infer("picky", Sample("FP32", (1, 3), bytes(12))), "the model itself fails")
    book.call("ModelInfer", infer("digits", Sample("FP32", (1, 3), bytes(12))), "of the wrong form")
    book.call("ModelInfer", add_sub(), "with metadata", (*_GOOD_ID, *_TRACE, "authorization", "Bearer nobody asked"))
    return book


def _tensors() -> Book:
    book = Book()
    for dtype in DTYPES:
        name = dtype.lower()
        for model, sample in (
            (f"identity_{name}", extremes(dtype)),
            (f"scalar_{name}", scalar(dtype)),
            (f"whole_{name}", nothing(dtype)),
        ):
            book.call("ModelInfer", infer(model, sample), model)
        for count in (1, 1000):
            book.call(
                "ModelInfer",
                infer(f"identity_{name}", extremes(dtype, text=True), outputs=[_wanted("y", classification=count)]),
                f"{count} classes of {name}",
            )
        if dtype in TYPED_FIELDS or dtype == "BYTES":
            field = TYPED_FIELDS.get(dtype, "bytes_contents")
            values = (
                np.nan_to_num(extremes(dtype).array.reshape(-1)) if dtype != "BYTES" else [b"one", b"\xff", b"", b"4"]
            )
            contents = pb.InferTensorContents(**{field: list(values)})
            shape = extremes(dtype).shape if dtype != "BYTES" else (2, 2)
            tensor = _tensor(extremes(dtype), shape=shape, contents=contents)
            message = pb.ModelInferRequest(model_name=f"identity_{name}", inputs=[tensor])
            book.call("ModelInfer", message, f"typed {name}")
            message = pb.ModelInferRequest(
                model_name=f"identity_{name}", inputs=[tensor], raw_input_contents=[extremes(dtype).data]
            )
            book.call("ModelInfer", message, f"typed and raw {name}")
    return book


def _shared(regions: tuple[str, str]) -> Book:
    book = Book()
    for name in regions:
        message = pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", offset=0, byte_size=OUTPUT_BYTES)
        book.call("SystemSharedMemoryRegister", message)
        book.call("SystemSharedMemoryRegister", message, "again")
    book.call(
        "SystemSharedMemoryRegister",
        pb.SystemSharedMemoryRegisterRequest(name="r", key="/nowhere", byte_size=8),
        "wrong",
    )
    book.call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest())
    book.call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="nobody"), "of none")
    place = {"shared_memory_region": regions[0], "shared_memory_byte_size": 32}
    for what, changes in (
        ("whole", {}),
        ("too small", {"shared_memory_byte_size": 31}),
        ("of none", {"shared_memory_region": "nobody"}),
    ):
        sample = Sample("FP32", (2, 4), b"")
        tensor = _tensor(sample)
        _fill(tensor.parameters, {**place, **changes})
        output = _wanted("y", shared_memory_region=regions[1], shared_memory_byte_size=OUTPUT_BYTES)
        for outputs in ([], [output]):
            message = pb.ModelInferRequest(model_name="identity_fp32", inputs=[tensor], outputs=outputs)
            book.call("ModelInfer", message, f"shared {what} {len(outputs)}")
            book.region(regions[1], f"over gRPC {what} {len(outputs)}")
    book.call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=regions[0]))
    book.call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(), "all")
    return book


def _streams() -> Book:
    book = Book()
    good, flag = add_sub(id="1"), "triton_enable_empty_final_response"
    book.stream("one", good)
    book.stream("none")
    book.stream("with a final flag", _with(add_sub(id="f"), **{flag: True}), _with(add_sub(), **{flag: False}))
    book.stream("right and wrong", good, add_sub(model_name="nobody", id="2"), add_sub(id="3", raw_input_contents=[]))
    book.stream("no message", b"\xff", good)
    book.stream("many", *(add_sub(id=str(number)) for number in range(100)))
    book.stream("with metadata", good, metadata=(*_GOOD_ID, *_TRACE))
    return book
