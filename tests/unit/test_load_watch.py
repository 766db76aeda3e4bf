"""How loaded a core is, in virtual time, and how that is told: ORCA over HTTP and gRPC."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from test_connection import House, rows, shift

from convoy.app.calls.access import report_header, report_message
from convoy.app.lifecycle.load_watch import CoreLoad, LoadWatch
from tests.support.fake_devices import MAX_BATCH, Workshop, in_workshop

LOAD = CoreLoad(0.25, 120.5, 0.0)
ASKS = "endpoint-load-metrics-format"


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def orca_message() -> Any:
    """The two fields of xds.data.orca.v3.OrcaLoadReport, with the numbers that its .proto gives them."""
    file = descriptor_pb2.FileDescriptorProto(name="orca_part.proto", package="part", syntax="proto3")
    message = file.message_type.add(name="OrcaLoadReport")
    for name, number in (("rps_fractional", 6), ("application_utilization", 9)):
        message.field.add(name=name, number=number, type=1, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("part.OrcaLoadReport"))


def test_each_format_says_the_same() -> None:
    assert report_header(b"TEXT", LOAD) == b"TEXT application_utilization=0.2500, rps_fractional=120.50"
    kind, told = (report_header(b" json ", LOAD) or b"").split(b" ", 1)
    assert kind == b"JSON"
    assert json.loads(told) == {"application_utilization": 0.25, "rps_fractional": 120.5}
    kind, told = (report_header(b"bin", LOAD) or b"").split(b" ", 1)
    assert (kind, b64decode(told)) == (b"BIN", report_message(LOAD))
    assert report_header(b"XML", LOAD) is None
    read = orca_message().FromString(report_message(LOAD))
    assert (read.application_utilization, read.rps_fractional) == (0.25, 120.5)


class Watched:
    """A workshop's core under a watch whose clocks the test has."""

    def __init__(self, workshop: Workshop) -> None:
        self.now_s = self.loop_s = 0.0
        core = workshop.core
        self.watch = LoadWatch(core.catalog, core.scheduler, lambda: self.now_s, lambda: self.loop_s)
        (self.served,) = core.catalog.served()
        self.watch.look()

    @property
    def most_per_s(self) -> float:
        (lane,) = self.served.lanes
        size = lane.batch_sizes[-1]
        assert size == MAX_BATCH
        return size * 1e9 / (lane.expect_ns(size) - lane.hidden_ns(size))

    def pass_s(self, seconds: float, samples: float = 0, loop_s: float = 0.0) -> CoreLoad:
        """So many samples are computed meanwhile, one in a batch, and the loop takes so much CPU time."""
        self.now_s += seconds
        self.loop_s += loop_s
        self.served.statistics.inference_count += round(samples)
        self.served.statistics.success.count += round(samples)
        self.watch.look()
        return self.watch.load


def test_the_load_is_the_share_of_what_full_batches_could_do_or_of_the_loops_time(workshop: Workshop) -> None:
    async def scenario() -> None:
        watched = Watched(workshop)
        half = watched.most_per_s / 2
        load = watched.pass_s(1.0, samples=half)
        assert load.utilisation == pytest.approx(0.5, rel=0.01)
        assert load.requests_per_s == pytest.approx(half, rel=0.01)
        assert load.waiting_s == 0
        assert Watched(workshop).pass_s(2.0, samples=1, loop_s=1.8).utilisation == pytest.approx(0.9)

    in_workshop(workshop, scenario)


def test_the_load_is_that_of_the_last_seconds_also_of_a_version_that_is_loaded_again(workshop: Workshop) -> None:
    async def scenario() -> None:
        watched = Watched(workshop)
        assert watched.pass_s(0.5, samples=100).requests_per_s == 200
        rates = [watched.pass_s(0.5).requests_per_s for _ in range(12)]
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] == 0
        core, before = workshop.core, watched.served
        core.lifecycle.put_into_service(workshop.load(before.loaded.stored, before.options), before.options)
        (again,) = core.catalog.served()
        assert again.statistics.inference_count >= 100
        load = watched.pass_s(1.0)
        assert (load.utilisation, load.requests_per_s) == (0, 0)

    in_workshop(workshop, scenario)


def test_each_request_that_asks_is_told_the_load_of_now(workshop: Workshop) -> None:
    async def scenario() -> None:
        house = House(workshop)
        connection = house.connect()
        assert "endpoint-load-metrics" not in (await connection.ask(rows(1.0))).headers
        unknown = await connection.ask(rows(1.0, headers={ASKS: "XML"}))
        assert (unknown.status, "endpoint-load-metrics" in unknown.headers) == (200, False)
        found = []
        for number in range(6):
            house.core.load_watch.load = CoreLoad(number / 10, number)
            reply = await connection.ask(rows(float(number), headers={ASKS: "TEXT"}))
            assert shift(reply) == number + 100
            found.append(reply.headers["endpoint-load-metrics"])
        assert found == [
            f"TEXT application_utilization={number / 10:.4f}, rps_fractional={number:.2f}" for number in range(6)
        ]

    in_workshop(workshop, scenario)
