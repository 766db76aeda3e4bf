"""The load test against Convoy itself, over both wires, and against gRPC servers that misbehave."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from convoy.models.errors import JobError, UsageError
from tests.e2e.test_loadtest import load
from tests.support.grpc_calls import answering
from tests.support.servers import check_ended, run_convoy, start_server, wait_until

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("body", ["image", "binary", "json"])
def test_convoy_over_http_tells_where_the_time_went(demo, tmp_path, body):
    page = tmp_path / "page.html"
    code, printed, found = load(demo.url, tmp_path, rate=40, body=body, report_file=page)
    assert (code, found["target"]["body"]) == (0, body)
    stages = {stage["name"]: stage["mean_ms"] for stage in found["server_side"]["stages"]}
    assert {"decode wait", "decode", "queue", "copy in", "compute", "copy out", "encode"} == set(stages)
    assert 0 < stages["compute"] < found["latency_ms"]["max"]
    assert sum(batch["size"] * batch["count"] for batch in found["server_side"]["batches"]) >= found["good"]
    assert "server: mean compute time" in printed
    assert all(words in page.read_text() for words in ("Where the time went", "decode", "Batch sizes"))


def test_the_server_s_process_is_in_what_it_used(tmp_path):
    page = tmp_path / "page.html"
    with start_server() as server:
        code, printed, found = load(server.url, tmp_path, concurrency=2, duration_s=3, report_file=page)
    assert (code, found["target"]["body"]) == (0, "image")  # as its model takes them
    use = found["server_use"]
    (process,) = use["processes"]
    assert process["name"] == "core"
    assert 0 < process["cpu_s"] == pytest.approx(use["cpu_s"])
    assert use["peak_mib"] == process["peak_mib"] > 20
    assert len(use["samples"]) >= 2
    assert use["cpu_ms_per_answer"] > 0
    told = ("server: CPU, cores", "server: CPU per successful request", "server: peak memory")
    assert all(words in printed for words in told)
    shown = ("What the server used", "CPU of the server", "Memory of the server", "core")
    assert all(words in page.read_text() for words in shown)


@pytest.mark.parametrize("mode", [{"concurrency": 3}, {"rate": 40}, {"concurrency": 4, "processes": 2}])
def test_convoy_over_grpc(demo, tmp_path, mode):
    code, _, found = load(f"grpc://{demo.grpc_address}", tmp_path, **mode)
    target = found["target"]
    assert (code, target["protocol"], target["server"]["name"]) == (0, "grpc", "convoy")
    assert found["good"] == found["offered"] > 5
    assert found["server_use"] is None  # nothing says where its metrics are
    assert {stage["name"] for stage in found["server_side"]["stages"]} == {"queue", "copy in", "compute", "copy out"}


def test_the_command_takes_every_option(demo, tmp_path):
    files = [tmp_path / name for name in ("a.json", "a.csv", "a.html")]
    words = (
        f"loadtest --url http://{demo.grpc_address} --protocol grpc --model digits --steps 20,40 --arrivals constant"
    )
    words += " --duration 0.5 --warm-up 0.1 --slo-ms 20000 --processes 2 --seed 3 --json {} --csv {} --report {}"
    check_ended(run_convoy(*words.format(*files).split()), 0, "constant, steps of 20, 40 requests/s")
    assert all(file.stat().st_size > 100 for file in files)


def test_what_a_grpc_server_cannot_be_asked_is_told(demo, tmp_path):
    for address, options, kind, words in (
        (f"grpc://{demo.grpc_address}", {"model": "cats"}, JobError, "no model 'cats'; it serves digits"),
        (f"grpc://{demo.grpc_address}", {"body": "json"}, UsageError, "--body json is for HTTP"),
        (f"grpc://127.0.0.1:{demo.port}", {"timeout_s": 2}, JobError, "check that --url is a gRPC address"),
        (f"http://{demo.grpc_address}", {"timeout_s": 2}, JobError, "check that --url is an inference server"),
    ):
        with pytest.raises(kind, match=words):
            load(address, tmp_path, **options)


def test_a_server_that_is_killed_under_load(tmp_path):
    with start_server(exit_code=-9) as server:
        url = f"grpc://{server.grpc_address}"

        def kill_under_load() -> None:
            wait_until(lambda: server.statistics("digits")["inference_count"] > 20, "it is under load")
            server.process.kill()

        killer = threading.Thread(target=kill_under_load)
        killer.start()
        code, _, found = load(url, tmp_path, rate=30, duration_s=4, warm_up_s=0)
        killer.join()
    assert (code, found["server_side"]) == (1, None)
    assert {error["kind"] for error in found["errors"]} <= {"refused", "reset"}
    assert min(found["good"], found["failed"]) > 0


class Misbehaving(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Describes a model, and answers inferences as `infer(request, context)` does; no other method is there."""

    def __init__(self, infer: Any) -> None:
        self.ModelInfer = infer

    def ServerMetadata(self, *_: Any) -> Any:  # noqa: N802 - the stubs' name
        return service_pb2.ServerMetadataResponse(name="bad")

    def ModelMetadata(self, *_: Any) -> Any:  # noqa: N802 - the stubs' name
        metadata = service_pb2.ModelMetadataResponse(name="m", versions=["1"])
        metadata.inputs.add(name="x", datatype="FP32", shape=[-1, 3])
        return metadata


@contextmanager
def misbehaving(infer: Any) -> Iterator[str]:
    with answering(Misbehaving(infer)) as address:
        yield f"grpc://{address}"


def good_answer() -> Any:
    answer = service_pb2.ModelInferResponse(model_name="m")
    answer.outputs.add(name="y", datatype="FP32", shape=[1])
    return answer


def refuses(context: Any) -> None:
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")


def is_empty(context: Any) -> Any:
    return service_pb2.ModelInferResponse()


def stalls(context: Any) -> None:
    over = threading.Event()
    context.add_callback(over.set)
    over.wait(20)


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        (refuses, "grpc", "RESOURCE_EXHAUSTED: the queue is full"),
        (is_empty, "garbage", "OK without outputs"),
        (stalls, "timeout", "no answer within 0.5 s"),
    ],
)
def test_what_goes_wrong_over_grpc_is_counted_in_plain_words(tmp_path, behaviour, kind, words):
    asked = itertools.count()

    def infer(_: Any, context: Any) -> Any:
        # The load test tries one before it starts.
        return behaviour(context) if next(asked) else good_answer()

    with misbehaving(infer) as url:
        code, printed, found = load(url, tmp_path, model="m", rate=20, warm_up_s=0, timeout_s=0.5)
    assert (code, words in printed, found["server_side"], found["unfinished"]) == (1, True, None, 0)
    assert kind in [error["kind"] for error in found["errors"]]
    assert found["failed"] == found["offered"] > 0


def test_a_grpc_server_without_a_list_of_models_asks_for_a_name(tmp_path):
    with misbehaving(lambda *_: good_answer()) as url:
        with pytest.raises(UsageError, match="--model NAME"):
            load(url, tmp_path)
        code, _, _ = load(url, tmp_path, model="m", concurrency=2)
    assert code == 0
