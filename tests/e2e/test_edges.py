"""A server of several processes: outside it is one server; inside each of them may die."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from prometheus_client.parser import text_string_to_metric_families

from tests.support.crowds import Crowd, at_once
from tests.support.servers import (
    FakeServer,
    Server,
    metric,
    rows_request,
    start_fake_server,
    start_server,
    wait_until,
)
from tests.support.stores import StoreFolder, digit
from tests.support.wire import Wire, head

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

DIGITS = "/predictions/digits"
MIB = 1 << 20


def processes(server: Server, module: str) -> list[psutil.Process]:
    """The server's processes of one kind, oldest first."""
    children = psutil.Process(server.process.pid).children()
    return sorted((one for one in children if one.is_running() and module in _command(one)), key=lambda one: one.pid)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def edges(server: Server) -> list[psutil.Process]:
    return processes(server, "edge_process")


def core(server: Server) -> psutil.Process:
    (process,) = [*processes(server, "core_process"), *processes(server, "fake_core")]
    return process


def asked(server: Server) -> dict[str, float]:
    """How many calls there were, by outcome."""
    outcomes: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "convoy_requests_total":
                outcome = sample.labels["outcome"]
                outcomes[outcome] = outcomes.get(outcome, 0.0) + sample.value
    return outcomes


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    shared_store.add_digits()
    shared_store.add_add_sub()
    shared_store.add_nonzero()
    with start_server("--edges", "2", store=shared_store.root) as server:
        wait_until(lambda: len(edges(server)) == 2, "both edges run")
        yield server


def test_an_image_is_predicted(server: Server) -> None:
    answers = at_once([lambda: server.post(DIGITS, content=digit("seven"))] * 16)
    assert [answer.json()["predictions"][0]["label"] for answer in answers] == ["7"] * 16
    assert all(answer.headers["server-timing"] for answer in answers)
    assert len({answer.headers["x-request-id"] for answer in answers}) == 16


def test_several_files_are_requests_of_their_own(server: Server) -> None:
    files = [("file", ("a", digit("one"))), ("file", ("b", b"no image")), ("file", ("c", digit("two")))]
    results = server.post(DIGITS, files=files).json()["results"]
    assert [one["predictions"][0]["label"] if "predictions" in one else "error" for one in results] == [
        *("1", "error", "2"),
    ]


def test_both_kinds_of_clients_get_the_same_tensors(server: Server) -> None:
    left, right = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 3, np.int32)
    answers = []
    for library, address in ((triton_http, f"127.0.0.1:{server.port}"), (triton_grpc, server.grpc_address)):
        client = library.InferenceServerClient(address)
        inputs = [library.InferInput(name, (1, 16), "INT32") for name in ("INPUT0", "INPUT1")]
        for one, values in zip(inputs, (left, right), strict=True):
            one.set_data_from_numpy(values)
        answers.append(client.infer("simple", inputs).as_numpy("OUTPUT0"))
        client.close()
    for answer in answers:
        assert (answer == left + right).all()


def test_an_answer_whose_size_nobody_knows_before_travels_too(server: Server) -> None:
    (own,) = server.get("/v2/models/nonzero").json()["inputs"]
    tensor = {"name": own["name"], "shape": [6], "datatype": own["datatype"], "data": [0, 3, 0, 5, 0, 0]}
    answer = server.post("/v2/models/nonzero/infer", json={"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    assert sorted(output["data"])[-2:] == [1, 3]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2", 200),
        ("/v2/health/live", 200),
        ("/v2/health/ready", 200),
        ("/v2/models/digits/ready", 200),
        ("/v2/models/digits", 200),
        ("/v2/models/digits/config", 200),
        ("/ping", 200),
        ("/models/digits", 200),
        ("/docs", 200),
        ("/openapi.json", 200),
        ("/", 200),
        ("/stats", 200),
        ("/nowhere", 404),
        ("/v2/models/nothing", 404),
        ("/predictions/digits", 405),
    ],
)
def test_what_an_edge_does_not_know_the_core_answers(server: Server, path: str, status: int) -> None:
    answer = server.get(path, headers={"X-Request-Id": "mine", "traceparent": "00-ab-cd-01"})
    assert answer.status_code == status
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert answer.headers.get_list("traceparent") == ["00-ab-cd-01"]
    assert status < 400 or answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (DIGITS, b"no image", 400, "image"),
        ("/predictions/nothing", b"", 404, "Request for unknown model: 'nothing' is not found"),
        ("/predictions/digits/9", b"", 404, "'digits' version 9 is not found"),
        ("/v2/models/simple/infer", b"{", 400, "JSON"),
        ("/v2/models/simple/infer", b'{"inputs": []}', 400, "expected 2 inputs but got 0"),
        ("/v2/repository/models/digits/unload", b"", 503, "explicit"),
    ],
)
def test_errors_have_the_same_words(server: Server, path: str, body: bytes, status: int, words: str) -> None:
    answer = server.post(path, content=body)
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text


def test_connections_are_kept_and_pipelined(server: Server) -> None:
    image = digit("three")
    one = head(DIGITS, {"Content-Length": str(len(image))}) + image
    with Wire(server.port) as wire:
        wire.send(one * 3)
        assert [wire.reply().json()["predictions"][0]["label"] for _ in range(3)] == ["3"] * 3
        assert wire.ask("/v2/models/digits", b"", method="GET").status == 200
        wire.send(one)
        assert wire.reply().status == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(head(DIGITS, {"Content-Length": str(65 * MIB)}))
        assert wire.reply().status == 413


def test_one_process_counts_for_all() -> None:
    with start_server("--edges", "2") as server:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: server.post(DIGITS, content=digit("one")), range(60)))
            list(pool.map(lambda _: server.post(DIGITS, content=b"no image"), range(7)))
        wait_until(lambda: asked(server) == {"success": 60, "invalid": 7}, "every call is counted, and none twice")
        assert server.statistics("digits")["inference_count"] == 60
        stages = server.stats()["models"][0]["stages"]
        assert all(stages[stage]["p50_ms"] is not None for stage in ("decode", "queue", "compute", "encode", "total"))


def test_edges_share_the_connections(server: Server) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: server.post(DIGITS, content=digit("one")), range(200)))
    # Each on a connection of its own, which the kernel gives to one or the other.
    answers = [server.get("/v2", headers={"Connection": "close"}) for _ in range(60)]
    prefixes = {answer.headers["x-request-id"].partition("-")[0] for answer in answers}
    assert len(prefixes) == 2, "each edge numbers its requests by itself, and both should have been asked"


def test_an_edge_is_small_and_has_no_engine(server: Server) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: server.post(DIGITS, content=digit("one")), range(300)))
    for edge in edges(server):
        maps = Path(f"/proc/{edge.pid}/maps").read_text()
        assert "onnxruntime" not in maps
        assert own_bytes(edge) < 80 * MIB
    assert "onnxruntime" in Path(f"/proc/{core(server).pid}/maps").read_text()
    assert own_bytes(psutil.Process(server.process.pid)) < 40 * MIB, "the supervisor is smaller still"


def own_bytes(process: psutil.Process) -> int:
    """Resident memory without the slab, which is shared: its pages are counted once, as `RssShmem`."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(int(kib) * 1024 for kib in re.findall(r"Rss(?:Anon|File):\s+(\d+) kB", status))


def test_the_log_says_how_many_and_why(server: Server) -> None:
    assert "2 edge processes: as --edges says" in server.log


def test_what_was_loaded_is_found_through_every_edge_at_once(store: StoreFolder) -> None:
    store.add_digits()
    options = ("--edges", "2", "--model-control", "explicit", "--host", "127.0.0.1")
    with start_server(*options, store=store.root) as server, ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for order, expected in (("load", 200), ("unload", 404)):
                assert server.post(f"/v2/repository/models/digits/{order}").status_code == 200
                asked = [pool.submit(server.post, DIGITS, content=digit("one")) for _ in range(8)]
                assert {one.result().status_code for one in asked} == {expected}


def test_shared_memory_is_the_cores_business(store: StoreFolder) -> None:
    with start_fake_server(fake={"echo": True}, edges=1, allow_shared_memory=True) as server:
        name = f"convoy-test-{server.process.pid}"
        path = Path("/dev/shm") / name
        path.write_bytes(np.arange(4, dtype=np.float32).tobytes())
        try:
            region = {"key": f"/{name}", "offset": 0, "byte_size": 16}
            assert server.post("/v2/systemsharedmemory/region/mine/register", json=region).status_code == 200
            place = {"shared_memory_region": "mine", "shared_memory_byte_size": 16}
            tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": place}
            answer = server.post("/v2/models/echo_fp32/infer", json={"inputs": [tensor]})
            assert answer.json()["outputs"][0]["data"] == [0.0, 1.0, 2.0, 3.0]
        finally:
            path.unlink()


def test_the_key_is_asked_for_at_every_door(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open sesame\n")
    with start_server("--edges", "1", "--api-key-file", str(tmp_path / "key")) as server:
        assert server.post(DIGITS, content=digit("one")).status_code == 401
        assert server.get("/metrics").status_code == 401
        assert server.get("/v2/health/ready").status_code == 200
        key = {"Authorization": "Bearer open sesame"}
        assert server.post(DIGITS, content=digit("one"), headers=key).status_code == 200
        assert server.get("/metrics", headers=key).status_code == 200
        for process in [*edges(server), core(server)]:
            assert "sesame" not in " ".join(process.cmdline()) + str(process.environ())


def test_what_is_too_much_for_the_queue_is_refused_in_the_same_words() -> None:
    with start_fake_server(fake={"max_batch": 1}, edges=1, max_queue=2) as server, ThreadPoolExecutor(8) as pool:
        server.switch_on("hold")
        asking = [pool.submit(server.infer, 1.0) for _ in range(8)]
        refused = wait_until(lambda: [one.result() for one in asking if one.done()], "some are refused")
        server.switch_off("hold")
        statuses = [one.result().status_code for one in asking]
        assert set(statuses) == {200, 429}
        assert "Exceeds maximum queue size: 2 samples for 'rows'" in refused[0].json()["error"]
        assert int(refused[0].headers["retry-after"]) >= 1
        wait_until(
            lambda: metric(server, "convoy_rejected_total", reason="queue_full") == statuses.count(429),
            "the edge has told what it refused",
        )


def test_deadlines_are_kept_across_processes() -> None:
    with start_fake_server(edges=1) as server:
        server.switch_on("hold")
        answer = server.infer(1.0, params={"timeout_ms": 200})
        assert answer.status_code == 504
        assert "Request timeout expired" in answer.json()["error"]
        server.switch_off("hold")
        wait_until(server.is_at_rest, "the memory has come back")


def test_a_slot_comes_back_when_the_engine_is_done_and_not_when_the_client_leaves() -> None:
    with start_fake_server(edges=1) as server:
        server.switch_on("hold")
        with Wire(server.port) as wire:
            _send_rows(wire)
            wait_until(lambda: server.stats()["unfinished_requests"] == 1, "it runs")
            wire.reset()
        wait_until(lambda: asked(server).get("cancelled") == 1, "the edge has seen the client leave")
        assert server.stats()["inflight_bytes"] > 0
        # Late, or refused at once where the engine is foreseen to be too late.
        assert server.infer(2.0, params={"timeout_ms": 100}).status_code in (429, 504)
        server.switch_off("hold")
        wait_until(server.is_at_rest, "the memory has come back")
        assert server.infer(2.0).json()["outputs"][0]["data"] == [2.0] * 4


def _send_rows(wire: Wire, value: float = 1.0) -> None:
    body = json.dumps(rows_request(value)).encode()
    wire.send(head("/v2/models/rows/infer", {"Content-Length": str(len(body))}) + body)


def test_what_a_dead_edge_lent_stays_lent_until_the_engine_is_done() -> None:
    with start_fake_server(edges=1) as server:
        server.switch_on("hold")
        with Wire(server.port) as wire:
            _send_rows(wire)
            wait_until(lambda: server.stats()["unfinished_requests"] == 1, "it runs")
            (edge,) = edges(server)
            edge.kill()
            wait_until(lambda: _serving_edge(server) not in (None, edge.pid), "another edge serves")
            wait_until(lambda: server.stats()["inflight_bytes"] > 0, "the new edge keeps off what the engine reads")
        server.switch_off("hold")
        wait_until(server.is_at_rest, "the memory has come back")
        assert server.infer(2.0).json()["outputs"][0]["data"] == [2.0] * 4


def _serving_edge(server: Server) -> int | None:
    """The only edge, once it answers."""
    try:
        server.get("/v2/health/live")
    except httpx.TransportError:
        return None
    found = edges(server)
    return found[0].pid if len(found) == 1 else None


@pytest.mark.slow
def test_an_edge_that_is_killed_loses_only_its_own_requests() -> None:
    with start_fake_server(fake={"latency_ms": 5.0}, edges=2) as server:
        with Crowd(server, 8, _ask_row) as crowd:
            wait_until(lambda: crowd.answered > 100, "there is load")
            victim = edges(server)[0]
            victim.kill()
            so_far = crowd.answered
            wait_until(lambda: crowd.answered > so_far + 200, "the other goes on")
            wait_until(lambda: len(edges(server)) == 2, "it is replaced")
        statuses = [attempt.status for attempt in crowd.attempts]
        assert set(statuses) <= {200, 503, None}
        assert statuses.count(None) <= 8, "at most one for each client"
        assert statuses.count(503) <= 8, "an edge that has just come may not have reached the core"
        assert victim.pid not in {one.pid for one in edges(server)}
        wait_until(server.is_at_rest, "nothing of the dead one's is left")
        assert "signal SIGKILL" in server.log


@pytest.mark.slow
def test_a_core_that_is_killed_is_replaced_and_the_edges_say_so_meanwhile() -> None:
    with start_fake_server(fake={"latency_ms": 5.0}, edges=2) as server:
        before = [one.pid for one in edges(server)]
        with Crowd(server, 8, _ask_row) as crowd:
            wait_until(lambda: crowd.answered > 100, "there is load")
            core(server).kill()
            refusal = wait_until(lambda: _refusal(server), "the edges know")
            assert refusal.status_code == 503
            assert refusal.headers["retry-after"] == "1"
            assert re.search("is being replaced|are being loaded", refusal.json()["error"])
            assert server.get("/v2/health/live").status_code == 200
            wait_until(server.is_ready, "another core serves")
            so_far = crowd.answered
            wait_until(lambda: crowd.answered > so_far + 100, "requests are answered again")
        assert {attempt.status for attempt in crowd.attempts} <= {200, 503}, "no connection was lost"
        assert [one.pid for one in edges(server)] == before
        wait_until(server.is_at_rest, "nothing of before is left")


def _ask_row(client: httpx.Client) -> httpx.Response:
    answer = client.post("/v2/models/rows/infer", json=rows_request(1.0))
    if answer.status_code == 503:
        time.sleep(0.01)  # a client that heeds Retry-After at all
    return answer


def _refusal(server: Server) -> httpx.Response | None:
    answer = server.get("/v2/health/ready")
    return None if answer.status_code == 200 else answer


@pytest.mark.slow
def test_requests_in_flight_are_told_when_the_core_dies() -> None:
    with start_fake_server(edges=1) as server, ThreadPoolExecutor(4) as pool:
        server.switch_on("hold")
        asking = [pool.submit(server.infer, float(number)) for number in range(4)]
        wait_until(lambda: server.stats()["unfinished_requests"] == 4, "they are in the core")
        core(server).kill()
        for one in asking:
            assert one.result().status_code == 503
            assert one.result().headers["retry-after"] == "1"
        server.switch_off("hold")
        wait_until(server.is_ready, "another core serves")
        assert server.infer(1.0).status_code == 200
        wait_until(server.is_at_rest, "what they held has come back")


@pytest.mark.slow
def test_stopping_under_load_loses_nothing_that_was_accepted() -> None:
    with start_fake_server(fake={"latency_ms": 20.0}, edges=2, drain_delay_s=1.0) as server:
        with Crowd(server, 16, _ask_row) as crowd:
            wait_until(lambda: crowd.answered > 100, "there is load")
            told_s = time.monotonic()
            server.signal()
            assert server.wait() == 0
        before = [attempt.status for attempt in crowd.attempts if attempt.sent_s < told_s]
        assert set(before) == {200}
        after = [attempt.status for attempt in crowd.attempts if attempt.sent_s >= told_s]
        assert set(after) <= {200, 503, None}
        assert after.count(200) > 10, "during --drain-delay-s the server goes on serving"
        # Into the backlog in the moment in which an edge closed it, once for each of them.
        assert after.count(None) <= 2 * 16
        assert "every accepted request was answered" in server.log


def test_whoever_is_not_answered_in_time_is_told_and_counted() -> None:
    with start_fake_server(edges=1, drain_timeout_s=0.3) as server, ThreadPoolExecutor(1) as pool:
        server.switch_on("hold")
        asking = pool.submit(server.infer, 1.0)
        wait_until(lambda: server.stats()["unfinished_requests"] == 1, "it runs")
        server.signal()
        assert asking.result().status_code == 503
        assert server.wait() == 0
        assert "1 requests were not answered in time" in server.log


def test_a_second_signal_ends_everything_at_once() -> None:
    with start_fake_server(edges=1, exit_code=128 + signal.SIGTERM) as server, ThreadPoolExecutor(1) as pool:
        everybody = psutil.Process(server.process.pid).children(recursive=True)
        server.switch_on("hold")
        asking = pool.submit(server.infer, 1.0)
        wait_until(lambda: server.stats()["unfinished_requests"] == 1, "it runs")
        server.signal()
        wait_until(lambda: "stopping: not ready" in server.log_so_far, "the first signal was heard")
        server.signal()
        server.wait()
        assert isinstance(asking.exception(), httpx.TransportError)
        wait_until(lambda: not any(one.is_running() for one in everybody), "nobody is left")


def test_nobody_outlives_the_supervisor() -> None:
    with start_fake_server(edges=2, exit_code=-signal.SIGKILL, clean_log=False) as server:
        everybody = psutil.Process(server.process.pid).children(recursive=True)
        assert len(everybody) == 3
        server.signal(signal.SIGKILL)
        server.wait()
        wait_until(lambda: not any(_is_alive(one) for one in everybody), "nobody is left")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_a_temporary_folder_with_a_long_name_is_no_reason_not_to_start(tmp_path: Path) -> None:
    """A socket's path has 107 bytes at most, and CI systems have folders with longer names."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    with start_server("--edges", "1", env={"TMPDIR": str(folder)}) as server:
        assert server.post(DIGITS, content=digit("seven")).json()["predictions"][0]["label"] == "7"
    assert not list(folder.iterdir())


def test_nothing_to_serve_ends_everything(store: StoreFolder) -> None:
    with start_server("--edges", "1", store=store.root, exit_code=1, wait_ready=False) as server:
        assert server.wait() == 1
        assert "no model" in server.log


def test_a_hung_engine_that_cannot_be_replaced_costs_the_core_and_not_the_server() -> None:
    health = {"hang_after_s": 1.0, "hang_after_predictions": 5.0, "watch_every_s": 0.05, "replace_within_s": 0.5}
    with start_fake_server(fake={"health": health}, edges=1) as server:
        old = core(server).pid
        server.switch_on("hang_load")
        assert server.infer(-1.0).status_code == 503
        wait_until(lambda: "could not be replaced" in server.log_so_far, "the core gives up")
        server.switch_off("hang_load")
        wait_until(lambda: _is_ready(server), "another core serves")
        assert core(server).pid != old
        assert server.infer(1.0).status_code == 200
        assert "exit code 70" in server.log


def _is_ready(server: FakeServer) -> Any:
    try:
        return server.is_ready()
    except httpx.TransportError:
        return False
