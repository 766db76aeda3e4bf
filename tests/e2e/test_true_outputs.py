"""A model whose output is not always what it declares: nobody gets bytes that are not the model's own.

The server's memory is full of one client's bytes when another one asks. Models are real files, clients speak all wires.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

import convoy
from convoy.models.errors import ModelFailed
from convoy.models.tensors import pack
from tests.support import onnx_models
from tests.support.onnx_models import LENGTHENS, SHORTENS
from tests.support.servers import Server, start_server
from tests.support.stores import StoreFolder
from tests.support.wire_forms import Region, bytes_of, region

SECRET = b"ANOTHER CLIENT'S "
TEXT = SECRET * 64
# By name, what a model is: with strings nothing can be bound; a free size may be whatever the run says.
MODELS: dict[str, dict[str, Any]] = {
    "numbers": {},
    "texts": {"text": True},
    "strings": {"text": True, "gives": "BYTES"},
    "free": {"columns": "columns"},
    "free_texts": {"text": True, "columns": "columns"},
    "free_strings": {"text": True, "gives": "BYTES", "columns": "columns"},
}
COLUMNS = {1.0: 10, 2 * SHORTENS: 4, 2 * LENGTHENS: 20}
WIRES = ("json", "binary", "region", "grpc", "stream")


@pytest.fixture(scope="module")
def filled_store(shared_store: StoreFolder) -> StoreFolder:
    for name, kind in MODELS.items():
        onnx_models.varying(shared_store.root / name / "1" / "model.onnx", **kind)
    shared_store.add_identity("BYTES", name="secrets")
    return shared_store


@pytest.fixture(scope="module", params=["cpu", "openvino"])
def server(request: pytest.FixtureRequest, filled_store: StoreFolder) -> Iterator[Server]:
    options = ("--engine", request.param, "--allow-shared-memory", "--access-log", "off")
    options += ("--max-inflight-mb", "1", "--max-body-mb", "1")
    if request.param == "openvino":
        if importlib.util.find_spec("openvino") is None:  # importing it would send telemetry
            pytest.skip("OpenVINO is not installed")
        options += ("--model-control", "explicit", "--load-model", "numbers")
    with start_server(*options, store=filled_store.root, rests=True) as server:
        yield server


class Answer(NamedTuple):
    """Everything that came, and what it says: an error, or the output."""

    raw: bytes
    error: str
    shape: tuple[int, ...] = ()
    data: bytes = b""


def rows(first: float, samples: int) -> np.ndarray:
    x = np.arange(samples * 10, dtype=np.float32).reshape(samples, 10)
    x[0, 0] = first
    return x


def expected(name: str, first: float, samples: int, columns: int) -> tuple[tuple[int, ...], bytes]:
    x = rows(first, samples)
    y = np.concatenate([x, x], axis=1)[:, :columns]
    is_text = MODELS[name].get("gives") == "BYTES"
    return y.shape, bytes(pack(b"%d" % number for number in y.flat)) if is_text else y.tobytes()


def inputs_of(name: str, x: np.ndarray) -> list[tuple[str, str, list[int], Any, bytes]]:
    given = [("x", "FP32", list(x.shape), x.reshape(-1).tolist(), x.tobytes())]
    if MODELS[name].get("text"):
        texts = [TEXT] * len(x)
        given.append(("text", "BYTES", [len(x), 1], [one.decode() for one in texts], bytes(pack(texts))))
    return given


def ask(server: Server, wire: str, name: str, x: np.ndarray, place: Region | None = None) -> Answer:
    if wire in ("grpc", "stream"):
        return ask_grpc(server, wire, name, x)
    parameters: dict[str, Any] = {"binary_data": wire != "json"}
    if place is not None:
        parameters = {"shared_memory_region": place.name, "shared_memory_byte_size": place.nbytes}
    asked: dict[str, Any] = {"inputs": [], "outputs": [{"name": "y", "parameters": parameters}]}
    body = b""
    for own, dtype, form, values, data in inputs_of(name, x):
        content = {"data": values} if wire == "json" else {"parameters": {"binary_data_size": len(data)}}
        asked["inputs"].append({"name": own, "datatype": dtype, "shape": form, **content})
        body += b"" if wire == "json" else data
    header = json.dumps(asked).encode()
    told = {} if wire == "json" else {"Inference-Header-Content-Length": str(len(header))}
    reply = server.post(f"/v2/models/{name}/infer", content=header + body, headers=told)
    if reply.status_code != 200:
        assert reply.status_code == 500, reply.text
        return Answer(reply.content, reply.json()["error"])
    length = int(reply.headers.get("inference-header-content-length", len(reply.content)))
    (output,) = json.loads(reply.content[:length])["outputs"]
    if place is not None:
        data = place.contents
    elif wire != "json":
        data = reply.content[length:]
        assert output["parameters"]["binary_data_size"] == len(data)
    elif output["datatype"] == "BYTES":
        data = bytes(pack(one.encode() for one in output["data"]))
    else:
        data = np.array(output["data"], np.float32).tobytes()
    return Answer(reply.content, "", tuple(output["shape"]), data)


def ask_grpc(server: Server, wire: str, name: str, x: np.ndarray) -> Answer:
    request = service_pb2.ModelInferRequest(model_name=name)
    for own, dtype, shape, _, data in inputs_of(name, x):
        request.inputs.add(name=own, datatype=dtype, shape=shape)
        request.raw_input_contents.append(data)
    request.outputs.add(name="y")
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        if wire == "stream":
            (reply,) = stub.ModelStreamInfer(iter([request]), timeout=60)
            if reply.error_message:
                return Answer(reply.SerializeToString(), reply.error_message)
            message = reply.infer_response
        else:
            try:
                message = stub.ModelInfer(request, timeout=60)
            except grpc.RpcError as error:
                return Answer(error.details().encode(), f"{error.code().name}: {error.details()}")
        (output,), (data,) = message.outputs, message.raw_output_contents
        return Answer(message.SerializeToString(), "", tuple(output.shape), data)


def fill(server: Server) -> None:
    """Leave another client's bytes all over the memory for requests, whatever the model says to them."""
    data = bytes(pack([TEXT * 400]))
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(data)}}
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    header = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
    told = {"Inference-Header-Content-Length": str(len(header))}
    assert server.post("/v2/models/secrets/infer", content=header + data, headers=told).content.endswith(TEXT)


def check(answer: Answer, name: str, first: float, samples: int) -> None:
    """It is the model's own, or names the output and both shapes; in any case it is without what is another's."""
    assert SECRET not in answer.raw
    columns = COLUMNS[first]
    if name.startswith("free") and not answer.error:
        columns = answer.shape[1]  # which of them, every row of a batch may decide
        assert columns in COLUMNS.values()
    shape, data = expected(name, first, samples, columns)
    if COLUMNS[first] != 10 and not name.startswith("free"):
        assert f"output 'y' has the shape [{samples}, {COLUMNS[first]}], but the model declares [" in answer.error
        assert answer.data == b""
    else:
        assert (answer.error, answer.shape, answer.data) == ("", shape, data)


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(WIRES), st.sampled_from(list(MODELS)), st.sampled_from(list(COLUMNS)), st.integers(1, 2)
        ),
        min_size=4,
        max_size=16,
    )
)
def test_every_answer_is_the_models_own_or_an_error_that_names_the_output(
    server: Server, asked: list[tuple[str, str, float, int]]
) -> None:
    served = {place.partition("/")[0] for place, (state, _) in server.index().items() if state == "READY"}
    if "secrets" in served:
        fill(server)

    def check_one(wire: str, name: str, first: float, samples: int) -> None:
        if wire != "region" or MODELS[name].get("gives") or "columns" in MODELS[name]:
            answer = ask(server, "binary" if wire == "region" else wire, name, rows(first, samples))
        else:
            with (
                triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client,
                region(client, nbytes=samples * 40) as place,
            ):
                answer = ask(server, wire, name, rows(first, samples), place)
                assert SECRET[:8] not in place.contents
                assert not answer.error or place.contents == b"\xee" * place.nbytes
        check(answer, name, first, samples)

    with ThreadPoolExecutor(8) as pool:
        for one in [pool.submit(check_one, *each) for each in asked if each[1] in served]:
            one.result()


def test_a_programs_own_engine_says_the_same(filled_store: StoreFolder) -> None:
    with convoy.Engine(filled_store.root, engine="cpu", max_inflight_mb=1) as engine:
        engine.infer("secrets", {"x": np.array([[TEXT * 400]], object)})
        for name, first in ((name, first) for name in MODELS for first in COLUMNS):
            x = rows(first, 1)
            inputs = {"x": x, "text": np.array([[TEXT]], object)} if MODELS[name].get("text") else {"x": x}
            shape, data = expected(name, first, 1, COLUMNS[first])
            if COLUMNS[first] == 10 or name.startswith("free"):
                y = engine.infer(name, inputs)["y"]
                assert y.shape == shape
                assert bytes_of(y) == data
            else:
                with pytest.raises(ModelFailed, match=r"output 'y' has the shape .* declares \[(-?1|1), 10\]"):
                    engine.infer(name, inputs)
