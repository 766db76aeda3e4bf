"""Every dtype in every form that the protocol has for it comes back bit by bit; the others are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from tests.support.onnx_models import ONNX_TYPES
from tests.support.servers import FakeServer, Server, start_fake_server, start_server
from tests.support.stores import StoreFolder
from tests.support.wire import check_refused
from tests.support.wire_forms import (
    BINARY_ONLY,
    DTYPES,
    Sample,
    bytes_of,
    extremes,
    nothing,
    region,
    scalar,
)

FORMS = ("json", "binary", "shared")
PAIRS = list(product(FORMS, FORMS))
PROTOCOLS = ("http", "grpc")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with start_fake_server(fake={"echo": True}, allow_shared_memory=True, access_log="off", rests=True) as server:
        yield server


@pytest.fixture(scope="module")
def onnx_server(shared_store: StoreFolder) -> Iterator[Server]:
    for dtype in ONNX_TYPES:
        shared_store.add_identity(dtype)
        shared_store.add_identity(dtype, (), name=f"scalar_{dtype.lower()}")
        shared_store.add_identity(dtype, (2, "size"), name=f"whole_{dtype.lower()}")
    with start_server("--allow-shared-memory", "--access-log", "off", store=shared_store.root, rests=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


@pytest.fixture(scope="module")
def onnx_client(onnx_server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{onnx_server.port}") as client:
        yield client


def echoed(client: Any, model: str, sample: Sample, form_in: str, form_out: str, **options: Any) -> bytes:
    """What comes back for a tensor through one of the clients, as bytes; checks dtype and shape as well."""
    is_grpc = isinstance(client, triton_grpc.InferenceServerClient)
    kit = triton_grpc if is_grpc else triton
    given = kit.InferInput("x", list(sample.shape), sample.dtype)
    wanted = kit.InferRequestedOutput("y", **({} if is_grpc else {"binary_data": form_out == "binary"}))
    with ExitStack() as stack:
        if form_in == "shared":
            place = stack.enter_context(region(client, sample.data))
            given.set_shared_memory(place.name, len(sample.data))
        else:
            given.set_data_from_numpy(sample.array, **({} if is_grpc else {"binary_data": form_in == "binary"}))
        if form_out == "shared":
            answer = stack.enter_context(region(client, nbytes=len(sample.data) + 16))
            wanted.set_shared_memory(answer.name, answer.nbytes)
        result = client.infer(model, [given], outputs=[wanted], **options)
        head = result.get_output("y")
        if is_grpc:
            head = MessageToDict(head, preserving_proto_field_name=True)
        assert (head["datatype"], tuple(map(int, head.get("shape", ())))) == (sample.dtype, sample.shape)
        if form_out == "shared":
            assert answer.contents[len(sample.data) :] == b"\xee" * 16
            return answer.contents[: len(sample.data)]
        return bytes_of(result.as_numpy("y"))


def has_json(sample: Sample, *forms: str) -> bool:
    return "json" not in forms or sample.dtype not in BINARY_ONLY


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form_in", "form_out"), PAIRS)
def test_a_tensor_comes_back_bit_by_bit(
    client: triton.InferenceServerClient, dtype: str, form_in: str, form_out: str
) -> None:
    is_text = "json" in (form_in, form_out)
    for kind, sample in (("echo", extremes(dtype, text=is_text)), ("echo", nothing(dtype)), ("scalar", scalar(dtype))):
        if has_json(sample, form_in, form_out):
            assert echoed(client, f"{kind}_{dtype.lower()}", sample, form_in, form_out) == sample.data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form_in", "form_out"), [pair for pair in PAIRS if "json" not in pair])
def test_a_tensor_comes_back_bit_by_bit_over_grpc(server: FakeServer, dtype: str, form_in: str, form_out: str) -> None:
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        for kind, sample in (("echo", extremes(dtype)), ("echo", nothing(dtype)), ("scalar", scalar(dtype))):
            assert echoed(client, f"{kind}_{dtype.lower()}", sample, form_in, form_out) == sample.data


@pytest.mark.parametrize("dtype", ONNX_TYPES)
@pytest.mark.parametrize(("form_in", "form_out"), PAIRS)
def test_a_tensor_comes_back_from_onnx_runtime(
    onnx_client: triton.InferenceServerClient, dtype: str, form_in: str, form_out: str
) -> None:
    samples = {"identity": extremes(dtype, text=True), "scalar": scalar(dtype), "whole": nothing(dtype)}
    for kind, sample in samples.items():
        if has_json(sample, form_in, form_out):
            assert echoed(onnx_client, f"{kind}_{dtype.lower()}", sample, form_in, form_out) == sample.data


@pytest.mark.parametrize("request_encoding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_encoding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("dtype", ["FP32", "BYTES", "BF16"])
def test_a_tensor_comes_back_however_it_was_compressed(
    client: triton.InferenceServerClient, dtype: str, request_encoding: str | None, response_encoding: str | None
) -> None:
    sample = extremes(dtype)
    large = Sample(dtype, (8, sample.shape[0] * sample.shape[1] * 200), sample.data * 1600)
    options = {
        "request_compression_algorithm": request_encoding,
        "response_compression_algorithm": response_encoding,
    }
    for one in (sample, large):
        assert echoed(client, f"echo_{dtype.lower()}", one, "binary", "binary", **options) == one.data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form_in", ["json", "binary"])
@pytest.mark.parametrize("form_out", ["json", "binary"])
def test_a_tensor_comes_back_through_the_asyncio_client(
    server: FakeServer, dtype: str, form_in: str, form_out: str
) -> None:
    sample = extremes(dtype, text=True)
    if not has_json(sample, form_in, form_out):
        return

    async def ask() -> bytes:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            given = triton_aio.InferInput("x", list(sample.shape), dtype)
            given.set_data_from_numpy(sample.array, binary_data=form_in == "binary")
            wanted = triton_aio.InferRequestedOutput("y", binary_data=form_out == "binary")
            result = await client.infer(f"echo_{dtype.lower()}", [given], outputs=[wanted])
            return bytes_of(result.as_numpy("y"))

    assert asyncio.run(ask()) == sample.data


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_raw_request_is_the_only_input_and_nothing_else(server: FakeServer, dtype: str) -> None:
    sample = extremes(dtype)
    data = b"any \0 bytes" if dtype == "BYTES" else sample.data
    headers = {"Inference-Header-Content-Length": "0"}
    answer = server.post(f"/v2/models/echo_{dtype.lower()}/infer", content=data, headers=headers)
    assert answer.status_code == 200, answer.text
    length = int(answer.headers["inference-header-content-length"])
    head, body = json.loads(answer.content[:length]), answer.content[length:]
    (output,) = head["outputs"]
    elements = 1 if dtype == "BYTES" else sample.shape[0] * sample.shape[1]
    assert (output["datatype"], output["shape"]) == (dtype, [1, elements])
    assert body == (len(data).to_bytes(4, "little") + data if dtype == "BYTES" else data)


@pytest.mark.parametrize("dtype", BINARY_ONLY)
def test_what_json_has_no_form_for_is_refused_both_ways(server: FakeServer, dtype: str) -> None:
    path = f"/v2/models/echo_{dtype.lower()}/infer"
    tensor: dict[str, Any] = {"name": "x", "shape": [1, 1], "datatype": dtype}
    answer = server.post(path, json={"inputs": [{**tensor, "data": [1.0]}]})
    words = f"{dtype} data via JSON is not supported. Please use the binary data format for"
    check_refused(answer, 400, f"receiving {words} input x")
    document = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 2}}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(document))}
    check_refused(server.post(path, content=document + b"\0\0", headers=headers), 400, f"sending {words} output y")


def test_strings_that_are_no_text_cannot_go_into_json(server: FakeServer, client: triton.InferenceServerClient) -> None:
    sample = extremes("BYTES")
    with pytest.raises(InferenceServerException, match=r"\[400\].* not UTF-8"):
        echoed(client, "echo_bytes", sample, "binary", "json")


def test_onnx_runtime_takes_text_only(onnx_client: triton.InferenceServerClient) -> None:
    sample = extremes("BYTES")
    with pytest.raises(InferenceServerException, match=r"\[400\] .*element 2 of inference input 'x' is not UTF-8"):
        echoed(onnx_client, "identity_bytes", sample, "binary", "binary")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\1\0\0", "incomplete string length indicator for inference input 'x', expecting 4 bytes but only 3 bytes"),
        (b"\4\0\0\0abc", "incomplete string data for inference input 'x', expecting string of length 4 but only 3"),
        (b"\xff\xff\xff\xff", "expecting string of length 4294967295 but only 0 bytes available"),
        (b"", "unexpected number of string elements 0 for inference input 'x', expecting 1"),
        (b"\1\0\0\0a\0\0\0\0", "unexpected number of string elements 2 for inference input 'x', expecting 1"),
    ],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_strings_must_fit_their_tensor(server: FakeServer, protocol: str, data: bytes, words: str) -> None:
    sample = Sample("BYTES", (1, 1), data)
    if protocol == "http":
        document = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "BYTES"}]}
        document["inputs"][0]["parameters"] = {"binary_data_size": len(data)}
        head = json.dumps(document).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        check_refused(server.post("/v2/models/echo_bytes/infer", content=head + data, headers=headers), 400, words)
        return
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        given = triton_grpc.InferInput("x", [1, 1], "BYTES")
        given.set_data_from_numpy(np.array([[b"good"]], object))
        given._raw_content = sample.data
        with pytest.raises(InferenceServerException) as caught:
            client.infer("echo_bytes", [given])
    assert words in caught.value.message()


@pytest.mark.parametrize(
    "data", [["a", 1], [["a"], ["b", "c"]], [None], {"a": 1}, "ab", 7, ["\ud800"], [b"".decode()] * 3]
)
def test_json_strings_must_be_a_list_of_as_many_strings(server: FakeServer, data: Any) -> None:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "BYTES", "data": data}
    body = json.dumps({"inputs": [tensor]})
    check_refused(server.post("/v2/models/echo_bytes/infer", content=body), 400, "'x'")
