"""Batching, deadlines and limits, as clients feel them. The engine is slow on purpose, so that queues form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tritonclient.grpc as triton

from tests.support.crowds import at_once
from tests.support.grpc_calls import row
from tests.support.servers import FakeServer, rows_request, start_fake_server, wait_until
from tests.support.stores import digit
from tests.support.wire import check_refused

ROWS = "/v2/models/rows/infer"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """A batch takes 0.3 s, whatever its size."""
    with start_fake_server(fake={"latency_ms": 300.0, "max_batch": 16}, max_queue=64, rests=True) as server:
        yield server


@pytest.fixture(scope="module")
def held_server() -> Iterator[FakeServer]:
    """A batch ends when a test says so."""
    with start_fake_server(fake={"max_batch": 16}, max_queue=64, rests=True) as server:
        yield server


def await_waiting(server: FakeServer, requests: int) -> None:
    """Until so many wait behind the one that is held."""

    def are_there() -> bool:
        stats = server.stats()
        is_idle = not any(model["waiting_samples"] for model in stats["models"])
        return stats["unfinished_requests"] == requests + 1 and is_idle == (requests == 0)

    wait_until(are_there, f"{requests} wait")


def test_requests_that_wait_together_share_batches(held_server: FakeServer) -> None:
    server, before = held_server, held_server.statistics("rows")
    server.switch_on("hold")
    values = [99.0, *map(float, range(40))]
    with ThreadPoolExecutor(41) as pool:
        asking = []
        for waiting, value in enumerate(values):
            asking.append(pool.submit(server.infer, value))
            if waiting in (0, 40):
                await_waiting(server, waiting)
        server.switch_off("hold")
        for value, one in zip(values, asking, strict=True):
            assert one.result().json()["outputs"][0]["data"] == [value] * 4
    after = server.statistics("rows")
    success = [one["inference_stats"]["success"]["count"] for one in (before, after)]
    assert after["inference_count"] - before["inference_count"] == success[1] - success[0] == 41
    assert after["execution_count"] - before["execution_count"] == 1 + 3
    assert max(one["batch_size"] for one in after["batch_stats"]) == 16


def test_what_does_not_decode_never_joins_a_batch(server: FakeServer) -> None:
    before = server.statistics("images")
    good, bad = digit("three"), digit("three")[:60]
    answers = at_once(
        [lambda n=n: server.post("/predictions/images", content=bad if n % 4 == 0 else good) for n in range(24)]
    )
    after = server.statistics("images")
    assert [answer.status_code for answer in answers] == [400 if n % 4 == 0 else 200 for n in range(24)]
    assert after["inference_count"] - before["inference_count"] == 18
    assert after["inference_stats"]["fail"] == before["inference_stats"]["fail"]


def test_a_request_predicted_to_be_late_is_a_429_at_once(server: FakeServer) -> None:
    def answer() -> httpx.Response | None:
        """Refused; None where it came when the batch before it was almost done."""
        wait_until(server.is_at_rest, "the engine is idle")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.infer, 1.0)
            wait_until(lambda: server.stats()["unfinished_requests"] == 1, "the engine is busy")
            answer = server.post(f"{ROWS}?timeout_ms=350", json=rows_request(1.0))
            assert running.result().status_code == 200
        return None if answer.status_code in (200, 504) else answer

    refused = wait_until(answer, "it comes in time to be late")
    check_refused(refused, 429, "miss the deadline", code="predicted_late")
    assert int(refused.headers["retry-after"]) >= 1


class FirstComes:
    """Who is answered first of those who wait, over either wire, by the server's own log.

    Its clients may learn of it in another order, where they have to wait for a processor.
    """

    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def over_http(self, priority: int) -> None:
        parameters, headers = {"priority": priority} if priority else None, {"X-Request-Id": f"level-{priority}"}
        assert self._server.post(ROWS, json=rows_request(1.0, parameters=parameters), headers=headers).is_success

    def over_grpc(self, priority: int) -> None:
        with triton.InferenceServerClient(self._server.grpc_address) as client:
            client.infer("rows", [row()], priority=priority, headers={"x-request-id": f"level-{priority}"})

    @property
    def order(self) -> list[int]:
        return [int(level) for level in re.findall(r"\[request level-(\d)\]", self._server.log_so_far)]

    @property
    def waiting(self) -> int:
        (rows,) = [one for one in self._server.stats()["models"] if one["name"] == "rows"]
        return int(rows["waiting_samples"])


def test_level_one_goes_before_none_and_none_before_level_three() -> None:
    """As in the protocol: 1 is the most urgent; 0, nothing, and what the model does not have are its default."""
    # However long they wait on a busy machine, none of them is overdue and goes first for that.
    settings = {"fake": {"max_batch": 1, "patience_s": 600}, "access_log": "all"}
    with start_fake_server(**settings) as server, ThreadPoolExecutor(11) as pool:
        server.switch_on("hold")
        first = pool.submit(server.infer, 1.0)
        wait_until(lambda: server.stats()["unfinished_requests"] == 1, "the engine is busy")
        coming, rest = FirstComes(server), []
        for waiting, priority in enumerate((3, 0, 1, 9) * 2, start=1):
            ask = coming.over_http if waiting <= 4 else coming.over_grpc
            rest.append(pool.submit(ask, priority))
            wait_until(lambda waiting=waiting: coming.waiting == waiting, "it waits")
        for answered in range(9):  # one by one, so that each has its line before the next one has its answer
            server.switch_on("hold", str(answered + 1))
            wait_until(lambda answered=answered: len(coming.order) == answered, "it has its line")
        for one in (first, *rest):
            one.result()
        order = coming.order
    assert order == [1, 1, 0, 9, 0, 9, 3, 3]
