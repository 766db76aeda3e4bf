"""What the server promises and does not keep yet: each test asks for the promise, and is expected to fail.

They are strict: one that passes is a failure of the suite, so whoever mends a promise takes its mark away. All ask
from the outside, and none asserts how long something took but against a deadline that the request itself has.
"""

from __future__ import annotations

import io
import json
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.support.servers import FakeServer, Server, rows_request, start_fake_server, start_server, wait_until
from tests.support.stores import StoreFolder, digit
from tests.support.wire import Wire, chunk, head

MIB = 1 << 20
DIGITS = "/predictions/digits"
ROWS = "/v2/models/rows/infer"
# What a process may use for its work beside the memory that its requests are admitted to.
LEEWAY_BYTES = 128 * MIB


class NotKept(Exception):
    """The very promise that a test is about is not kept; whatever else goes wrong is an ordinary failure."""


def not_yet(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=reason, raises=NotKept)


def promise(is_kept: bool, seen: object) -> None:
    if not is_kept:
        raise NotKept(seen)


def peak_bytes(server: Server) -> int:
    """The most memory that the server's process has ever held."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum over all series of the name that have these labels, or do not know them."""
    samples = [
        sample
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == name and all(sample.labels.get(key, value) == value for key, value in labels.items())
    ]
    return sum(sample.value for sample in samples)


def flat(document: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a document, by where it stands."""
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from flat(value, f"{path}.{key}")
    elif isinstance(document, int | float):
        yield path, document


def picture(side: int, mode: str, form: str) -> bytes:
    """A square of one colour: few bytes for many pixels."""
    out = io.BytesIO()
    Image.new(mode, (side, side), (40, 80, 120, 200)[: len(mode)]).save(out, form)
    return out.getvalue()


def waiting_rows(server: Server) -> int:
    (rows,) = [one for one in server.stats()["models"] if one["name"] == "rows"]
    return int(rows["waiting_samples"])


@contextmanager
def on_one_cpu() -> Iterator[None]:
    """Who is started meanwhile decodes in one thread, however many processors the machine has."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# --- memory


@pytest.mark.long
@not_yet("gRPC reads whole messages before anything is admitted, and parses them into copies")
def test_large_grpc_messages_stay_within_the_memory_for_requests(store: StoreFolder) -> None:
    """24 of 12 MiB, where all requests together may hold 64 MiB."""
    store.add_identity("FP32")
    allowed = 64 * MIB
    data = bytes(12 * MIB)
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", shape=[1, len(data) // 4], datatype="FP32")
    request = service_pb2.ModelInferRequest(
        model_name="identity_fp32", inputs=[tensor], raw_input_contents=[data]
    ).SerializeToString()
    limits = ("--max-body-mb", "16", "--max-inflight-mb", "64")
    with start_server(*limits, store=store.root) as server, ExitStack() as stack:
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(server.grpc_address, options)) for _ in range(24)]
        asks = [channel.unary_unary("/inference.GRPCInferenceService/ModelInfer") for channel in channels]
        for channel in channels:
            grpc.channel_ready_future(channel).result(30)
        before = peak_bytes(server)
        calls = [ask.future(request, timeout=60) for ask in asks]
        codes = {call.code() for call in calls}
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        grown = peak_bytes(server) - before
        promise(grown <= allowed + LEEWAY_BYTES, f"{grown / MIB:.0f} MiB more")


@pytest.mark.long
@not_yet("what a decoder needs is counted nowhere")
def test_an_image_is_decoded_within_the_memory_for_requests() -> None:
    """150 KB of 36 million pixels with alpha: refused, or decoded in less; never several copies of it all."""
    image = picture(6000, "RGBA", "PNG")
    with start_server("--max-body-mb", "8", "--max-inflight-mb", "64") as server:
        assert server.post(DIGITS, content=digit("seven")).status_code == 200
        before = peak_bytes(server)
        assert server.post(DIGITS, content=image).status_code in (200, 400, 413, 429)
        grown = peak_bytes(server) - before
        promise(grown <= 64 * MIB + LEEWAY_BYTES, f"{grown / MIB:.0f} MiB more")


@not_yet("a body without a length moves to a slot of twice the size, and an edge's part has no room for both")
def test_a_chunked_body_that_is_allowed_is_read_behind_an_edge() -> None:
    body = digit("seven") + bytes(5 * MIB)  # what is appended to a PNG is not looked at
    with start_server("--edges", "1", "--max-body-mb", "8", "--max-inflight-mb", "16") as server:
        with Wire(server.port) as wire:
            assert wire.ask(DIGITS, body).status == 200
        for _ in range(3):
            wait_until(server.is_at_rest, "nothing else holds memory")
            with Wire(server.port) as wire:
                pieces = [chunk(body[start : start + MIB]) for start in range(0, len(body), MIB)]
                wire.send(head(DIGITS, {"Transfer-Encoding": "chunked"}) + b"".join(pieces) + chunk(b""))
                reply = wire.reply()
            assert reply.status in (200, 429)
            promise(reply.status == 200, reply)


# --- deadlines


@pytest.mark.long
@not_yet("decoding knows neither deadlines nor who has left")
def test_what_nobody_waits_for_is_not_decoded() -> None:
    """A second's deadline is kept, or refused in time, behind images whose clients have left."""
    slow, deadline_s = picture(4000, "RGB", "WebP"), 1.0
    with on_one_cpu(), start_server("--max-body-mb", "8", "--drain-timeout-s", "1") as server:
        server.post(DIGITS, content=digit("seven"))
        for _ in range(128):
            with Wire(server.port) as wire:
                wire.send(head(DIGITS, {"Content-Length": str(len(slow))}) + slow)
        wait_until(lambda: server.stats()["inflight_bytes"], "the first of them has arrived")
        try:
            with server.client(timeout=10 * deadline_s) as client:
                reply = client.post(f"{DIGITS}?timeout_ms={1e3 * deadline_s:g}", content=digit("seven"))
        except httpx.ReadTimeout as error:
            raise NotKept(f"no answer within {10 * deadline_s:g} s") from error
        assert reply.status_code in (200, 429, 504)
        promise(reply.elapsed.total_seconds() < 3 * deadline_s, f"{reply} after {reply.elapsed}")


@not_yet("the smaller number goes first, and no priority is the smallest")
def test_priority_one_goes_before_none() -> None:
    """As in the protocol: 1 is the most urgent, and 0 or nothing is the default."""
    order: list[int] = []
    counted = threading.Lock()

    def ask(server: FakeServer, priority: int) -> None:
        parameters = {"priority": priority} if priority else None
        status = server.post(ROWS, json=rows_request(1.0, parameters=parameters)).status_code
        with counted:
            order.append(priority)
        assert status == 200

    with start_fake_server(fake={"latency_ms": 30, "max_batch": 1}) as server, ThreadPoolExecutor(9) as pool:
        server.switch_on("hold")
        first = pool.submit(ask, server, 0)
        wait_until(lambda: server.stats()["unfinished_requests"] == 1, "the engine is busy")
        rest = []
        for waiting, priority in enumerate((0, 1) * 4, start=1):
            rest.append(pool.submit(ask, server, priority))
            wait_until(lambda waiting=waiting: waiting_rows(server) == waiting, "it waits")
        server.switch_off("hold")
        for one in (first, *rest):
            one.result()
    assert sorted(order) == [0] * 5 + [1] * 4
    promise(order[1:5] == [1, 1, 1, 1], order)


# --- the books


class Refusals:
    """What became of the requests to `refusing`: one is late in the engine, and one behind it fills the queue."""

    answered, late, refused = 2, 1, 5

    def __init__(self, server: FakeServer) -> None:
        assert server.infer(1.0).status_code == 200
        server.switch_on("hold")
        # An idle engine admits whatever is not late yet, so this one is never refused.
        assert server.post(f"{ROWS}?timeout_ms=100", json=rows_request(1.0)).status_code == 504
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(server.infer, 1.0)
            wait_until(lambda: waiting_rows(server) == 1, "the queue is full")
            refused = [server.infer(1.0).status_code for _ in range(self.refused)]
            server.switch_off("hold")
            assert waits.result().status_code == 200
        assert refused == [429] * self.refused
        wait_until(server.is_at_rest, "all has ended")


def promise_counted(server: Server, refused: int) -> None:
    """So many refusals that clients have seen are in the metric, by whatever reason."""
    counted = metric(server, "convoy_rejected_total")
    promise(counted == refused, f"{counted:g} of {refused}")


@pytest.fixture
def refusing() -> Iterator[FakeServer]:
    with start_fake_server(fake={"max_batch": 1}, max_queue=1) as server:
        Refusals(server)
        yield server


@not_yet("a refusal is an observation like any other")
def test_durations_are_those_of_answers(refusing: FakeServer) -> None:
    """Where the histogram tells outcomes apart, those of the answers are looked at."""
    counted = metric(refusing, "convoy_request_duration_seconds_count", model="rows", outcome="answered")
    promise(counted == Refusals.answered, f"{counted:g} durations")


@pytest.mark.parametrize(
    ("words", "count"), [("refus|reject", Refusals.refused), (r"\blate\b|deadline|expired", Refusals.late)]
)
@not_yet("the page for people knows answers only")
def test_stats_show_what_was_not_answered(refusing: FakeServer, words: str, count: int) -> None:
    shown = {path: value for path, value in flat(refusing.stats()) if re.search(words, path)}
    promise(count in shown.values(), shown)


@pytest.mark.long
@not_yet("the decoding threads refuse, and nobody counts it")
def test_refusals_of_the_decoder_are_counted() -> None:
    slow = picture(4000, "RGB", "WebP")
    with on_one_cpu(), start_server("--max-body-mb", "8", "--max-queue", "1") as server:
        with ExitStack() as stack:
            wires = [stack.enter_context(Wire(server.port)) for _ in range(8)]
            for wire in wires:
                wire.send(head(DIGITS, {"Content-Length": str(len(slow))}) + slow)
            refused = sum(wire.reply().status == 429 for wire in wires)
        assert refused
        promise_counted(server, refused)


@not_yet("grpc refuses what exceeds its number of calls, and nobody counts it")
def test_refusals_of_the_grpc_library_are_counted() -> None:
    with start_fake_server(max_connections=4) as server:
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            given = triton_grpc.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.ones((1, 4), np.float32))
            ends: list[Exception | None] = []
            server.switch_on("hold")
            for _ in range(10):
                client.async_infer("rows", [given], lambda result, error: ends.append(error))
            wait_until(lambda: len(ends) >= 6, "all but four are refused")
            server.switch_off("hold")
            wait_until(lambda: len(ends) == 10, "all have ended")
        errors = [one for one in ends if one is not None]
        assert all(isinstance(one, InferenceServerException) for one in errors)
        assert {one.status() for one in errors} == {"StatusCode.RESOURCE_EXHAUSTED"}  # type: ignore[attr-defined]
        promise_counted(server, len(errors))


@not_yet("connections beyond the limit are refused before anything counts")
def test_refusals_of_connections_are_counted() -> None:
    with start_fake_server(max_connections=4) as server:
        with ExitStack() as stack:
            wires = [stack.enter_context(Wire(server.port)) for _ in range(8)]
            for wire in wires:
                wire.send(head("/v2/health/live", method="GET"))
            statuses = [wire.reply().status for wire in wires]
        refused = statuses.count(503)
        assert refused == 4, statuses
        wait_until(lambda: server.get("/ping").status_code == 200, "there is room again")
        promise_counted(server, refused)


@pytest.mark.long
@not_yet("of the last minute the latest 4,096 values are kept")
def test_the_last_minute_is_a_minute() -> None:
    """Sixty large batches and 4,500 small ones behind them: of a minute's batches more than a percent took long."""
    large, small = 60, 4500
    with start_fake_server(fake={"per_sample_ms": 0.5, "max_batch": 64}, access_log="off") as server:
        with Wire(server.port) as wire:
            sizes = [64] * large + [1] * small
            bodies = {1: json.dumps(rows_request(1.0)).encode(), 64: json.dumps(rows_request(*([1.0] * 64))).encode()}
            assert {wire.ask(ROWS, bodies[size]).status for size in sizes} == {200}
        (rows,) = [one for one in server.stats()["models"] if one["name"] == "rows"]
        promise(rows["batch_sizes"] == {"64": large, "1": small}, rows["batch_sizes"])
        promise(rows["stages"]["compute"]["p99_ms"] >= 32, rows["stages"])
