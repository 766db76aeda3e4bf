"""The classification extension, in the reference's exact format, over both wires."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from convoy.models.bundle import open_bundle
from convoy.models.images import preprocess
from tests.support.servers import Server, start_server
from tests.support.stores import DEMO, StoreFolder, digit
from tests.support.wire import check_refused
from tests.support.wire_forms import region

KITS: dict[str, Any] = {"http": triton, "grpc": triton_grpc}


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    shared_store.add_digits()
    for dtype in ("FP32", "FP64", "INT32", "INT64", "UINT8", "UINT64", "FP16", "BF16", "BOOL", "BYTES"):
        shared_store.add_identity(dtype)
    shared_store.add_identity("FP32", (2, 3), name="whole")
    shared_store.add_identity("FP32", ("batch", 2, 2), name="deep")
    with start_server(
        "--engine", "auto", "--access-log", "off", "--allow-shared-memory", store=shared_store.root
    ) as server:
        yield server


@pytest.fixture(params=KITS)
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Any]:
    address = server.grpc_address if request.param == "grpc" else f"127.0.0.1:{server.port}"
    with KITS[request.param].InferenceServerClient(address) as client:
        yield client


def classify(client: Any, model: str, array: np.ndarray, dtype: str, count: int, **form: Any) -> list[list[str]]:
    kit = triton_grpc if isinstance(client, triton_grpc.InferenceServerClient) else triton
    metadata = client.get_model_metadata(model)
    names = [metadata[side][0]["name"] for side in ("inputs", "outputs")] if kit is triton else ["x", "y"]
    given = kit.InferInput(names[0], list(array.shape), dtype)
    given.set_data_from_numpy(array)
    wanted = kit.InferRequestedOutput(names[1], class_count=count, **form)
    answer = client.infer(model, [given], outputs=[wanted]).as_numpy(names[1])
    return np.char.decode(answer.astype(np.bytes_)).tolist() if answer.dtype == object else answer.tolist()


def test_values_indices_and_labels_of_real_digits(server: Server) -> None:
    spec = open_bundle(DEMO).manifest.spec.image
    assert spec is not None
    images = np.stack([preprocess(digit(word), spec) for word in ("zero", "three", "seven")])
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        rows = classify(client, "digits", images, "UINT8", 3)
        given = triton.InferInput("images", list(images.shape), "UINT8")
        given.set_data_from_numpy(images)
        logits = client.infer("digits", [given]).as_numpy("logits")
    assert len(rows) == 3
    for row, values, best in zip(rows, logits, (0, 3, 7), strict=True):
        order = np.argsort(-values)[:3]
        # Batches are formed anew, so the last digits may differ; the format may not.
        fields = [entry.split(":") for entry in row]
        assert [(int(index), label) for _, index, label in fields] == [(i, str(i)) for i in order]
        np.testing.assert_allclose([float(value) for value, _, _ in fields], values[order], atol=1e-3)
        assert all(len(value.partition(".")[2]) == 6 for value, _, _ in fields)
        assert order[0] == best


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("FP32", [0.1, 0.9, -3.0], ["0.900000:1", "0.100000:0", "-3.000000:2"]),
        ("FP64", [1.0, 1.0, 1e10], ["10000000000.000000:2", "1.000000:0", "1.000000:1"]),
        ("FP32", [np.nan, -np.inf, np.inf], ["inf:2", "-inf:1", "nan:0"]),
        ("INT32", [-(1 << 31), 0, (1 << 31) - 1], ["2147483647:2", "0:1", "-2147483648:0"]),
        ("INT64", [-(1 << 63), 5, 5], ["5:1", "5:2", "-9223372036854775808:0"]),
        ("UINT8", [0, 255, 7], ["255:1", "7:2", "0:0"]),
        ("UINT64", [0, (1 << 64) - 1, 1], ["18446744073709551615:1", "1:2", "0:0"]),
    ],
)
def test_the_largest_come_first_as_text(client: Any, dtype: str, values: list[float], expected: list[str]) -> None:
    array = np.array([values], {"FP32": "f4", "FP64": "f8"}.get(dtype, dtype.lower()))
    assert classify(client, f"identity_{dtype.lower()}", array, dtype, 3) == [expected]
    assert classify(client, f"identity_{dtype.lower()}", array, dtype, 1) == [expected[:1]]
    assert classify(client, f"identity_{dtype.lower()}", array, dtype, 1000) == [expected]


@pytest.mark.parametrize(
    ("model", "values", "expected"),
    [
        ("deep", [[[1, 4], [3, 2]], [[0, 0], [0, 9]]], [["4.000000:1", "3.000000:2"], ["9.000000:3", "0.000000:0"]]),
        ("whole", [[1, 4, 2], [3, 6, 5]], ["6.000000:4", "5.000000:5"]),
    ],
)
def test_what_lies_behind_the_batch_or_has_none_is_one_list(
    client: Any, model: str, values: Any, expected: list[Any]
) -> None:
    assert classify(client, model, np.array(values, np.float32), "FP32", 2) == expected


def test_classes_come_as_json_or_binary(server: Server) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        for form in ({"binary_data": True}, {"binary_data": False}):
            rows = classify(client, "identity_fp32", np.float32([[1, 2]]), "FP32", 1, **form)
            assert rows == [["2.000000:1"]]


@pytest.mark.parametrize("dtype", ["FP16", "BF16", "BOOL", "BYTES"])
def test_a_type_without_an_order_is_refused(server: Server, dtype: str) -> None:
    path = f"/v2/models/identity_{dtype.lower()}/infer"
    words = f"class result not available for output due to unsupported type '{dtype}'"
    document = {
        "inputs": [{"name": "x", "shape": [1, 0], "datatype": dtype, "parameters": {"binary_data_size": 0}}],
        "outputs": [{"name": "y", "parameters": {"classification": 1}}],
    }
    check_refused(server.post(path, json=document), 400, words)


@pytest.mark.parametrize("count", [-1, 1.5, "3", True, None, 1 << 60])
def test_a_number_of_classes_is_a_whole_number(server: Server, count: object) -> None:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    outputs = [{"name": "y", "parameters": {"classification": count}}]
    check_refused(
        server.post("/v2/models/identity_fp32/infer", json={"inputs": [tensor], "outputs": outputs}),
        400,
        "'classification'",
    )


def test_more_than_a_million_values_are_refused(client: Any) -> None:
    array = np.zeros((1, 1_000_001), np.float32)
    with pytest.raises(InferenceServerException, match="classification output tensor too large"):
        classify(client, "identity_fp32", array, "FP32", 1)


def test_classes_do_not_go_into_shared_memory(server: Server) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client, region(client, nbytes=64) as place:
        parameters = {"classification": 1, "shared_memory_region": place.name, "shared_memory_byte_size": 64}
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
        outputs = [{"name": "y", "parameters": parameters}]
        answer = server.post("/v2/models/identity_fp32/infer", json={"inputs": [tensor], "outputs": outputs})
    check_refused(answer, 400, "Output can't set both 'shared_memory_region' and 'classification'")
