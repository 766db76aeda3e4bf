"""What the people who run a server rely on: metrics, logs, keys, ids, documents, and another host."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers import Server, run_convoy, start_server, wait_until
from tests.support.stores import ROOT, StoreFolder, digit

DIGITS = "/predictions/digits"
OURS = {
    *("convoy_requests", "convoy_request_duration_seconds", "convoy_stage_duration_seconds", "convoy_batch_size"),
    *("convoy_padding_samples", "convoy_queue_depth", "convoy_inflight_bytes", "convoy_rejected"),
    *("convoy_engine_info", "convoy_build_info"),
}
TRITONS = {
    *("nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count", "nv_inference_exec_count"),
    *("nv_inference_request_duration_us", "nv_inference_queue_duration_us", "nv_inference_compute_input_duration_us"),
    *("nv_inference_compute_infer_duration_us", "nv_inference_compute_output_duration_us"),
    "nv_inference_pending_request_count",
}


@pytest.fixture(scope="module")
def server(shared_store: StoreFolder) -> Iterator[Server]:
    shared_store.add_digits()
    shared_store.add_add_sub()
    with start_server("--engine", "auto", "--access-log", "all", store=shared_store.root) as server:
        yield server


def samples(server: Server, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """One metric's values by their labels."""
    text = server.get("/metrics").text
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_metrics_have_the_names_that_dashboards_use(server: Server) -> None:
    server.post(DIGITS, content=digit("one"))
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert names >= OURS | TRITONS, (OURS | TRITONS) - names


def test_metrics_count_requests_by_outcome(server: Server) -> None:
    def count(outcome: str) -> float:
        labels = {"model": "digits", "version": "1", "protocol": "predictions", "outcome": outcome}
        return samples(server, "convoy_requests_total").get(tuple(sorted(labels.items())), 0.0)

    good, bad = count("success"), count("invalid")
    for _ in range(3):
        server.post(DIGITS, content=digit("one"))
    server.post(DIGITS, content=b"no image")
    wait_until(lambda: (count("success"), count("invalid")) == (good + 3, bad + 1), "all have been counted")


def test_what_clients_make_up_does_not_become_a_label(server: Server) -> None:
    server.post("/predictions/warm-up", content=b"")
    server.post("/v2/models/digits/versions/999/infer", content=b"")
    once = len(server.get("/metrics").text.splitlines())
    for number in range(50):
        server.post(f"/predictions/made-up-{number}", content=b"")
        server.post(f"/v2/models/digits/versions/{number + 2}/infer", content=b"")
    assert "made-up" not in server.get("/metrics").text
    assert len(server.get("/metrics").text.splitlines()) == once


def test_statistics_and_metrics_agree(server: Server) -> None:
    server.post(DIGITS, content=digit("two"))
    statistics = server.statistics("digits")
    labels = (("model", "digits"), ("version", "1"))
    assert samples(server, "nv_inference_count")[labels] == statistics["inference_count"]
    assert samples(server, "nv_inference_exec_count")[labels] == statistics["execution_count"]
    assert samples(server, "nv_inference_request_success")[labels] == statistics["inference_stats"]["success"]["count"]
    assert samples(server, "convoy_batch_size_count")[labels] == statistics["execution_count"]


def test_stats_show_the_last_minute(server: Server) -> None:
    server.post(DIGITS, content=digit("three"))
    stats = server.stats()
    assert stats["ready"] is True
    (digits,) = [model for model in stats["models"] if model["name"] == "digits"]
    assert (digits["engine"], digits["precision"]) in (("onnxruntime-cpu", "fp32"), ("openvino", "fp32"))
    assert digits["why"]
    assert any("tensorrt" in reason for reason in digits["why_not_others"])
    assert digits["engines"][0]["device_id"] == "cpu"
    assert digits["requests_per_s"] > 0
    assert digits["batch_sizes"]["1"] >= 1
    for stage in ("decode_wait", "decode", "queue", "copy_in", "compute", "copy_out", "encode", "total"):
        assert digits["stages"][stage]["p50_ms"] <= digits["stages"][stage]["p99_ms"]


def test_pages_are_there(server: Server) -> None:
    for path in ("/", "/docs"):  # what is on the first, test_page.py asks in a browser
        answer = server.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
    assert server.get("/v2/").json() == server.get("/v2").json()
    assert server.get("/ping").json() == {"status": "Healthy"}


def test_the_api_description_lists_the_routes_that_infer(server: Server) -> None:
    document = server.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    predict = document["paths"]["/predictions/{model}"]["post"]
    infer = document["paths"]["/v2/models/{model}/infer"]["post"]
    assert {"image/jpeg", "image/png", "multipart/form-data"} <= set(predict["requestBody"]["content"])
    names = {parameter["name"] for parameter in predict["parameters"]}
    assert names == {"model", "top_k", "threshold", "format", "timeout_ms"}
    assert predict["responses"]["200"]["content"]["application/json"]["examples"]
    assert infer["requestBody"]["content"]["application/json"]["examples"]
    assert {"400", "404", "413", "429", "500", "503", "504"} <= set(infer["responses"])
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids)


def test_every_reference_in_the_api_description_leads_somewhere(server: Server) -> None:
    text = server.get("/openapi.json").text
    document = server.get("/openapi.json").json()
    for name in set(re.findall(r'"\$ref":\s*"#/components/schemas/(\w+)"', text)):
        assert name in document["components"]["schemas"]


def test_a_request_id_goes_in_and_out_and_into_the_log(server: Server) -> None:
    answer = server.post(DIGITS, content=digit("four"), headers={"X-Request-Id": "my-request-4"})
    assert answer.headers["x-request-id"] == "my-request-4"
    wait_until(lambda: "[request my-request-4]" in server.log_so_far, "it is in the log")
    error = server.post("/predictions/nobody", content=b"", headers={"X-Request-Id": "my-request-5"})
    assert error.headers["x-request-id"] == "my-request-5"
    assert error.json()["error"]


@pytest.mark.parametrize("own", [b"", b"a" * 200, b"two words", b"caf\xe9"])
def test_a_request_id_that_is_none_is_replaced(server: Server, own: bytes) -> None:
    answer = server.get("/ping", headers={b"X-Request-Id": own})
    assert re.fullmatch(r"[0-9a-f]{8}-\d+", answer.headers["x-request-id"])


def test_every_answer_has_an_id_of_its_own(server: Server) -> None:
    ids = {server.get(path).headers["x-request-id"] for path in ("/ping", "/nowhere", "/stats", "/docs", "/ping")}
    assert len(ids) == 5


def test_a_trace_is_passed_on(server: Server) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    answer = server.post(DIGITS, content=digit("five"), headers={"traceparent": parent})
    assert answer.headers["traceparent"] == parent
    wait_until(lambda: parent in server.log_so_far, "it is in the log")


def test_answers_say_where_their_time_went(server: Server) -> None:
    row = {"shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
    tensors = {"inputs": [{"name": "INPUT0", **row}, {"name": "INPUT1", **row}]}
    answers = server.post(DIGITS, content=digit("six")), server.post("/v2/models/simple/infer", json=tensors)
    timing, other = (answer.headers["server-timing"] for answer in answers)
    assert [part.split(";")[0] for part in other.split(", ")] == ["decode_wait", "decode", "queue", "compute", "total"]
    stages = ("decode_wait", "decode", "queue", "compute", "total")
    assert re.fullmatch(", ".join(rf"{stage};dur=[\d.]+" for stage in stages), timing)


def test_a_client_cannot_write_lines_or_colours_into_the_log(server: Server) -> None:
    server.post("/predictions/x%0a2026-01-01T00:00:00.000Z%20ERROR%20owned%1b[31m%e2%80%a8", content=b"")
    wait_until(lambda: "owned" in server.log_so_far, "it is in the log")
    assert "\x1b" not in server.log
    assert not any(line.startswith("2026-01-01T00:00:00.000Z ERROR owned") for line in server.log.splitlines())


@pytest.mark.parametrize(("mode", "expected"), [("all", ["200", "400"]), ("errors", ["400"]), ("off", [])])
def test_the_access_log_says_as_much_as_it_is_asked_to(mode: str, expected: list[str]) -> None:
    with start_server("--access-log", mode) as server:
        server.post(DIGITS, content=digit("seven"))
        server.post(DIGITS, content=b"no image")
        server.signal()
        server.wait()
        assert re.findall(rf"POST {DIGITS} (\d+)", server.log) == expected


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("open sesame\n")
    with start_server("--api-key-file", str(key)) as server:
        yield server


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "open sesame"},
        {"Authorization": "Basic open sesame"},
        {"Authorization": "Bearer open sesame2"},
        {b"Authorization": b"Bearer \xff"},
    ],
)
def test_without_the_key_there_is_no_answer(locked: Server, headers: dict[str, str]) -> None:
    for answer in (
        locked.post(DIGITS, content=digit("one"), headers=headers),
        locked.get("/metrics", headers=headers),
        locked.get("/v2", headers=headers),
        locked.get("/nowhere", headers=headers),
    ):
        assert answer.status_code == 401
        assert "Authorization: Bearer" in answer.json()["error"]
        assert answer.headers["x-request-id"]


def test_with_the_key_there_is(locked: Server) -> None:
    answer = locked.post(DIGITS, content=digit("one"), headers={"Authorization": "Bearer open sesame"})
    assert answer.json()["predictions"][0]["label"] == "1"


@pytest.mark.parametrize("path", ["/ping", "/v2/health/live", "/v2/health/ready", "/v2/models/digits/ready"])
def test_probes_need_no_key(locked: Server, path: str) -> None:
    assert locked.get(path).status_code == 200


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    ended = run_convoy("serve", "--port", "0", "--api-key-file", str(tmp_path / "key"))
    assert ended.returncode == 2
    assert "is empty" in ended.stderr


def test_uvicorn_serves_the_same_application(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "convoy.app.server.main:app", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: _is_ready(port), "uvicorn serves")
            answer = httpx.post(f"http://127.0.0.1:{port}{DIGITS}", content=digit("seven"), trust_env=False)
            assert answer.json()["predictions"][0]["label"] == "7"
            process.terminate()
            assert process.wait(30) in (0, -15)
        finally:
            process.kill()
    assert "Traceback" not in (tmp_path / "log").read_text()


def _is_ready(port: int) -> bool:
    try:
        ready = httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", trust_env=False, verify=False)
        return ready.status_code == 200
    except httpx.TransportError:
        return False
