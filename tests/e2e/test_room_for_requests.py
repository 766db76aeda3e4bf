"""What fits into the memory for requests by itself is answered; of what never fits nobody is told to send it again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.support.servers import Server, start_server, wait_until
from tests.support.stores import StoreFolder
from tests.support.wire import Wire, chunk, head

INFER = "/v2/models/identity_fp32/infer"


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    shared_store.add_identity("FP32")
    with start_server("--max-body-mb", "1", "--max-inflight-mb", "1", store=shared_store.root) as server:
        yield server


def infer(
    server: Server, header: dict[str, object], data: bytes = b"", *, is_compressed: bool = False
) -> httpx.Response:
    before = json.dumps({"inputs": [header]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(before))} if data else {}
    body = before + data
    if is_compressed:
        body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
    return server.post(INFER, content=body, headers=headers)


def incompressible(nbytes: int) -> tuple[dict[str, object], bytes]:
    data = np.random.default_rng(0).random(nbytes // 4, np.float32).tobytes()
    shape = [1, nbytes // 4]
    return {"name": "x", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": len(data)}}, data


def refused(reply: httpx.Response) -> None:
    assert reply.status_code == 413, reply.text[:200]
    assert "retry-after" not in reply.headers
    assert "raise --max-inflight-mb" in reply.json()["error"]


@pytest.mark.parametrize("is_compressed", [False, True])
def test_what_fits_is_answered(server: Server, *, is_compressed: bool) -> None:
    """A compressed body is held beside what it grows to, for which no more is taken than there is."""
    for _ in range(3):
        reply = infer(server, *incompressible(300_000), is_compressed=is_compressed)
        assert reply.status_code == 200, reply.text[:200]


def test_what_never_fits_is_too_large_and_not_too_early(server: Server) -> None:
    header, data = incompressible(700_000)
    assert infer(server, header, data).status_code == 200
    for _ in range(2):
        refused(infer(server, header, data, is_compressed=True))


def test_a_body_grows_whatever_others_have_begun(server: Server) -> None:
    header, data = incompressible(700_000)
    before = json.dumps({"inputs": [header]}).encode()
    fields = {"Inference-Header-Content-Length": str(len(before)), "Transfer-Encoding": "chunked"}
    with Wire(server.port) as grows, Wire(server.port) as other:
        grows.send(head(INFER, fields) + chunk(before + data[:300_000]))
        wait_until(lambda: server.stats()["inflight_bytes"] > 300_000, "it has begun")
        other.send(head(INFER, {"Content-Length": "100000"}) + b"{")
        wait_until(lambda: server.stats()["open_calls"] == 2, "the other one lies behind it")
        grows.send(chunk(data[300_000:]) + chunk(b""))
        assert grows.reply().status == 200
    wait_until(server.is_at_rest, "both have gone")


def test_nor_is_json_that_does_not_fit_beside_its_values(server: Server) -> None:
    values = [0.5] * 120_000
    refused(infer(server, {"name": "x", "datatype": "FP32", "shape": [1, len(values)], "data": values}))
