"""What crosses from the parent to a generator process and back."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.endpoint import wire_url
from convoy.loadtest.generator.job import read_blobs, write_blobs
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.processes import core_budget, process_count
from convoy.models.errors import UsageError


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
    with pytest.raises(UsageError, match="leave one of them away"):
        wire_url("grpc://host:1", "http")
