"""What crosses from the parent to a generator process and back."""

from __future__ import annotations

import os
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.answers import AnswerCheck
from convoy.loadtest.endpoint import Endpoint, wire_url
from convoy.loadtest.generator.job import Finished, GeneratorJob, line_of, read_blobs, write_blobs
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.problems import Fault, Problem
from convoy.loadtest.processes import core_budget, process_count
from convoy.loadtest.request_pool import RequestPool
from convoy.models.errors import UsageError

ENDPOINT = Endpoint("http://h:1/p", "h", "127.0.0.1", 1, False, "/p")


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_requests_pass_through_shared_memory_as_they_are(blobs):
    descriptor = write_blobs(blobs)
    try:
        assert read_blobs(descriptor, len(blobs)) == blobs
    finally:
        os.close(descriptor)


def test_a_job_is_one_line_and_comes_out_as_it_went_in():
    requests, schedule = write_blobs([b"one", b"two"]), write_blobs([array("q", (5, 9)).tobytes()])
    job = GeneratorJob(
        endpoint=ENDPOINT,
        protocol="grpc",
        form="plain",
        word=b"\xff\n\x00".decode("latin-1"),
        metadata=(("authorization", "Bearer x"),),
        requests=2,
        requests_descriptor=requests,
        clients=None,
        schedule_descriptor=schedule,
        capacity=2,
        rows_descriptor=99,
        connections=3,
        first_connections=1,
        duration_s=1.5,
        timeout_s=2,
    )
    line = line_of(job)
    assert line.count(b"\n") == 1
    found = msgspec.json.decode(line, type=GeneratorJob)
    assert found == job
    request_pool = found.request_pool()
    assert request_pool.requests == [b"one", b"two"]
    assert request_pool.check.word == b"\xff\n\x00"
    assert found.offsets_ns() == [5, 9]
    for descriptor in (requests, schedule):
        os.close(descriptor)
    assert isinstance(request_pool, RequestPool)
    assert isinstance(request_pool.check, AnswerCheck)


def test_last_words_come_out_as_they_went_in():
    finished = Finished((Problem(Fault.HTTP, "the queue is full", 429),), 3, 0.5, "uvloop", "timerfd", False)
    assert msgspec.json.decode(line_of(finished), type=Finished) == finished


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
    with pytest.raises(UsageError, match="leave one of them away"):
        wire_url("grpc://host:1", "http")
