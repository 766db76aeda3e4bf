"""What a load test will send: options, arrivals, bodies, and how many processes share them."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.arrivals import bursts_s, constant_s, poisson_s, schedule_of
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
from convoy.loadtest.endpoint import Endpoint, wire_url
from convoy.loadtest.generator.job import read_blobs, write_blobs
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.processes import core_budget, process_count
from convoy.loadtest.units import NS_PER_S
from convoy.models.errors import JobError, UsageError


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rate": 5, "concurrency": 5}, "only one of them"),
        ({"rate": 0}, "--rate must be"),
        ({"rate": float("nan")}, "--rate must be"),
        ({"duration_s": -1}, "--duration must be"),
        ({"duration_s": float("inf")}, "--duration must be"),
        ({"duration_s": 1e9}, "--duration must be at most"),
        ({"slo_ms": 0}, "--slo-ms must be"),
        ({"timeout_s": 0}, "--timeout must be"),
        ({"warm_up_s": 10.0, "duration_s": 10.0}, "--warm-up must be"),
        ({"concurrency": 0}, "--concurrency must be"),
        ({"connections": 100_000}, "--connections must be"),
        ({"rate": 1e6, "duration_s": 60}, "lower the rate or the duration"),
        ({"body": "xml"}, "--body must be"),
        ({"arrivals": "bursts"}, "needs --rate"),
        ({"arrivals": "sometimes", "rate": 1}, "--arrivals must be poisson, constant or bursts"),
        ({"protocol": "smtp"}, "--protocol must be"),
        ({"find_capacity": True}, "needs --slo-ms"),
        ({"find_capacity": True, "slo_ms": 5, "rate": 5}, "different kinds of load"),
        ({"find_capacity": True, "slo_ms": 5, "arrivals": "constant"}, "Poisson"),
        ({"steps": (100.0, -1.0)}, "--steps must be"),
        ({"processes": 0}, "--processes must be"),
        ({"burst_off_s": 0.0, "rate": 1, "arrivals": "bursts"}, "--burst-off must be"),
        ({"api_key": "line\r\nbreak"}, "API key"),
    ],
)
def test_a_wrong_call_is_named(wrong, words):
    with pytest.raises(UsageError, match=words):
        LoadTestOptions(**wrong)


def test_a_report_that_could_not_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(UsageError, match="folder does not exist"):
        LoadTestOptions(json_file=tmp_path / "missing" / "report.json")


rates = st.floats(0.1, 5000)
durations_s = st.floats(0.01, 10)
kinds = st.sampled_from(["poisson", "constant", "bursts"])


@given(kinds, rates, durations_s, st.integers(0, 1000))
def test_a_schedule_rises_and_lies_within_the_duration(arrivals, rate, duration_s, seed):
    options = LoadTestOptions(rate=rate, arrivals=arrivals, duration_s=duration_s, seed=seed)
    offsets_ns = schedule_of(options).offsets_ns
    assert (np.diff(offsets_ns) >= 0).all()
    assert ((offsets_ns >= 0) & (offsets_ns < duration_s * NS_PER_S)).all()


@given(rates, durations_s)
def test_constant_arrivals_are_evenly_spaced_and_all_there(rate, duration_s):
    due_s = constant_s(rate, duration_s)
    assert abs(len(due_s) - rate * duration_s) <= 1
    assert np.abs(np.diff(due_s) - 1 / rate).max(initial=0) <= 1e-6


def test_poisson_gaps_are_exponential():
    gaps_s = np.diff(poisson_s(1000.0, 60.0, 1))
    assert gaps_s.mean() == pytest.approx(1e-3, rel=0.03)
    assert gaps_s.std() == pytest.approx(1e-3, rel=0.03)  # mean and deviation are equal for no other schedule here
    assert np.quantile(gaps_s, 0.5) == pytest.approx(np.log(2) * 1e-3, rel=0.03)


def test_the_seed_makes_the_schedule_which_another_rate_paces():
    slow_s, fast_s = poisson_s(100, 10, 7), poisson_s(200, 5, 7)
    assert (slow_s == poisson_s(100, 10, 7)).all()
    assert not np.array_equal(slow_s, poisson_s(100, 10, 8))
    assert np.allclose(slow_s[:400], 2 * fast_s[:400])


@given(st.floats(0.1, 3), st.floats(0.1, 3), st.integers(0, 100))
def test_bursts_are_silent_between_and_keep_their_mean_over_whole_cycles(on_s, off_s, seed):
    cycles, rate = 5, 400.0
    due_s = bursts_s(rate, cycles * (on_s + off_s), on_s, off_s, seed)
    assert (due_s % (on_s + off_s) <= on_s + 1e-9).all()
    expected = rate * cycles * (on_s + off_s)
    assert abs(len(due_s) - expected) < 6 * np.sqrt(expected)


def test_a_ladder_gives_each_step_its_rate_and_its_time():
    schedule = schedule_of(LoadTestOptions(steps=(100, 400, 50), arrivals="constant", duration_s=2))
    assert [(step.rate, step.start_s, step.end_s) for step in schedule.steps] == [(100, 0, 2), (400, 2, 4), (50, 4, 6)]
    assert np.histogram(schedule.offsets_ns / NS_PER_S, [0, 2, 4, 6])[0].tolist() == [200, 800, 100]


@given(st.integers(1, 8), st.integers(0, 50))
def test_processes_share_a_schedule_without_loss_and_each_has_the_whole_shape(count, seed):
    schedule = schedule_of(LoadTestOptions(rate=500, duration_s=1, seed=seed))
    shares = [schedule.share(index, count) for index in range(count)]
    assert np.sort(np.concatenate(shares)).tolist() == schedule.offsets_ns.tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


ENDPOINT = Endpoint("http://h:8000/p", "h", "127.0.0.1", 8000, False, "/p")
inputs = st.builds(
    Input,
    st.sampled_from(["x", "images"]),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(-1, 4), max_size=3).map(tuple),
)


@given(st.lists(inputs, min_size=1, max_size=3), st.integers(0, 5))
def test_a_binary_request_carries_what_its_head_says(inputs, seed):
    for payload in binary_payloads(inputs, seed):
        length = int(dict(payload.headers)["Inference-Header-Content-Length"])
        head, tensors = json.loads(payload.body[:length]), payload.body[length:]
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
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "c.JPG").write_bytes(b"C")
    assert [payload.body for payload in image_payloads(tmp_path)] == [b"A", b"B", b"C"]
    for number in range(1_200):
        (tmp_path / "c" / f"{number}.png").write_bytes(b"D")
    assert len(image_payloads(tmp_path)) == 602
    assert image_payloads(tmp_path / "missing") == []


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_requests_pass_through_shared_memory_as_they_are(blobs):
    descriptor = write_blobs(blobs)
    try:
        assert read_blobs(descriptor, len(blobs)) == blobs
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("options", "protocol", "budget", "count"),
    [
        ({"rate": 100.0}, "http", 2, 1),
        ({"rate": 50_000.0}, "http", 2, 1),  # the other core is the server's
        ({"rate": 50_000.0}, "http", 64, 5),
        ({"rate": 5000.0}, "grpc", 64, 5),
        ({"rate": 5000.0, "arrivals": "bursts", "burst_off_s": 3.0}, "http", 64, 2),
        ({"concurrency": 16}, "http", 64, 1),
        ({"concurrency": 1000}, "http", 64, 8),
        ({"concurrency": 3, "processes": 8}, "http", 64, 3),  # a process without a client has nothing to do
        ({"rate": 10.0, "processes": 4}, "http", 1, 4),
    ],
)
def test_as_few_processes_as_the_load_needs(options, protocol, budget, count):
    assert process_count(LoadTestOptions(**options), protocol, budget) == count


def test_a_containers_quota_counts(tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    assert core_budget(quota) == 1
    quota.write_text("max 100000\n")
    assert core_budget(quota) == core_budget(tmp_path / "missing") >= 1


def test_the_protocol_and_the_url_agree():
    assert wire_url("http://127.0.0.1:8000", "grpc") == "grpc://127.0.0.1:8001"
    assert wire_url("https://host:1/x", "grpc") == "grpcs://host:1/x"
    assert wire_url("grpc://host:1", "auto") == "grpc://host:1"
    with pytest.raises(UsageError, match="leave one of them out"):
        wire_url("grpc://host:1", "http")
