"""The Open Inference Protocol, spoken by the client that people have: tritonclient, unmodified."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from convoy.models.bundle import open_bundle
from convoy.models.images import preprocess
from tests.support.quick_exports import logits_of
from tests.support.servers import Server, start_server
from tests.support.stores import DEMO, IDENTITIES, StoreFolder, digit


@pytest.fixture(scope="module")
def filled_store(shared_store: StoreFolder) -> StoreFolder:
    shared_store.add_digits()
    shared_store.add_add_sub()
    shared_store.add_mean()
    shared_store.add_nonzero()
    for dtype in IDENTITIES:
        shared_store.add_identity(dtype)
    return shared_store


@pytest.fixture(scope="module")
def server(filled_store: StoreFolder) -> Iterator[Server]:
    with start_server(
        *("--engine", "auto", "--server-name", "triton", "--access-log", "off"), store=filled_store.root, rests=True
    ) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


def given(name: str, array: np.ndarray, dtype: str, *, binary: bool) -> triton.InferInput:
    tensor = triton.InferInput(name, array.shape, dtype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    spec = open_bundle(DEMO).manifest.spec.image
    assert spec is not None
    return np.stack([preprocess(digit(word), spec) for word in ("zero", "three", "seven")])


def test_the_server_and_its_models_are_live_and_ready(client: triton.InferenceServerClient) -> None:
    assert (client.is_server_live(), client.is_server_ready()) == (True, True)
    asked = {("simple", ""): True, ("digits", "1"): True, ("nobody", ""): False, ("digits", "2"): False}
    assert {one: client.is_model_ready(*one) for one in asked} == asked


def test_metadata(client: triton.InferenceServerClient) -> None:
    server = client.get_server_metadata()
    assert server["name"] == "triton"
    assert "binary_tensor_data" in server["extensions"]
    metadata = client.get_model_metadata("simple")
    assert metadata.pop("platform") in ("onnxruntime_onnx", "openvino")  # whichever is faster here
    assert metadata == {
        "name": "simple",
        "versions": ["1"],
        "inputs": [{"name": name, "datatype": "INT32", "shape": [-1, 16]} for name in ("INPUT0", "INPUT1")],
        "outputs": [{"name": name, "datatype": "INT32", "shape": [-1, 16]} for name in ("OUTPUT0", "OUTPUT1")],
    }
    digits = client.get_model_metadata("digits", "1")
    assert digits["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 32, 32, 3]}]


def test_configuration(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("digits")
    assert (config["name"], config["max_batch_size"]) == ("digits", 64)
    images = {"format": "FORMAT_NHWC", "data_type": "TYPE_UINT8", "dims": [32, 32, 3]}
    assert config["input"][0].items() >= images.items()
    batching = {"preferred_batch_size": [64], "priority_levels": 3, "default_priority_level": 2}
    assert config["dynamic_batching"].items() >= batching.items()
    unbatched = client.get_model_config("mean")
    assert (unbatched["max_batch_size"], unbatched["input"][0]["dims"]) == (0, [-1, 4])
    assert unbatched["dynamic_batching"]["preferred_batch_size"] == [], "it waits by priority all the same"


def test_the_repository_index(client: triton.InferenceServerClient) -> None:
    index = {row["name"]: row for row in client.get_model_repository_index()}
    assert index["digits"] == {"name": "digits", "version": "1", "state": "READY", "reason": ""}


@pytest.mark.parametrize("binary", list(product([True, False], repeat=4)))
@pytest.mark.parametrize("samples", [1, 5, 32])
def test_sums_and_differences(
    client: triton.InferenceServerClient, binary: tuple[bool, bool, bool, bool], samples: int
) -> None:
    """Each tensor is binary or JSON, whatever the others are."""
    generator = np.random.default_rng(samples)
    left, right = (generator.integers(-(2**30), 2**30, (samples, 16), dtype=np.int32) for _ in range(2))
    inputs = [given("INPUT0", left, "INT32", binary=binary[0]), given("INPUT1", right, "INT32", binary=binary[1])]
    outputs = [
        triton.InferRequestedOutput(name, binary_data=is_binary)
        for name, is_binary in zip(("OUTPUT1", "OUTPUT0"), binary[2:], strict=True)
    ]
    result = client.infer("simple", inputs, outputs=outputs, request_id="my-id")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), left + right)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), left - right)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("my-id", "simple", "1")
    assert [output["name"] for output in response["outputs"]] == ["OUTPUT1", "OUTPUT0"]


def test_all_outputs_come_when_none_is_named_and_else_the_one_that_is(client: triton.InferenceServerClient) -> None:
    ones = np.ones((1, 16), np.int32)
    inputs = [given(name, ones, "INT32", binary=True) for name in ("INPUT0", "INPUT1")]
    both, one = (
        client.infer("simple", inputs, outputs=wanted) for wanted in (None, [triton.InferRequestedOutput("OUTPUT1")])
    )
    assert both.as_numpy("OUTPUT0").tolist() == [[2] * 16]
    assert both.as_numpy("OUTPUT1").tolist() == one.as_numpy("OUTPUT1").tolist() == [[0] * 16]
    assert one.as_numpy("OUTPUT0") is None


@pytest.mark.parametrize("binary", [True, False])
def test_logits_equal_what_the_engine_gives_by_itself(
    client: triton.InferenceServerClient, images: np.ndarray, *, binary: bool
) -> None:
    outputs = [triton.InferRequestedOutput("logits", binary_data=binary)]
    got = client.infer("digits", [given("images", images, "UINT8", binary=binary)], outputs=outputs)
    logits = got.as_numpy("logits")
    assert logits.argmax(axis=1).tolist() == [0, 3, 7]
    np.testing.assert_allclose(logits, logits_of(open_bundle(DEMO), images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0]),
        ([[1, 2], [3, 4]], [1.0, 2.0, 3.0, 4.0]),
        ([1e300, 2], [float("inf"), 2.0]),
        (list(range(50_000)), list(range(50_000))),  # read beside the others
    ],
    ids=["flat", "nested", "beyond FP32", "large"],
)
def test_json_data_are_numbers_of_their_dtype(server: Server, data: list[Any], expected: list[float]) -> None:
    shape = [2, len(expected) // 2]
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "data": data}
    answer = server.post("/v2/models/identity_fp32/infer", json={"inputs": [tensor]})
    assert json.loads(answer.text)["outputs"] == [{"name": "y", "datatype": "FP32", "shape": shape, "data": expected}]


@pytest.mark.parametrize("binary", [True, False])
def test_an_output_whose_size_depends_on_the_values_is_right_every_time(
    client: triton.InferenceServerClient, *, binary: bool
) -> None:
    for places in ([0, 3], [], [1], [0, 1, 2, 3, 4, 5], [2, 4, 5]):
        array = np.zeros(6, np.float32)
        array[places] = 1.0
        outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
        result = client.infer("nonzero", [given("x", array, "FP32", binary=True)], outputs=outputs)
        assert result.as_numpy("y").tolist() == [places]


def test_a_model_without_a_batch_takes_its_whole_shape(client: triton.InferenceServerClient) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    result = client.infer("mean", [given("x", array, "FP32", binary=True)])
    np.testing.assert_allclose(result.as_numpy("y"), array - array.mean(axis=0))


def test_a_refused_request_changes_no_statistics(server: Server, client: triton.InferenceServerClient) -> None:
    before = server.statistics("simple")
    with pytest.raises(InferenceServerException):
        client.infer("simple", [given("INPUT0", np.ones((1, 16), np.int32), "INT32", binary=True)])
    assert server.statistics("simple") == before


def test_predictions_are_the_softmax_of_the_logits(server: Server, images: np.ndarray) -> None:
    logits = logits_of(open_bundle(DEMO), images)[2].astype(np.float64)
    softmax = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    answer = server.post("/predictions/digits?top_k=10", content=digit("seven")).json()
    assert (answer["model"], answer["version"]) == ("digits", "1")
    assert [row["class_id"] for row in answer["predictions"]] == np.argsort(-softmax).tolist()
    scores = [row["score"] for row in answer["predictions"]]
    np.testing.assert_allclose(scores, np.sort(softmax)[::-1], atol=1e-5)
    assert scores == [round(score, 6) for score in scores]
    assert set(answer["timing_ms"]) == {"decode_wait", "decode", "queue", "compute", "total"}
    assert answer["timing_ms"]["total"] >= answer["timing_ms"]["compute"] > 0
