"""The Open Inference Protocol over gRPC, spoken by the clients that people have: tritonclient, unmodified."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from convoy.models.spec import NUMPY_DTYPES
from tests.support.crowds import at_once
from tests.support.grpc_calls import asking, given, request, row
from tests.support.servers import (
    FakeServer,
    Server,
    check_ended,
    run_convoy,
    start_fake_server,
    start_server,
    wait_until,
)
from tests.support.stores import IDENTITIES, StoreFolder, digit

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

SEED = 20
METHOD = "/inference.GRPCInferenceService/ModelInfer"
TYPED_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    shared_store.add_digits()
    shared_store.add_add_sub()
    for dtype in IDENTITIES:
        shared_store.add_identity(dtype)
    options = ("--server-name", "triton", "--max-body-mb", "1", "--access-log", "all")
    with start_server(*options, store=shared_store.root) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc_address) as client:
        yield client


@pytest.fixture
def stub(server: Server) -> Iterator[Any]:
    with asking(server) as stub:
        yield stub


@pytest.fixture(scope="module")
def one_by_one() -> Iterator[FakeServer]:
    """A run has room for one sample, and ends when a test says so, so that what follows waits; eight may."""
    with start_fake_server(fake={"max_batch": 1}, max_queue=8) as server:
        server.infer(0.0)
        yield server


def some(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits at all, so NaN, infinities and the smallest and largest integers are among them."""
    generator = np.random.default_rng(SEED)
    numpy_dtype = NUMPY_DTYPES[dtype]
    if dtype == "BOOL":
        return generator.integers(0, 2, shape).astype(bool)
    data = generator.bytes(int(np.prod(shape)) * numpy_dtype.itemsize)
    return np.frombuffer(data, numpy_dtype).reshape(shape)


def rows(*values: float, **fields: Any) -> Any:
    """A request for the fake model: each value is a row of four."""
    return request("rows", np.array([[value] * 4 for value in values], np.float32), "FP32", **fields)


def refused(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def trailer(error: Any) -> dict[str, str]:
    return dict(error.trailing_metadata() or ())


# What the server says of itself


def test_health_metadata_configuration_and_index(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple", "1")
    assert client.get_server_metadata().name == "triton"
    metadata = client.get_model_metadata("digits", as_json=True)
    assert metadata["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": ["-1", "32", "32", "3"]}]
    config = client.get_model_config("digits").config
    assert (config.name, config.max_batch_size, config.input[0].format) == ("digits", 64, 1)
    index = {one.name: one.state for one in client.get_model_repository_index().models}
    assert index["simple"] == "READY"
    assert len(index) == 2 + len(IDENTITIES)


def test_both_wires_say_the_same(client: triton.InferenceServerClient, server: Server) -> None:
    for path, message in (
        ("/v2", client.get_server_metadata()),
        ("/v2/models/simple", client.get_model_metadata("simple")),
        ("/v2/models/digits", client.get_model_metadata("digits")),
    ):
        document = server.get(path).json()
        for field in ("name", "platform", "versions", "extensions"):
            assert field not in document or document[field] == _plain(getattr(message, field))


def test_statistics_count_what_came_over_this_wire(client: triton.InferenceServerClient, server: Server) -> None:
    before = client.get_inference_statistics("identity_fp32").model_stats[0]
    for _ in range(3):
        client.infer("identity_fp32", [given("x", np.zeros((2, 3), np.float32), "FP32")])
    after = client.get_inference_statistics("identity_fp32").model_stats[0]
    assert after.inference_count - before.inference_count == 6
    assert after.inference_stats.success.count - before.inference_stats.success.count == 3
    assert len(client.get_inference_statistics().model_stats) == 2 + len(IDENTITIES)
    line = 'convoy_requests_total{model="identity_fp32",outcome="success",protocol="grpc",version="1"}'
    assert line in server.get("/metrics").text


def test_the_standard_health_service_tells_readiness(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "inference.GRPCInferenceService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == 1
        error = refused(lambda: health.Check(health_pb2.HealthCheckRequest(service="nobody")))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert next(iter(health.Watch(health_pb2.HealthCheckRequest(service="")))).status == 1


def reflected(channel: grpc.Channel, question: dict[str, str], version: str = "v1alpha", **options: Any) -> Any:
    """One answer of the server's, by that version of the service."""
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    return next(ask(iter([reflection_pb2.ServerReflectionRequest(**question)]), **options))


def test_reflection_tells_of_every_service_and_method(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        for version in ("v1", "v1alpha"):
            answer = reflected(channel, {"list_services": ""}, version)
            names = [one.name for one in answer.list_services_response.service]
            assert names == [
                *("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"),
                "inference.GRPCInferenceService",
            ]
            for name in names:
                found = reflected(channel, {"file_containing_symbol": name}, version).file_descriptor_response
                files = [FileDescriptorProto.FromString(one) for one in found.file_descriptor_proto]
                services = [f"{file.package}.{one.name}" for file in files for one in file.service]
                assert name in services
        unknown = reflected(channel, {"file_containing_symbol": "nobody"})
        assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_what_is_not_offered_says_so(client: triton.InferenceServerClient) -> None:
    client.unregister_cuda_shared_memory()
    for call in (client.get_trace_settings, client.get_log_settings, client.update_trace_settings):
        with pytest.raises(InferenceServerException) as error:
            call()
        assert error.value.status() == "StatusCode.UNIMPLEMENTED"
        assert "not" in error.value.message()


# Tensors


# The last is decoded beside other requests.
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 0), (32, 2048)])
@pytest.mark.parametrize("dtype", TYPED_FIELDS)
def test_typed_tensors_come_back_bit_by_bit(dtype: str, shape: tuple[int, int], stub: Any) -> None:
    array = some(dtype, shape)
    if array.dtype.kind == "f":  # a number on its way through Python keeps its value, not the bits of its NaN
        array = np.nan_to_num(array, nan=0.5)
    response = stub.ModelInfer(typed(dtype, array, TYPED_FIELDS[dtype]))
    assert (response.model_name, response.model_version) == (f"identity_{dtype.lower()}", "1")
    assert list(response.raw_output_contents) == [array.tobytes()]


def test_outputs_come_in_the_order_in_which_they_are_asked_for(client: triton.InferenceServerClient) -> None:
    a, b = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
    inputs = [given("INPUT0", a, "INT32"), given("INPUT1", b, "INT32")]
    wanted = [triton.InferRequestedOutput("OUTPUT1"), triton.InferRequestedOutput("OUTPUT0")]
    result = client.infer("simple", inputs, outputs=wanted, request_id="7", priority=1, timeout=10_000_000)
    assert [output.name for output in result.get_response().outputs] == ["OUTPUT1", "OUTPUT0"]
    assert np.array_equal(result.as_numpy("OUTPUT0"), a + b)
    assert np.array_equal(result.as_numpy("OUTPUT1"), a - b)
    assert result.get_response().id == "7"


# Images


def picture(*files: bytes, shape: Sequence[int] = (1,)) -> list[triton.InferInput]:
    tensor = triton.InferInput("image", list(shape), "BYTES")
    tensor.set_data_from_numpy(np.array(files, np.object_).reshape(shape))
    return [tensor]


def test_an_image_is_answered_as_over_http(client: triton.InferenceServerClient, server: Server) -> None:
    told = server.post("/predictions/digits?top_k=3", content=digit("seven")).json()
    for shape in ((1,), (1, 1)):
        result = client.infer("digits", picture(digit("seven"), shape=shape), request_id="7", parameters={"top_k": 3})
        document = json.loads(result.as_numpy("predictions").item())
        assert list(document) == list(told)
        assert (document["model"], document["version"]) == ("digits", "1")
        assert document["predictions"] == told["predictions"]
        assert result.get_response().id == "7"
    sure = client.infer("digits", picture(digit("seven")), parameters={"threshold": 0.5}, priority=1)
    assert len(json.loads(sure.as_numpy("predictions").item())["predictions"]) == 1


def test_an_image_may_be_typed_and_named_as_the_output_is(stub: Any) -> None:
    tensor = {"name": "images", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [digit("four")]}}
    asked = {"model_name": "digits", "inputs": [tensor], "outputs": [{"name": "predictions"}]}
    response = stub.ModelInfer(service_pb2.ModelInferRequest(**asked))
    document = json.loads(response.raw_output_contents[0][4:])
    assert document["predictions"][0]["label"] == "4"


def test_a_stream_of_images_is_answered_in_order(stub: Any) -> None:
    words = ("one", "two", "three")
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1]}
    files = [*(digit(word) for word in words), b"no image", digit("four")]
    asked = [
        service_pb2.ModelInferRequest(
            model_name="digits", inputs=[tensor], raw_input_contents=[struct.pack("<I", len(file)) + file]
        )
        for file in files
    ]
    answers = list(stub.ModelStreamInfer(iter(asked)))
    labels = [
        json.loads(one.infer_response.raw_output_contents[0][4:])["predictions"][0]["label"]
        for one in answers
        if not one.error_message
    ]
    assert labels == ["1", "2", "3", "4"]
    assert "not an image" in answers[3].error_message


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda: picture(b"1", b"2", shape=(2,)), "send each image in a request of its own"),
        (lambda: picture(b"1") + picture(b"2"), "the only input"),
        (lambda: picture(b""), "the image is empty"),
    ],
)
def test_what_is_no_image_is_refused(client: triton.InferenceServerClient, asked: Any, words: str) -> None:
    with pytest.raises(InferenceServerException, match=words) as error:
        client.infer("digits", asked())
    assert error.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="the output 'predictions' only"):
        client.infer("digits", picture(digit("one")), outputs=[triton.InferRequestedOutput("logits")])
    with pytest.raises(InferenceServerException, match="top_k must be"):
        client.infer("digits", picture(digit("one")), parameters={"top_k": "none"})


# Errors

X = np.zeros((1, 2), np.float32)
WRONG = [
    (request("nobody", X, "FP32"), "NOT_FOUND", "Request for unknown model: 'nobody' is not found"),
    (request("identity_fp32", X, "FP32", model_version="9"), "NOT_FOUND", "'identity_fp32' version 9 is not found"),
    (request("identity_fp32", X, "FP32", model_version="x"), "NOT_FOUND", "version x is not found"),
    (request("identity_fp32", X, "INT32"), "INVALID_ARGUMENT", "data-type is 'INT32', but model"),
    (request("identity_fp32", X[0], "FP32"), "INVALID_ARGUMENT", "unexpected shape for input 'x'"),
    (request("identity_fp32", np.zeros((99, 1), np.float32), "FP32"), "INVALID_ARGUMENT", "batch-size must be <= 32"),
    (request("identity_fp32", X, "FP32", raw_input_contents=[b"123"]), "INVALID_ARGUMENT", "Expected 8, got 3"),
    (request("identity_fp32", X, "FP32", raw_input_contents=[]), "INVALID_ARGUMENT", "unable to find data for input"),
    (request("identity_fp32", X, "FP32", raw_input_contents=[X.tobytes()] * 2), "INVALID_ARGUMENT", "additional input"),
    (
        request("identity_fp32", X, "FP32", inputs=[], raw_input_contents=[]),
        "INVALID_ARGUMENT",
        "expected 1 inputs",
    ),
    (
        request("identity_fp32", X, "FP32", outputs=[{"name": "z"}]),
        "INVALID_ARGUMENT",
        "unexpected inference output 'z'",
    ),
    (
        request("identity_fp32", X, "FP32", outputs=[{"name": "y"}, {"name": "y"}]),
        "INVALID_ARGUMENT",
        "output 'y' already exists in request",
    ),
    (
        request("identity_fp32", X, "FP32", parameters={"timeout": {"string_param": "soon"}}),
        "INVALID_ARGUMENT",
        "'timeout' in 'parameters'",
    ),
    (
        request("identity_fp32", X, "FP32", parameters={"triton_x": {"bool_param": True}}),
        "INVALID_ARGUMENT",
        "reserved",
    ),
]


@pytest.mark.parametrize(
    ("message", "code", "words"), WRONG, ids=[f"{code}-{n}" for n, (_, code, _) in enumerate(WRONG)]
)
def test_a_wrong_request_gets_the_code_and_the_words(message: Any, code: str, words: str, stub: Any) -> None:
    error = refused(lambda: stub.ModelInfer(message, metadata=(("x-request-id", "id-7"),)))
    assert error.code() == grpc.StatusCode[code]
    assert words in error.details()
    assert trailer(error)["x-request-id"] == "id-7"


def test_typed_contents_are_checked_as_the_others_are(stub: Any) -> None:
    for message, words in (
        (typed("FP16", some("FP16", (1, 2)), "fp32_contents"), "of type 'FP16'; send it in raw_input_contents"),
        (typed("INT8", np.array([[1, 300]]), "int_contents"), "must lie in -128..127 for INT8"),
        (typed("INT32", np.array([[1, 2]]), "int64_contents"), "Expected 2 values in int_contents, got 0"),
    ):
        assert words in refused(lambda message=message: stub.ModelInfer(message)).details()
    both = typed("INT32", np.array([[1, 2]]), "int_contents")
    both.raw_input_contents.append(b"12345678")
    assert "contents field must not be specified" in refused(lambda: stub.ModelInfer(both)).details()


def test_bytes_that_are_no_message_are_a_wrong_request(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary(METHOD)
        error = refused(lambda: call(b"\xff\xff\xff"))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "ModelInferRequest" in error.details()


def test_a_huge_name_is_refused_in_few_words(stub: Any) -> None:
    error = refused(lambda: stub.ModelInfer(request("n" * 500_000, X, "FP32")))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert len(error.details()) <= 2000


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_one_size_limit_for_both_wires(compression: grpc.Compression, stub: Any) -> None:
    fitting, too_large = np.zeros((1, 240_000), np.float32), np.zeros((1, 270_000), np.float32)
    stub.ModelInfer(request("identity_fp32", fitting, "FP32"), compression=compression)
    error = refused(lambda: stub.ModelInfer(request("identity_fp32", too_large, "FP32"), compression=compression))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()
    stub.ModelInfer(request("identity_fp32", fitting, "FP32"))


# Time


def test_a_full_queue_says_when_to_come_back(one_by_one: FakeServer) -> None:
    server = one_by_one
    wait_until(server.is_at_rest, "nothing runs")
    server.switch_on("hold")
    with asking(server) as stub:
        running = stub.ModelInfer.future(rows(1.0))
        wait_until(lambda: server.stats()["unfinished_requests"] == 1, "it runs")
        calls = [running, *(stub.ModelInfer.future(rows(1.0)) for _ in range(11))]
        wait_until(lambda: sum(call.done() for call in calls) == 3, "eight wait, and no more are taken")
        server.switch_off("hold")
        errors: list[Any] = [call.exception() for call in calls]
    full = [error for error in errors if error is not None]
    assert {error.code() for error in full} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all("Exceeds maximum queue size" in error.details() for error in full)
    for error in full:
        assert int(trailer(error)["retry-after"]) >= 1
        assert int(trailer(error)["grpc-retry-pushback-ms"]) >= 1
    assert len(full) == 3


def test_a_request_that_the_model_fails_on_is_an_internal_error(one_by_one: FakeServer) -> None:
    with triton.InferenceServerClient(one_by_one.grpc_address) as client:
        with pytest.raises(InferenceServerException) as error:
            client.infer("rows", [row(666.0)])
        assert error.value.status() == "StatusCode.INTERNAL"
        assert client.infer("rows", [row(2.0)]).as_numpy("y").tolist() == [[2.0] * 4]


def ended(server: Server) -> dict[tuple[str, str], int]:
    """The calls so far, by model and outcome."""
    series = re.compile(r'^convoy_call_duration_seconds_count{model="(\w*)",outcome="(\w+)",.*} (\d+)', re.MULTILINE)
    found: dict[tuple[str, str], int] = {}
    for model, outcome, count in series.findall(server.get("/metrics").text):
        found[model, outcome] = found.get((model, outcome), 0) + int(float(count))
    return found


def test_a_call_that_is_cancelled_at_its_deadline_is_late_wherever_it_waits() -> None:
    """The library cancels it at the same moment at which its own time ends, or a moment before."""
    with start_fake_server() as server, grpc.insecure_channel(server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(rows(0.0))
        none = channel.stream_unary(METHOD)
        server.switch_on("hold")
        may_end = threading.Event()

        def nothing() -> Iterator[Any]:
            may_end.wait()
            yield from ()

        def requests() -> Iterator[Any]:
            yield from (rows(1.0), rows(2.0))
            may_end.wait()

        for timeout_s in (0.05, 0.1, 0.25, 1.5):
            calls = [stub.ModelInfer.future(rows(1.0), timeout=timeout_s) for _ in range(5)]
            calls += [none.future(nothing(), timeout=timeout_s) for _ in range(5)]
            stream = stub.ModelStreamInfer(requests(), timeout=timeout_s)
            # On a slow machine little is left of the time when a call arrives, and it is refused for that.
            hasty = {grpc.StatusCode.RESOURCE_EXHAUSTED} if timeout_s < 1 else set()
            assert {one.code() for one in (*calls, stream)} - hasty == {grpc.StatusCode.DEADLINE_EXCEEDED}

        answered = {("rows", "answered"): 1}

        def all_are_late() -> bool:
            counts = Counter(ended(server))
            # Of the five calls and the stream of two that have less than a second, of each time. One that took long to
            # come counts it from then, and its client leaves long before.
            hasty = counts.pop(("rows", "refused"), 0) + counts.pop(("rows", "cancelled"), 0)
            rows_late = counts.pop(("rows", "late"), 0)
            hasty_unread, unread_late = counts.pop(("", "cancelled"), 0), counts.pop(("", "late"), 0)
            # A call whose time is over as it comes is not read, and of such a stream no request is counted.
            unread = unread_late + hasty_unread
            not_counted = 48 - rows_late - hasty - unread
            is_most = hasty <= 21 and hasty_unread <= 30 and rows_late >= 7 and 20 <= unread <= 35
            return is_most and not_counted in (0, 2, 4, 6) and counts == answered

        wait_until(all_are_late, f"they are late: {ended(server)}")
        before = ended(server)
        calls = [none.future(nothing(), timeout=30), stub.ModelInfer.future(rows(1.0), timeout=30)]
        wait_until(lambda: server.stats()["open_calls"] == 2, "they are open")
        for call in calls:
            call.cancel()
        left = {(model, "cancelled"): before.get((model, "cancelled"), 0) + 1 for model in ("", "rows")}
        wait_until(lambda: ended(server) == before | left, f"these have left: {ended(server)}")
        may_end.set()
        server.switch_off("hold")


# Streams


def test_a_stream_answers_in_order_and_outlives_its_errors(server: Server) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(40):
            model = "nobody" if number == 17 else "identity_fp32"
            tensor = given("x", np.full((1, 2), number, np.float32), "FP32")
            client.async_stream_infer(model, [tensor], request_id=str(number), enable_empty_final_response=True)
        received = [answers.get(timeout=60) for _ in range(40)]
        client.stop_stream()
    for number, (result, error) in enumerate(received):
        if number == 17:
            assert "Request for unknown model: 'nobody'" in error.message()
            continue
        assert error is None
        response = result.get_response()
        assert (response.id, result.as_numpy("y")[0, 0]) == (str(number), number)
        assert response.parameters["triton_final_response"].bool_param


def test_a_stream_that_is_cancelled_leaves_nothing_behind(one_by_one: FakeServer) -> None:
    server = one_by_one
    server.switch_on("hold")
    with asking(server) as stub:
        call = stub.ModelStreamInfer(iter([rows(float(n)) for n in range(8)]))
        wait_until(lambda: server.stats()["unfinished_requests"] == 8, "all of them wait or run")
        call.cancel()
        wait_until(lambda: server.stats()["unfinished_requests"] <= 1, "all that wait have left")
    server.switch_off("hold")
    wait_until(lambda: server.stats()["inflight_bytes"] == 0, "all memory is given back")


def test_the_asynchronous_client_streams(server: Server) -> None:
    async def ask() -> list[float]:
        async def requests() -> Any:
            for number in range(10):
                tensor = given("x", np.full((1, 1), number, np.float32), "FP32")
                yield {"model_name": "identity_fp32", "inputs": [tensor], "request_id": str(number)}

        async with triton_aio.InferenceServerClient(server.grpc_address) as client:
            answers = client.stream_infer(requests())
            return [result.as_numpy("y")[0, 0] async for result, error in answers if error is None]

    assert asyncio.run(ask()) == list(range(10))


# The port


def test_only_a_key_opens_all_but_health(store: StoreFolder, tmp_path: Path) -> None:
    store.add_identity()
    key = tmp_path / "key"
    key.write_text("secret\n")
    with start_server("--api-key-file", str(key), store=store.root) as server:
        with triton.InferenceServerClient(server.grpc_address) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("identity_fp32")
            tensor = [given("x", X, "FP32")]
            for headers in (None, {"authorization": "Bearer wrong"}):
                for call in (
                    lambda headers=headers: client.infer("identity_fp32", tensor, headers=headers),
                    lambda headers=headers: client.get_server_metadata(headers=headers),
                ):
                    with pytest.raises(InferenceServerException) as error:
                        call()
                    assert error.value.status() == "StatusCode.UNAUTHENTICATED"
            client.infer("identity_fp32", tensor, headers={"authorization": "Bearer secret"})
        with grpc.insecure_channel(server.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stream = stub.ModelStreamInfer(iter([request("identity_fp32", X, "FP32")]))
            assert refused(lambda: list(stream)).code() == grpc.StatusCode.UNAUTHENTICATED
            assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
            closed = refused(lambda: reflected(channel, {"list_services": ""}))
            assert closed.code() == grpc.StatusCode.UNAUTHENTICATED
            key_given = [("authorization", "Bearer secret")]
            assert reflected(channel, {"list_services": ""}, metadata=key_given).list_services_response.service


def test_the_port_can_be_left_out_and_one_that_is_taken_is_a_wrong_call(server: Server, store: StoreFolder) -> None:
    store.add_identity()
    with start_server("--grpc-port", "-1", store=store.root) as without:
        assert "grpc://" not in without.log
    port = server.grpc_address.rpartition(":")[2]
    check_ended(
        run_convoy("serve", "--port", "0", "--grpc-port", port, "--store", str(store.root)),
        2,
        f":{port}",
        "--grpc-port",
    )


class Announced:
    """A call that is begun, whose message is sent when it is told to."""

    def __init__(self, channel: Any) -> None:
        self._may_send = threading.Event()
        ask = channel.stream_unary(METHOD, service_pb2.ModelInferRequest.SerializeToString)
        self.reply = ask.future(self._message())

    def _message(self) -> Iterator[Any]:
        self._may_send.wait()
        yield rows(1.0)

    def send(self) -> None:
        self._may_send.set()


def test_who_has_begun_a_call_when_the_server_stops_may_send_its_message() -> None:
    """It is open from then on, as over HTTP; whoever comes later is told so before a message is read."""
    with start_fake_server(drain_delay_s=0) as server:
        with grpc.insecure_channel(server.grpc_address) as channel:
            calls = [Announced(channel) for _ in range(3)]
            wait_until(lambda: server.stats()["open_calls"] == 3, "they are open")
            server.signal()
            wait_until(lambda: refused_at_once(channel), "no new one is taken")
            for one in calls:
                one.send()
            assert all(service_pb2.ModelInferResponse.FromString(one.reply.result()).outputs for one in calls)
        assert server.wait() == 0
        assert "all accepted requests were answered" in server.log


def refused_at_once(channel: Any) -> bool:
    """Whether a call whose message never comes is told to go elsewhere."""
    call = Announced(channel)
    try:
        error = call.reply.exception(timeout=1)
    except grpc.FutureTimeoutError:
        call.reply.cancel()
        return False
    finally:
        call.send()  # a thread waits for it
    return error.code() == grpc.StatusCode.UNAVAILABLE and "shutting down" in error.details()


def test_whoever_begins_a_call_and_sends_nothing_does_not_hold_up_the_end_for_ever() -> None:
    with start_fake_server(drain_delay_s=0, drain_timeout_s=0.5) as server:
        with grpc.insecure_channel(server.grpc_address) as channel:
            call = Announced(channel)
            wait_until(lambda: server.stats()["open_calls"] == 1, "it is open")
            server.signal()
            assert server.wait() == 0
            assert call.reply.exception()
            call.send()
        assert "1 requests were not answered before the drain timeout" in server.log


def test_a_call_that_is_left_before_its_message_has_come_is_open_no_more(one_by_one: FakeServer) -> None:
    server = one_by_one
    wait_until(server.is_at_rest, "nothing is open")
    with grpc.insecure_channel(server.grpc_address) as channel:
        none = channel.stream_unary(METHOD)
        broken = channel.unary_unary(METHOD)
        assert refused(lambda: none(iter(()))).code() == grpc.StatusCode.INVALID_ARGUMENT
        assert refused(lambda: broken(b"\xff")).code() == grpc.StatusCode.INVALID_ARGUMENT
        call = Announced(channel)
        wait_until(lambda: server.stats()["open_calls"] == 1, "it is open")
        call.reply.cancel()
        call.send()
        wait_until(server.is_at_rest, "nothing is open")


def test_stopping_answers_what_was_accepted_and_refuses_what_comes_then() -> None:
    """A stream does not hold up the end, either."""
    with start_fake_server(fake={"max_batch": 1}, drain_delay_s=0) as server:
        server.switch_on("hold")
        with grpc.insecure_channel(server.grpc_address) as channel:
            may_end = threading.Event()
            stub, health = service_pb2_grpc.GRPCInferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel)

            def requests() -> Iterator[Any]:
                yield from (rows(1.0), rows(2.0))
                may_end.wait()

            replies = stub.ModelStreamInfer(requests())
            running = stub.ModelInfer.future(rows(3.0))
            wait_until(lambda: server.stats()["open_calls"] == 3, "all have come")
            server.signal()
            wait_until(lambda: health.Check(health_pb2.HealthCheckRequest()).status == 2, "it says that it is leaving")
            assert refused(lambda: stub.ModelInfer(rows(4.0))).code() == grpc.StatusCode.UNAVAILABLE
            server.switch_off("hold")
            assert [next(replies).error_message for _ in range(2)] == ["", ""]
            assert running.result().raw_output_contents
            assert server.wait() == 0
            may_end.set()
        assert "all accepted requests were answered" in server.log


def test_http_grpc_and_the_requests_of_a_stream_share_batches() -> None:
    with start_fake_server(fake={"latency_ms": 300.0}) as server:
        with asking(server) as stub:
            over_grpc = [stub.ModelInfer.future(rows(float(n))) for n in range(5)]
            over_http = at_once([lambda n=n: server.infer(float(n)) for n in range(5)])
            assert [reply.status_code for reply in over_http] == [200] * 5
            assert all(call.result().raw_output_contents for call in over_grpc)
            runs = server.statistics("rows")["execution_count"]
            assert runs < 10
            replies = list(stub.ModelStreamInfer(iter([rows(float(n), id=str(n)) for n in range(10)])))
        assert [(one.infer_response.id, one.error_message) for one in replies] == [(str(n), "") for n in range(10)]
        assert server.statistics("rows")["execution_count"] < runs + 10


def typed(dtype: str, array: np.ndarray, field: str) -> Any:
    """A request whose numbers stand in a field of `contents`."""
    message = request(f"identity_{dtype.lower()}", array, dtype, raw_input_contents=[])
    message.inputs[0].contents.SetInParent()
    getattr(message.inputs[0].contents, field).extend(array.reshape(-1).tolist())
    return message


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
