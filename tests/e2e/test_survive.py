"""What must not bring the server down: engines that hang, die or lie, and orders to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from tests.support.crowds import Crowd, at_once
from tests.support.fake_server import DIE, HANG, LOSE_GPU
from tests.support.servers import FakeServer, metric, rows_request, start_fake_server, start_server, wait_until
from tests.support.stores import digit
from tests.support.wire import Wire, check_refused, head

# Many servers are started here, and each needs a second or two.
pytestmark = pytest.mark.slow
QUICK = {"hang_after_s": 1.0, "hang_after_predictions": 5.0, "watch_every_s": 0.05, "replace_within_s": 20.0}
CALM = {"canary_after_s": 3600.0}


def fake(**health: float) -> dict[str, Any]:
    return {"reload_ms": 400.0, "health": {**QUICK, **CALM, **health}}


def ask(client: httpx.Client) -> httpx.Response:
    return client.post("/v2/models/rows/infer", json=rows_request(1.0))


@pytest.fixture(scope="module")
def mending() -> Iterator[FakeServer]:
    """A server that finds engines that went wrong."""
    with start_fake_server(fake=fake()) as server:
        yield server
        assert server.is_ready()


def test_a_hung_engine_is_replaced_and_its_requests_are_told(mending: FakeServer) -> None:
    server, before = mending, len(mending.log)
    with ThreadPoolExecutor(1) as pool:
        server.switch_on("hang_load")  # until it has been seen that the engine is gone
        hanging = pool.submit(server.infer, HANG)
        wait_until(lambda: not server.is_ready(), "the server is not ready")
        check_refused(server.get("/v2/health/ready"), 503, "'rows' version 1", code="not_ready")
        assert server.post("/predictions/images", content=digit("two")).status_code == 200, "the others go on"
        server.switch_off("hang_load")
        answer = hanging.result()
        check_refused(answer, 503, "replaced")
        assert answer.headers["retry-after"] == "1"
        wait_until(server.is_ready, "the server is ready again")
        assert server.infer(3.0).json()["outputs"][0]["data"] == [3.0] * 4
        log = server.log[before:]
        assert all(word in log for word in ("Thread 0x", "a batch has run for", "was replaced")), log


def test_requests_that_wait_behind_a_hung_batch_are_answered_by_the_next_engine(mending: FakeServer) -> None:
    server = mending
    with ThreadPoolExecutor(9) as pool:
        hanging = pool.submit(server.infer, HANG)
        wait_until(lambda: server.stats()["unfinished_requests"] == 1, "it runs")
        waiting = [pool.submit(server.infer, float(number)) for number in range(8)]
        assert hanging.result().status_code == 503
        for number, one in enumerate(waiting):
            answer = one.result()
            # Who came while there was no engine at all is told to come again; nobody waits in vain.
            assert answer.status_code in (200, 503)
            if answer.status_code == 200:
                assert answer.json()["outputs"][0]["data"] == [float(number)] * 4
        wait_until(server.is_ready, "the server is ready again")


@pytest.mark.parametrize("switch", ["fail_load", "hang_load"])
def test_an_engine_that_cannot_be_replaced_ends_the_process_with_70(switch: str) -> None:
    with start_fake_server(fake=fake(replace_within_s=1.0), exit_code=70) as server, ThreadPoolExecutor(1) as pool:
        server.switch_on(switch)
        hanging = pool.submit(server.infer, HANG)
        server.wait()
        assert all(word in server.log for word in ("could not be replaced", "Thread 0x"))
        assert hanging.exception() is not None or hanging.result().status_code == 503


def test_a_gpu_that_is_lost_ends_the_process_with_70() -> None:
    with start_fake_server(fake={**fake(), "gpu": True}, exit_code=70) as server:
        assert server.stats()["models"][0]["engine"] == "onnxruntime-cuda"
        assert server.infer(1.0).json()["outputs"][0]["data"] == [1.0] * 4
        with suppress(httpx.TransportError):
            assert server.infer(LOSE_GPU).status_code == 503
        wait_until(lambda: "an illegal memory access" in server.log_so_far, "the loss is seen")
        assert server.wait() == 70


@pytest.mark.parametrize(
    ("switch", "words", "result"),
    [("wrong", "off by", "failed"), ("hang", "the canary has run", "hung"), ("break", "every run fails", "failed")],
)
def test_an_idle_engine_that_goes_wrong_is_found_by_its_canary(switch: str, words: str, result: str) -> None:
    with start_fake_server(fake=fake(canary_after_s=0.3)) as server:
        # Nothing takes its place before this is off: whoever looks late still sees that it is gone.
        server.switch_on("hang_load")
        server.switch_on(switch)
        wait_until(lambda: server.get("/v2/models/rows/ready").status_code == 503, "the model is not ready")
        assert (server.is_ready(), metric(server, "convoy_ready"), words in server.log) == (False, 0, True)
        check_refused(server.infer(1.0), 503, "the engine of 'rows' is being replaced", code="not_ready")
        server.switch_off("hang_load")
        wait_until(server.is_ready, "the server is ready again")
        assert server.infer(1.0).json()["outputs"][0]["data"] == [1.0] * 4
        wait_until(lambda: metric(server, "convoy_canary_runs_total", model="rows", result="passed"), "all is well")
        assert metric(server, "convoy_canary_runs_total", model="rows", result=result) == 1
        for name in ("convoy_engine_losses_total", "convoy_engine_replacements_total"):
            assert metric(server, name, model="rows") == 1
        assert metric(server, "convoy_ready") == 1


def test_a_busy_server_needs_no_canary() -> None:
    options = {**fake(canary_after_s=0.2), "latency_ms": 50.0}
    with start_fake_server(fake=options) as server:
        with Crowd(server, 8, ask) as crowd:
            wait_until(lambda: crowd.answered > 60, "there was load for a while")
            assert server.is_ready()
        assert {attempt.status for attempt in crowd.attempts} == {200}
        assert "is lost" not in server.log


def test_an_engine_that_fails_every_batch_under_load_is_found_and_replaced() -> None:
    options = {**fake(canary_after_s=0.3), "latency_ms": 5.0}
    with start_fake_server(fake=options) as server, Crowd(server, 8, ask) as crowd:
        wait_until(lambda: crowd.answered > 20, "there is load")
        server.switch_on("break")
        wait_until(lambda: "the canary failed" in server.log_so_far, "the canary has found it among the load")
        wait_until(lambda: server.infer(1.0).status_code == 200, "the engine was replaced")
        assert server.is_ready()


def test_stopping_loses_nothing_that_was_accepted() -> None:
    with start_fake_server(fake={"latency_ms": 30.0}, drain_delay_s=1.0) as server:
        with Crowd(server, 32, ask) as crowd:
            wait_until(lambda: crowd.answered > 200, "there is load")
            told_s = time.monotonic()
            server.signal()
            assert server.wait() == 0
        before = [attempt.status for attempt in crowd.attempts if attempt.sent_s < told_s]
        assert set(before) == {200}, "what was sent before the signal must be answered"
        after = [attempt.status for attempt in crowd.attempts if attempt.sent_s >= told_s]
        assert after.count(200) > 30, "during --drain-delay-s the server goes on serving"
        assert set(after) <= {200, 503, None}
        # None: it came into the listener's backlog in the very moment in which the listener was closed.
        assert after.count(None) <= 32
        assert "all accepted requests were answered" in server.log


def test_whoever_is_still_sending_when_the_server_stops_is_answered() -> None:
    image = digit("seven")
    with start_server() as server, Wire(server.port) as wire:
        wire.send(head("/predictions/digits", {"Content-Length": str(len(image))}) + image[:100])
        wait_until(lambda: server.stats()["inflight_bytes"] > 0, "the body is being read")
        server.signal()
        wait_until(lambda: "shutting down" in server.log_so_far, "the server is told")
        wire.send(image[100:])
        reply = wire.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert reply.json()["predictions"][0]["label"] == "7"
        assert server.wait() == 0


def test_a_client_that_stalls_does_not_hold_up_the_end_for_ever() -> None:
    with start_server("--drain-timeout-s", "0.5") as server, Wire(server.port) as wire:
        wire.send(head("/predictions/digits", {"Content-Length": "1000"}) + b"x")
        wait_until(lambda: server.stats()["inflight_bytes"] > 0, "the body is being read")
        server.signal()
        check_refused(wire.reply(), 503, "shut down", code="draining")
        assert server.wait() == 0
        assert "1 requests were not answered before the drain timeout" in server.log


def test_ready_turns_first_and_serving_goes_on() -> None:
    """Ctrl-C a second time ends it at once, as SIGTERM does."""
    with start_server("--drain-delay-s", "60", exit_code=128 + signal.SIGINT) as server:
        assert server.is_ready()
        server.signal(signal.SIGINT)
        wait_until(lambda: server.get("/v2/health/ready").status_code == 503, "not ready")
        assert server.get("/v2/health/live").status_code == 200
        assert server.get("/v2/models/digits/ready").status_code == 503
        check_refused(server.get("/ping"), 503, "shutting down", code="draining")
        assert server.post("/predictions/digits", content=digit("seven")).status_code == 200
        server.signal(signal.SIGINT)  # it waits no longer
        server.wait()


def test_new_requests_are_turned_away_while_old_ones_finish() -> None:
    with start_fake_server() as server, ThreadPoolExecutor(1) as pool:
        server.switch_on("hold")
        running = pool.submit(server.infer, 1.0)
        wait_until(lambda: server.stats()["unfinished_requests"] == 1, "it runs")
        server.signal()
        wait_until(lambda: "shutting down" in server.log_so_far, "the server is told")
        refusal = server.infer(2.0)
        check_refused(refusal, 503, "shutting down", code="draining")
        assert refusal.headers["retry-after"] == "1"
        server.switch_off("hold")
        assert running.result().status_code == 200
        assert server.wait() == 0


def test_a_signal_while_loading_is_obeyed() -> None:
    with start_server(wait_ready=False) as server:
        server.signal()
        assert server.wait() == 0


def test_poison_in_a_batch_hurts_nobody_else() -> None:
    with start_fake_server(fake={"latency_ms": 40.0}) as server:
        calls = [lambda value=value: server.infer(value) for value in [0.0, *range(1, 16), 666.0]]
        answers = at_once(calls)
        check_refused(answers.pop(), 500, "failed on this request", code="model_failed")
        for value, answer in enumerate(answers):
            assert answer.json()["outputs"][0]["data"] == [float(value)] * 4
        statistics = server.statistics("rows")["inference_stats"]
        assert (statistics["success"]["count"], statistics["fail"]["count"]) == (16, 1)
        assert server.is_ready()


def test_engines_can_be_replaced_again_and_again() -> None:
    with start_fake_server(fake={**fake(), "reload_ms": 0.0}) as server:
        threads = []
        for _ in range(15):
            check_refused(server.infer(DIE), 503, "fell off the bus", code="unavailable")
            wait_until(server.is_ready, "the server is ready again")
            threads.append(psutil.Process(server.process.pid).num_threads())
        assert threads[-1] <= threads[4] + 1
        assert server.infer(1.0).status_code == 200
