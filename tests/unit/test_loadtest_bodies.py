from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.bodies import (
    DTYPES,
    Input,
    Payload,
    binary_payloads,
    image_payloads,
    infer_path,
    json_payloads,
    request_bytes,
)
from convoy.loadtest.endpoint import Endpoint
from convoy.models.errors import JobError

ENDPOINT = Endpoint("http://h:8000/p", "h", "127.0.0.1", 8000, False, "/p")
inputs = st.builds(
    Input,
    st.sampled_from(["x", "images"]),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(-1, 4), max_size=3).map(tuple),
)


def head_and_tensors(payload: Payload) -> tuple[dict, bytes]:
    length = int(dict(payload.headers)["Inference-Header-Content-Length"])
    return json.loads(payload.body[:length]), payload.body[length:]


@given(st.lists(inputs, min_size=1, max_size=3), st.integers(0, 5))
def test_a_binary_request_carries_what_its_head_says(inputs, seed):
    for payload in binary_payloads(inputs, seed):
        head, tensors = head_and_tensors(payload)
        for one, described in zip(inputs, head["inputs"], strict=True):
            size_bytes = described["parameters"]["binary_data_size"]
            assert size_bytes == math.prod(described["shape"]) * np.dtype(DTYPES[one.datatype]).itemsize
            assert min(described["shape"], default=0) >= 0
            tensors = tensors[size_bytes:]
        assert tensors == b""


@given(st.lists(inputs.filter(lambda one: one.datatype != "FP16"), min_size=1, max_size=3))
def test_a_json_request_carries_as_many_values_as_its_shape(inputs):
    for payload in json_payloads(inputs, 0):
        for described in json.loads(payload.body)["inputs"]:
            assert len(described["data"]) == math.prod(described["shape"])


def test_bodies_differ_and_the_seed_makes_them():
    images = [Input("x", "UINT8", (-1, 8, 8, 3))]
    assert len({payload.body for payload in binary_payloads(images, 0)}) == 16
    assert binary_payloads(images, 3) == binary_payloads(images, 3)
    assert binary_payloads(images, 3) != binary_payloads(images, 4)


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(JobError, match="datatype BYTES"):
        Input("x", "BYTES", (1,))
    with pytest.raises(JobError, match="larger than"):
        Input("x", "FP32", (-1, 100_000, 100_000))
    with pytest.raises(JobError, match="use --body binary"):
        json_payloads([Input("x", "FP16", (1,))], 0)


def test_a_request_is_whole_http():
    payload = Payload(b"body", (("Content-Type", "x/y"),))
    request = request_bytes(ENDPOINT, infer_path("a b/ü"), payload, "key")
    head, body = request.split(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /p/v2/models/a%20b%2F%C3%BC/infer HTTP/1.1"
    assert {"Host: h:8000", "Content-Type: x/y", "Authorization: Bearer key", "Content-Length: 4"} < set(lines)
    assert body == b"body"


def test_shipped_images_are_found_in_order(tmp_path):
    (tmp_path / "b.png").write_bytes(b"B")
    (tmp_path / "a.png").write_bytes(b"A")
    (tmp_path / "notes.txt").write_bytes(b"")
    assert [payload.body for payload in image_payloads(tmp_path)] == [b"A", b"B"]
    assert image_payloads(tmp_path / "missing") == []
