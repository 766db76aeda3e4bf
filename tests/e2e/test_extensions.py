"""What the protocol has beside tensors: compression, raw requests, parameters, refusals, and TorchServe's routes."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.servers import FakeServer, rows_request, start_fake_server, wait_until
from tests.support.stores import digit
from tests.support.wire import Wire, WireReply, check_refused, head

LARGE = 4000  # values, so that an answer is worth compressing
INFLATE = {"gzip": gzip.decompress, "deflate": zlib.decompress}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with start_fake_server(fake={"echo": True}, access_log="off", max_body_mb=2, rests=True) as server:
        yield server


@pytest.fixture
def wire(server: FakeServer) -> Iterator[Wire]:
    with Wire(server.port) as wire:
        yield wire


def large_request(**parameters: Any) -> bytes:
    tensor = {"name": "x", "shape": [1, LARGE], "datatype": "FP32", "data": list(range(LARGE))}
    return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()


def infer(wire: Wire, body: bytes, headers: dict[str, str], model: str = "echo_fp32") -> WireReply:
    return wire.ask(f"/v2/models/{model}/infer", body, headers)


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        (None, None),
        ("", None),
        ("identity", None),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("GZIP", "gzip"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate", "deflate"),
        ("gzip;q=0.5,deflate;q=0.4,identity;q=0.6", None),
        ("gzip; q=1.0, identity; q=0.5", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=0, deflate;q=0.001", "deflate"),
        ("br, zstd", None),
        ("br, gzip", "gzip"),
        ("*", None),
        ("gzip;q=many", None),
        ("gzip;q=2", None),
        ("gzip;q=nan", None),
        ("gzip;level=9", None),
        (";;;,,,q=1;gzip", None),
    ],
)
def test_the_client_says_how_its_answer_is_compressed(wire: Wire, accepted: str | None, encoding: str | None) -> None:
    headers = {} if accepted is None else {"Accept-Encoding": accepted}
    for binary in (False, True):
        plain = infer(wire, large_request(binary_data_output=binary), {})
        reply = infer(wire, large_request(binary_data_output=binary), headers)
        assert reply.headers.get("content-encoding") == encoding
        body = reply.body if encoding is None else INFLATE[encoding](reply.body)
        assert body == plain.body
        assert reply.headers.get("inference-header-content-length") == plain.headers.get(
            "inference-header-content-length"
        )


def test_a_small_answer_and_an_error_stay_as_they_are(wire: Wire) -> None:
    small = wire.ask("/v2/models/rows/infer", json.dumps(rows_request(1)).encode(), {"Accept-Encoding": "gzip"})
    wrong = infer(wire, b"{}" + b" " * 5000, {"Accept-Encoding": "gzip"})
    assert (small.status, wrong.status) == (200, 400)
    assert "content-encoding" not in small.headers | wrong.headers


def test_an_answer_that_does_not_shrink_stays_as_it_is(wire: Wire) -> None:
    noise = np.random.default_rng(1).bytes(LARGE)
    headers = {"Inference-Header-Content-Length": "0", "Accept-Encoding": "gzip"}
    reply = infer(wire, noise, headers, "echo_uint8")
    assert "content-encoding" not in reply.headers
    assert reply.body.endswith(noise)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_an_image_may_be_compressed(wire: Wire, encoding: str) -> None:
    image = digit("seven")
    body = gzip.compress(image) if encoding == "gzip" else zlib.compress(image)
    reply = wire.ask("/predictions/images", body, {"Content-Encoding": encoding})
    plain = wire.ask("/predictions/images", image)
    assert reply.json()["predictions"] == plain.json()["predictions"]


def test_the_model_is_told_before_the_compression_and_that_before_the_body(wire: Wire) -> None:
    headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": "-1"}
    assert infer(wire, b"no gzip", {"Content-Encoding": "br"}, "nobody").status == 404
    assert "is not gzip" in infer(wire, b"no gzip", headers).error
    assert "Inference-Header-Content-Length" in infer(wire, gzip.compress(b"no JSON"), headers).error
    del headers["Inference-Header-Content-Length"]
    assert "JSON" in infer(wire, gzip.compress(b"no JSON"), headers).error
    both = {"inputs": [{"name": "z", "shape": [], "datatype": "FP32", "data": []}], "outputs": [{"name": "z"}]}
    assert "unexpected inference input 'z'" in infer(wire, json.dumps(both).encode(), {}).error


@pytest.mark.parametrize(
    ("model", "body", "words"),
    [
        ("echo_fp32", b"\0" * 7, "input byte size mismatch for input 'x' for model 'echo_fp32'. Expected 4, got 7"),
        ("scalar_fp32", b"", "input byte size mismatch for input 'x' for model 'scalar_fp32'. Expected 4, got 0"),
        ("rows", b"\0" * 32, "input byte size mismatch for input 'x' for model 'rows'. Expected 16, got 32"),
    ],
)
def test_a_raw_request_must_be_one_sample(wire: Wire, model: str, body: bytes, words: str) -> None:
    check_refused(infer(wire, body, {"Inference-Header-Content-Length": "0"}, model), 400, words)


def test_a_raw_request_with_one_free_dimension_settles_it(wire: Wire) -> None:
    for size in (0, 1, 5):
        reply = infer(wire, b"\0" * 4 * size, {"Inference-Header-Content-Length": "0"})
        header = reply.headers.get("inference-header-content-length")
        document = json.loads(reply.body[: int(header)] if header else reply.body)
        assert document["outputs"][0]["shape"] == [1, size]


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"custom": "text", "count": 3, "share": 0.5, "flag": True}, None),
        ({"priority": 1}, None),
        ({"timeout": 5_000_000}, None),
        ({"sequence_id": 0, "sequence_start": False, "sequence_end": False}, None),
        ({"headers": "none"}, None),
        ({"triton_mine": 1}, "parameter keys starting with 'triton_' are reserved for Triton usage"),
        ({"list": [1]}, "parameter 'list' has an invalid type"),
        ({"nothing": None}, "parameter 'nothing' has an invalid type"),
        ({"timeout": True}, "'timeout'"),
        ({"priority": -1}, "'priority'"),
        ({"priority": 1 << 64}, "'priority'"),
    ],
)
def test_parameters_are_taken_unless_they_are_reserved_or_shapeless(
    server: FakeServer, parameters: dict[str, Any], error: str | None
) -> None:
    answer = server.post("/v2/models/rows/infer", json=rows_request(1, parameters=parameters))
    assert answer.status_code == (400 if error else 200), answer.text
    assert (error or "") in answer.json().get("error", "")


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v2/trace/setting", "the server does not support tracing"),
        ("/v2/models/rows/trace/setting", "the server does not support tracing"),
        ("/v2/models/rows/versions/1/trace/setting", "the server does not support tracing"),
        ("/v2/logging", "the server does not support dynamic logging"),
    ],
)
def test_what_is_not_offered_is_a_501_with_a_reason(wire: Wire, method: str, path: str, words: str) -> None:
    check_refused(wire.ask(path, b"{}", method=method), 501, words)


def test_the_extensions_are_those_that_are_offered(server: FakeServer) -> None:
    extensions = server.get("/v2").json()["extensions"]
    assert server.get("/v2/").json() == server.get("/v2").json()
    assert {"classification", "binary_tensor_data", "parameters", "statistics", "schedule_policy"} <= set(extensions)
    assert not {"trace", "logging", "cuda_shared_memory", "sequence", "system_shared_memory"} & set(extensions)


def test_torchserve_scripts_find_their_models(server: FakeServer) -> None:
    assert server.get("/ping").json() == {"status": "Healthy"}
    names = [row["modelName"] for row in server.get("/models").json()["models"]]
    assert names == sorted(names)
    assert {"rows", "images"} <= set(names)
    (described,) = server.get("/models/rows").json()
    assert (described["modelName"], described["modelVersion"], described["batchSize"]) == ("rows", "1", 16)
    assert described["workers"][0]["status"] == "READY"
    assert described["jobQueueStatus"] == {"remainingCapacity": 1024, "pendingRequests": 0}
    assert server.get("/models/rows/1").json() == server.get("/models/rows/all").json() == [described]


def test_torchserve_lists_come_in_pages(server: FakeServer) -> None:
    names: list[str] = []
    page: dict[str, Any] = {"nextPageToken": "0"}
    while "nextPageToken" in page:
        page = server.get(f"/models?limit=7&next_page_token={page['nextPageToken']}").json()
        assert len(page["models"]) <= 7
        names += [row["modelName"] for row in page["models"]]
    assert names == [row["modelName"] for row in server.get("/models").json()["models"]]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/models/nobody", 404, "'nobody' is not found"),
        ("/models/rows/7", 404, "version 7 is not found"),
        ("/models/nobody/all", 404, "'nobody' is not found"),
        ("/models?limit=0", 400, "limit"),
        ("/models?next_page_token=-1", 400, "next_page_token"),
        ("/models?limit=many", 400, "limit"),
    ],
)
def test_torchserve_routes_err_like_all_others(wire: Wire, path: str, status: int, words: str) -> None:
    check_refused(wire.ask(path, method="GET"), status, words)


def test_the_body_of_a_control_route_is_bounded(wire: Wire) -> None:
    check_refused(wire.ask("/v2/repository/index", b" " * (2 << 20)), 413)


def test_a_client_that_leaves_within_the_body_of_a_control_route_is_no_bug() -> None:
    with start_fake_server(access_log="all") as logging, Wire(logging.port) as wire:
        wire.send(head("/v2/repository/index", {"Content-Length": "20"}) + b"{")
        wire.close()
        wait_until(lambda: "POST /v2/repository/index left" in logging.log_so_far, "the log has it")
        assert "this is a bug" not in logging.log
