"""The statistics and the metrics keep their promises while many clients ask: nothing is lost, nothing goes back."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_server import POISON
from tests.support.servers import FakeServer, metric, rows_request, start_fake_server, start_server, wait_until
from tests.support.stores import picture
from tests.support.wire import Wire

CLIENTS, ROUNDS = 8, 40
STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with start_fake_server(fake={"latency_ms": 2, "max_batch": 8}, access_log="off", max_queue=12) as server:
        yield server


def flat(document: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Every number in a document, by where it stands; batch sizes name their own row."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from flat(value, f"{path}.{key}")
    elif isinstance(document, list):
        for value in document:
            yield from flat(value, f"{path}[{value.get('batch_size')}]")
    elif isinstance(document, int):
        yield path, document


def check_at_rest_or_not(statistics: dict[str, Any]) -> None:
    """What holds at every moment."""
    infer, batches = statistics["inference_stats"], statistics["batch_stats"]
    assert sum(one["compute_infer"]["count"] for one in batches) == statistics["execution_count"]
    assert sum(one["batch_size"] * one["compute_infer"]["count"] for one in batches) == statistics["inference_count"]
    assert {infer[stage]["count"] for stage in STAGES} == {infer["success"]["count"]}
    assert infer["success"]["ns"] >= sum(infer[stage]["ns"] for stage in ("queue",))
    assert infer["cache_hit"] == infer["cache_miss"] == {"count": 0, "ns": 0}
    for one in batches:
        assert one["compute_input"]["count"] == one["compute_infer"]["count"] == one["compute_output"]["count"]
    # A batch of several requests counts its time for each of them that was answered.
    if not infer["fail"]["count"]:
        assert infer["compute_infer"]["ns"] >= sum(one["compute_infer"]["ns"] for one in batches)


class Witness:
    """Reads the statistics again and again, and compares each with the one before."""

    def __init__(self, server: FakeServer) -> None:
        self.readings = 0
        self.failure: BaseException | None = None
        self._server, self._enough = server, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()

    def _watch(self) -> None:
        before: dict[str, int] = {}
        try:
            with self._server.client() as client:
                while not self._enough.is_set():
                    (statistics,) = client.get("/v2/models/rows/stats").json()["model_stats"]
                    check_at_rest_or_not(statistics)
                    now = dict(flat(statistics))
                    fallen = {
                        path: (count, now.get(path)) for path, count in before.items() if now.get(path, -1) < count
                    }
                    assert not fallen
                    before = now
                    self.readings += 1
        except BaseException as error:
            self.failure = error


def ask(client: httpx.Client, number: int, round_number: int) -> tuple[int, int]:
    """One request of a mixed kind; its status and samples."""
    samples = 1 + (number + round_number) % 3
    first = POISON if (number + round_number) % 10 == 0 else 1.0
    timeout = "?timeout_ms=3" if number == 1 else ""
    answer = client.post(f"/v2/models/rows/infer{timeout}", json=rows_request(first, *([1.0] * (samples - 1))))
    return answer.status_code, samples


def test_counters_equal_what_was_sent_and_never_go_back(server: FakeServer) -> None:
    outcomes: Counter[int] = Counter()
    samples_answered = 0
    lock = threading.Lock()

    def run(number: int) -> None:
        nonlocal samples_answered
        with server.client() as client:
            for round_number in range(ROUNDS):
                status, samples = ask(client, number, round_number)
                with lock:
                    outcomes[status] += 1
                    samples_answered += samples if status == 200 else 0

    before = server.statistics("rows")
    with Witness(server) as witness:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert witness.failure is None, witness.failure
    assert witness.readings > 3
    wait_until(server.is_at_rest, "everything has ended")
    after = server.statistics("rows")
    check_at_rest_or_not(after)
    assert set(outcomes) <= {200, 429, 500, 504}
    assert outcomes[200] > 0
    assert outcomes[500] > 0
    late = outcomes[504]  # of which some ran all the same
    grown = {
        name: after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"]
        for name in ("success", "fail")
    }
    assert grown == {"success": outcomes[200], "fail": CLIENTS * ROUNDS - outcomes[200]}
    inferred = after["inference_count"] - before["inference_count"]
    assert samples_answered <= inferred <= samples_answered + 3 * late
    assert_metrics_equal(server, after)


def assert_metrics_equal(server: FakeServer, statistics: dict[str, Any]) -> None:
    """Triton's metric names say what the statistics say."""

    def value(name: str) -> float:
        return metric(server, name, model="rows")

    infer = statistics["inference_stats"]
    assert value("nv_inference_request_success") == infer["success"]["count"]
    assert value("nv_inference_request_failure") == infer["fail"]["count"]
    assert value("nv_inference_count") == statistics["inference_count"]
    assert value("nv_inference_exec_count") == statistics["execution_count"]
    assert value("nv_inference_pending_request_count") == 0
    assert value("nv_inference_queue_duration_us") == pytest.approx(infer["queue"]["ns"] / 1e3)
    assert value("nv_inference_compute_infer_duration_us") == pytest.approx(infer["compute_infer"]["ns"] / 1e3)
    assert value("convoy_batch_size_count") == statistics["execution_count"]
    assert value("convoy_batch_size_sum") == statistics["inference_count"]


def test_an_answer_is_counted_before_it_is_sent(server: FakeServer) -> None:
    with server.client() as client:
        for number in range(1, 21):
            assert client.post("/v2/models/rows/infer", json=rows_request(1.0)).status_code == 200
            (statistics,) = client.get("/v2/models/rows/stats").json()["model_stats"]
            assert statistics["inference_stats"]["success"]["count"] == number
            assert statistics["inference_count"] == number


def test_who_was_told_that_it_is_late_is_nobodys_success() -> None:
    """Though its batch ran to its end, which counts as what was computed."""
    with start_fake_server(fake={"latency_ms": 1500}) as server:
        assert server.infer(1.0, params={"timeout_ms": 1000}).status_code == 504
        wait_until(lambda: server.statistics("rows")["execution_count"] == 1, "the batch has ended")
        statistics = server.statistics("rows")
        assert statistics["inference_stats"]["success"]["count"] == 0
        assert statistics["inference_stats"]["fail"]["count"] == 1
        assert statistics["inference_count"] == 1
        assert metric(server, "nv_inference_request_failure", model="rows", reason="REJECTED") == 1
        assert metric(server, "convoy_call_duration_seconds_count", outcome="late") == 1


def test_a_picture_that_is_not_decoded_in_time_is_a_request_that_failed() -> None:
    large = picture(2000, "RGB", "WebP")
    with start_server() as server:
        assert server.post("/predictions/digits?timeout_ms=0.01", content=large).status_code == 504
        assert server.post("/predictions/digits", content=large[:2000]).status_code == 400
        calls = "convoy_call_duration_seconds_count"
        wait_until(lambda: metric(server, calls, outcome="late"), "it is counted")
        fail = server.statistics("digits")["inference_stats"]["fail"]
        assert fail["count"] == 1, "what is no picture is none"
        assert fail["ns"] > 0
        assert metric(server, "nv_inference_request_failure", model="digits", reason="REJECTED") == 1


def test_all_keys_are_there_before_the_first_request(server: FakeServer) -> None:
    (statistics,) = server.get("/v2/models/rows/versions/1/stats").json()["model_stats"]
    assert statistics["batch_stats"] == []
    assert statistics["last_inference"] == statistics["inference_count"] == statistics["execution_count"] == 0
    names = {"success", "fail", *STAGES, "cache_hit", "cache_miss"}
    assert statistics["inference_stats"] == {name: {"count": 0, "ns": 0} for name in names}
    everything = server.get("/v2/models/stats").json()["model_stats"]
    assert statistics in everything


@pytest.mark.slow
def test_the_last_minute_is_a_minute() -> None:
    """Sixty large batches and 4,500 small ones behind them: of a minute's batches more than a percent took long."""
    large, small = 60, 4500
    fake = {"per_sample_ms": 0.5, "max_batch": 64}
    with start_fake_server(fake=fake, access_log="off") as server:
        with Wire(server.port) as wire:
            sizes = [64] * large + [1] * small
            bodies = {size: json.dumps(rows_request(*([1.0] * size))).encode() for size in (1, 64)}
            assert {wire.ask("/v2/models/rows/infer", bodies[size]).status for size in sizes} == {200}
        wait_until(server.is_at_rest, "all is answered")
        (rows,) = [one for one in server.stats()["models"] if one["name"] == "rows"]
    assert rows["batch_sizes"] == {"64": large, "1": small}
    assert rows["stages"]["compute"]["p99_ms"] >= 0.99 * 32
    assert rows["stages"]["total"]["p99_ms"] >= 0.99 * 32, "it is of the same minute"
    assert rows["stages"]["total"]["p50_ms"] < 32


def test_stats_tell_how_calls_ended_what_is_open_and_the_last_five_minutes() -> None:
    """Five minutes only of the models that are named."""
    fake = {"per_sample_ms": 50, "max_batch": 4}
    with start_fake_server(fake=fake, max_queue=1) as server, ThreadPoolExecutor(2) as pool:
        assert {server.infer(1.0, 1.0).status_code for _ in range(3)} == {200}
        assert server.post("/v2/models/rows/infer", content=b"{").status_code == 400
        assert server.post("/v2/models/nobody/infer", content=b"{}").status_code == 404
        server.switch_on("hold")
        held = [pool.submit(server.infer, 1.0)]
        wait_until(lambda: open_calls(server) == (0, 1), "the row's call is open")
        held.append(pool.submit(server.infer, 1.0))
        wait_until(lambda: open_calls(server) == (0, 2), "both are")
        assert server.infer(1.0).status_code == 429
        wait_until(lambda: server.stats()["open_calls"] == 2, "two are owed an answer")
        server.switch_off("hold")
        assert {one.result().status_code for one in held} == {200}
        wait_until(lambda: open_calls(server) == (0, 0), "nobody is owed an answer")

        def five_minutes() -> dict[str, Any] | None:
            images, rows = server.get("/stats?history=rows&history=nobody").json()["models"]
            assert "history" not in images
            found: dict[str, Any] = rows["history"]
            return found if sum(found["batch_sizes"].values()) == 5 else None

        history = wait_until(five_minutes, "the period has ended")
        stats = server.stats()
    (rows,) = [one for one in stats["models"] if one["name"] == "rows"]
    assert stats["open_calls"] == 0
    assert rows["calls_per_s"]["answered"] == pytest.approx(5 * rows["calls_per_s"]["invalid"], rel=0.2)
    assert list(stats["refused_per_s"]) == ["queue_full"]
    assert list(stats["calls_for_no_model_per_s"]) == ["invalid"]
    (device,) = stats["devices"]
    assert 0 < device["utilisation"] <= 1
    assert "history" not in rows, "who names none is told none"
    assert list(rows["refused_per_s"]) == list(history["refused_per_s"]) == ["queue_full"]
    length = len(history["mean_batch"])
    per_second = history["calls_per_s"]
    assert list(rows["calls_per_s"]) == list(per_second) == ["answered", "invalid", "refused"]
    assert {len(found) for found in per_second.values()} == {length}
    for name, calls in (("answered", 5), ("invalid", 1), ("refused", 1)):
        first, *others = per_second[name]
        in_first = calls - 5 * sum(others)
        # Of the first period, five seconds like the others, there may have been no more than one.
        assert in_first / 5 - 0.01 <= first <= in_first + 0.01, name
    assert history["batch_sizes"] == {"1": 2, "2": 3}
    assert max(one for one in history["largest_batch"] if one is not None) == 2
    assert [one is None for one in history["total"]["p99_ms"]] == [not one for one in per_second["answered"]]
    spent = [rows["mean_ms"][stage] for stage in ("queue", "copy_in", "compute", "copy_out")]
    assert 0 < sum(spent) < rows["mean_ms"]["total"]


def open_calls(server: FakeServer) -> tuple[int, ...]:
    """By model."""
    return tuple(model["open_calls"] for model in server.stats()["models"])


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"host": "127.0.0.1"}, "not_allowed"),
        ({"model_control": "explicit"}, "not_allowed"),
        ({"model_control": "explicit", "host": "127.0.0.1"}, "without_token"),
        ({"model_control": "explicit", "admin_token_file": ""}, "with_token"),
    ],
)
def test_stats_tell_who_may_change_what_is_served(options: dict[str, Any], changes: str, tmp_path: Path) -> None:
    if "admin_token_file" in options:
        (tmp_path / "token").write_text("boss")
        options = {**options, "admin_token_file": tmp_path / "token"}
    with start_fake_server(**options) as server:
        stats = server.stats()
        assert (stats["model_control"], stats["changes"]) == (options.get("model_control", "none"), changes)
        status = server.post("/v2/repository/models/rows/load").status_code
        assert (status == 200) == (changes == "without_token")
        (server.store / "rows" / "7").mkdir()
        found = {model["name"]: model["versions"] for model in server.get("/store").json()["models"]}
        assert found == {"images": ["1"], "rows": ["1", "7"]}
