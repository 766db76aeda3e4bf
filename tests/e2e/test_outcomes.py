"""How calls end, as the server tells it: each once, with one outcome of one list, on every wire, in every process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton_grpc
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from tests.support.grpc_calls import row, status_of
from tests.support.servers import (
    FakeServer,
    Server,
    metric,
    on_one_cpu,
    rows_request,
    start_fake_server,
    start_server,
    wait_until,
)
from tests.support.stores import digit, picture
from tests.support.wire import Wire, check_refused, head

DIGITS = "/predictions/digits"
ROWS = "/v2/models/rows/infer"
# What is escaped in a path only the framework reads, so this one goes through ASGI.
THROUGH_ASGI = "/v2/models/r%6Fws/infer"
KEY = {"Authorization": "Bearer open sesame"}
CALLS = "convoy_call_duration_seconds_count"
METHOD = "/inference.GRPCInferenceService/ModelInfer"


def counted(server: Server, name: str, *labels: str) -> Counter[tuple[str, ...]]:
    """The sums of a metric so far, by these of its labels, where they are not 0."""
    found: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(server.get("/metrics", headers=KEY).text):
        for sample in family.samples:
            if sample.name == name:
                found[tuple(sample.labels[label] for label in labels)] += int(sample.value)
    return +found


def ended(server: Server) -> Counter[tuple[str, ...]]:
    return counted(server, CALLS, "model", "protocol", "outcome")


def refused(server: Server) -> Counter[tuple[str, ...]]:
    return counted(server, "convoy_rejected_total", "reason")


def hold_queue(server: FakeServer, pool: ThreadPoolExecutor, ask: Callable[[], httpx.Response]) -> list[Any]:
    """One request that runs until the switch is off, and one behind it that fills the queue."""
    server.switch_on("hold")
    asking = []
    for waiting in (0, 1):  # the second one comes when the first one does not wait any more
        asking.append(pool.submit(ask))
        wait_until(lambda waiting=waiting: _held(server) == (waiting + 1, waiting), f"{waiting} wait behind the one")
    return asking


def _held(server: Server) -> tuple[int, int]:
    """The requests that have no answer, and those of their samples that do not run yet."""
    stats = server.get("/stats", headers=KEY).json()
    return stats["unfinished_requests"], sum(model["waiting_samples"] for model in stats["models"])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """A server that asks for a key and takes one request beside the one that runs."""
    key_file: Path = tmp_path_factory.mktemp("keys") / "key"
    key_file.write_text("open sesame\n")
    with start_fake_server(fake={"max_batch": 1}, max_queue=1, api_key_file=key_file) as server:
        yield server


@pytest.mark.parametrize("path", [ROWS, THROUGH_ASGI])
def test_every_http_call_ends_once(guarded: FakeServer, path: str) -> None:
    before, refusals = ended(guarded), refused(guarded)
    rows = rows_request(1.0)
    assert guarded.post(path, json=rows, headers=KEY).status_code == 200
    assert guarded.post(path, content=b"{", headers=KEY).status_code == 400
    assert guarded.post(f"{path}?timeout_ms=x", json=rows, headers=KEY).status_code == 400
    assert guarded.post("/v2/models/nobody/infer", json=rows, headers=KEY).status_code == 404
    for wrong in ({}, {"Authorization": "Bearer open barley"}):
        assert guarded.post(path, json=rows, headers=wrong).status_code == 401
    with ThreadPoolExecutor(2) as pool:
        asking = hold_queue(guarded, pool, lambda: guarded.infer(1.0, headers=KEY))
        for _ in range(3):
            check_refused(guarded.post(path, json=rows, headers=KEY), 429, "maximum queue size", code="queue_full")
        guarded.switch_off("hold")
        assert [one.result().status_code for one in asking] == [200, 200]
    wait_until(lambda: guarded.get("/stats", headers=KEY).json()["unfinished_requests"] == 0, "nothing runs")
    guarded.switch_on("hold")
    check_refused(
        guarded.post(f"{path}?timeout_ms=100", json=rows, headers=KEY), 504, "timeout expired", code="deadline_exceeded"
    )
    guarded.switch_off("hold")
    expected = Counter(
        {
            ("rows", "v2", "answered"): 3,
            ("rows", "v2", "invalid"): 2,
            ("", "v2", "invalid"): 1,
            ("", "v2", "unauthorised"): 2,
            ("rows", "v2", "refused"): 3,
            ("rows", "v2", "late"): 1,
        }
    )
    wait_until(lambda: ended(guarded) - before == expected, f"they are counted: {ended(guarded) - before}")
    assert refused(guarded) - refusals == {("queue_full",): 3}
    wait_until(lambda: guarded.get("/stats", headers=KEY).json()["unfinished_requests"] == 0, "nothing runs")


def test_every_grpc_call_ends_once(guarded: FakeServer) -> None:
    before, refusals = ended(guarded), refused(guarded)
    metadata = {name.lower(): value for name, value in KEY.items()}

    def status(model: str = "rows", **options: Any) -> str:
        return status_of(client, model, **{"headers": metadata, **options})

    with triton_grpc.InferenceServerClient(guarded.grpc_address) as client:
        assert status() == "OK"
        assert status(inputs=[row(name="y")]) == "INVALID_ARGUMENT"
        assert status("nobody") == "NOT_FOUND"
        assert status(headers={}) == "UNAUTHENTICATED"
        unread = client._channel.unary_unary(METHOD)
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            unread(b"\xff\xff", metadata=tuple(metadata.items()))
        with ThreadPoolExecutor(2) as pool:
            asking = hold_queue(guarded, pool, lambda: guarded.infer(1.0, headers=KEY))
            assert [status() for _ in range(3)] == ["RESOURCE_EXHAUSTED"] * 3
            guarded.switch_off("hold")
            assert [one.result().status_code for one in asking] == [200, 200]
    expected = Counter(
        {
            ("rows", "grpc", "answered"): 1,
            ("rows", "v2", "answered"): 2,
            ("rows", "grpc", "invalid"): 1,
            ("", "grpc", "invalid"): 2,
            ("", "grpc", "unauthorised"): 1,
            ("rows", "grpc", "refused"): 3,
        }
    )
    wait_until(lambda: ended(guarded) - before == expected, f"they are counted: {ended(guarded) - before}")
    assert refused(guarded) - refusals == {("queue_full",): 3}


def test_old_names_keep_their_words_and_their_sums(guarded: FakeServer) -> None:
    """For one version: `convoy_requests_total` and `convoy_request_duration_seconds`."""
    guarded.infer(1.0, headers=KEY)
    guarded.infer(1.0)
    words = {"answered": "success", "refused": "rejected", "late": "deadline_exceeded"}
    wait_until(lambda: counted(guarded, "convoy_requests_total", "outcome")[("unauthorised",)], "both are counted")
    old, new = counted(guarded, "convoy_requests_total", "outcome"), counted(guarded, CALLS, "outcome")
    assert old == {(words.get(outcome, outcome),): count for (outcome,), count in new.items()}
    of_models = sum(count for (model, *_), count in ended(guarded).items() if model)
    assert counted(guarded, "convoy_request_duration_seconds_count").total() == of_models


def test_files_of_a_form_are_refused_one_by_one() -> None:
    """Each is a request of its own, among others that are answered."""
    files = [("file", (f"{number}.png", picture(2000, "RGB", "WebP"))) for number in range(8)]
    with on_one_cpu(), start_server("--max-queue", "1", "--max-body-mb", "8") as server:
        answer = server.post(DIGITS, files=files)
        missing = sum("error" in one for one in answer.json()["results"])
        assert 0 < missing < 8
        wait_until(lambda: ended(server) == {("digits", "predictions", "answered"): 1}, "the call is counted")
        assert refused(server) == {("decode_queue",): missing}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["wrong-first", "refused-first"])
def test_of_a_form_without_answers_speaks_the_file_that_another_try_may_help(order: tuple[int, int]) -> None:
    """Its client would not come again for one that is no image."""
    files = [("file", ("wrong.png", b"no image")), ("file", ("right.png", digit("seven")))]
    images = "/predictions/images"
    # Batches of four, so that more than those two are decoded.
    with start_fake_server(fake={"max_batch": 4}, max_queue=1) as server, ThreadPoolExecutor(2) as pool:
        busy = hold_queue(server, pool, lambda: server.post(images, content=digit("one")))
        answer = server.post(images, files=[files[one] for one in order])
        server.switch_off("hold")
        assert [one.result().status_code for one in busy] == [200, 200]
        assert answer.status_code == 429
        wrong, right = (answer.json()["results"][order.index(one)]["error"] for one in (0, 1))
        assert answer.json()["error"].endswith((wrong, right))


def test_refusals_of_the_decoder_are_counted() -> None:
    slow = picture(4000, "RGB", "WebP")
    with on_one_cpu(), start_server("--max-body-mb", "8", "--max-queue", "1") as server:
        with ExitStack() as stack:
            wires = [stack.enter_context(Wire(server.port)) for _ in range(8)]
            for wire in wires:
                wire.send(head(DIGITS, {"Content-Length": str(len(slow))}) + slow)
            turned_away = sum(wire.reply().status == 429 for wire in wires)
        told = refused(server)
        # Those that are decoded while one waits for the engine find its queue full, which is as short.
        assert {("decode_queue",)} <= told.keys() <= {("decode_queue",), ("queue_full",)}
        assert told.total() == turned_away


def test_refusals_of_the_grpc_library_are_counted() -> None:
    with start_fake_server(max_connections=4) as server:
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            ends: list[Exception | None] = []
            server.switch_on("hold")
            for _ in range(10):
                client.async_infer("rows", [row()], lambda result, error: ends.append(error))
            wait_until(lambda: len(ends) >= 6, "all but four are refused")
            server.switch_off("hold")
            wait_until(lambda: len(ends) == 10, "all have ended")
        errors = [one for one in ends if one is not None]
        assert all(isinstance(one, InferenceServerException) for one in errors)
        assert {one.status() for one in errors} == {"StatusCode.RESOURCE_EXHAUSTED"}  # type: ignore[attr-defined]
        assert refused(server) == {("calls",): len(errors)}
        assert metric(server, CALLS, protocol="grpc", outcome="refused") == len(errors)


def test_refusals_of_connections_are_counted() -> None:
    with start_fake_server(max_connections=4) as server:
        with ExitStack() as stack:
            wires = [stack.enter_context(Wire(server.port)) for _ in range(8)]
            for wire in wires:
                wire.send(head("/v2/health/live", method="GET"))
            replies = [wire.reply() for wire in wires]
        statuses = [reply.status for reply in replies]
        assert statuses.count(503) == 4, statuses
        refusal = replies[statuses.index(503)]
        assert "4 connections are open" in refusal.error
        assert refusal.headers["retry-after"] == "1"
        while server.get("/ping").status_code == 503:  # the four that were served may not have been closed yet
            statuses.append(503)
        assert refused(server) == {("connections",): statuses.count(503)}
