"""Spans by OpenTelemetry, as a collector gets them from real servers, on every wire and in every form of the server."""

from __future__ import annotations

import itertools
import re
import secrets
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import grpc
import pytest
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2

import convoy
from tests.support.fake_server import POISON
from tests.support.grpc_calls import asking
from tests.support.servers import (
    FakeServer,
    Server,
    check_ended,
    run_convoy,
    start_fake_server,
    start_server,
    wait_until,
)
from tests.support.span_receiver import Received, SpanReceiver, receiving, receiving_over_http
from tests.support.stores import digit

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

SERVER_KIND = 2
SERVICE = "inference.GRPCInferenceService"
IMAGE = service_pb2.ModelInferRequest(
    model_name="digits",
    inputs=[{"name": "image", "datatype": "BYTES", "shape": [1]}],
    raw_input_contents=[struct.pack("<I", len(digit("four"))) + digit("four")],
)


@pytest.fixture(scope="module")
def receiver() -> Iterator[SpanReceiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(receiver: SpanReceiver) -> Iterator[Server]:
    with start_server("--tracing", "--access-log", "all", env=receiver.environment) as server:
        yield server


@pytest.fixture(scope="module")
def one_lane(receiver: SpanReceiver) -> Iterator[FakeServer]:
    """One run takes 300 ms, so that what comes meanwhile shares the next one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in receiver.environment.items():
            patch.setenv(name, value)
        with start_fake_server(fake={"latency_ms": 300.0, "max_batch": 8}, tracing=True) as server:
            yield server


def trace_context(*, sampled: bool = True) -> tuple[str, str, dict[str, str]]:
    """A trace of a client's: its id, its span's, and the headers."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"}


def own_trace(traceparent: str) -> str:
    """The trace of an answer, which W3C's own reader must take."""
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    assert context
    return traceparent.split("-")[1]


def check_stages(receiver: SpanReceiver, span: Received, *names: str) -> None:
    """The stages are these, each behind the other within the request, and together no longer than it."""
    stages = receiver.below(span)
    assert [stage.name for stage in stages if stage.name not in ("decode_wait", "device_wait")] == [*names]
    assert all(span.start_ns <= stage.start_ns <= stage.end_ns <= span.end_ns for stage in stages)
    for one, following in itertools.pairwise(stages):
        assert one.end_ns <= following.start_ns, (one.name, following.name)
    assert 0 < sum(stage.ns for stage in stages) <= span.ns


ALL_STAGES = ("decode", "queue", "copy_in", "compute", "copy_out", "encode")


def check_batch(receiver: SpanReceiver, span: Received) -> Received:
    """The request is linked to its batch, and that to the request; the stages of both are the same in time."""
    ((trace_id, span_id),) = span.links
    batch = receiver.find(trace_id, span_id)
    assert batch is not None
    assert (batch.name, batch.parent_id) == ("batch", "")
    assert batch.trace_id != span.trace_id
    assert span.where in batch.links
    device = ("copy_in", "compute", "copy_out")
    stages = [stage for stage in receiver.below(batch) if stage.name in device]
    assert [stage.name for stage in stages] == [*device]
    theirs = [stage for stage in receiver.below(span) if stage.name in device]
    # By two readings of two clocks each, which may stand some microseconds apart.
    for one, other in zip(stages, theirs, strict=True):
        assert one.ns == other.ns
        assert abs(one.start_ns - other.start_ns) < 10_000_000
    return batch


def test_a_request_over_http_is_a_span_in_its_clients_trace(server: Server, receiver: SpanReceiver) -> None:
    trace_id, parent_id, headers = trace_context()
    reply = server.post("/predictions/digits", content=digit("seven"), headers={**headers, "tracestate": "a=b,c=d"})
    span = receiver.await_request(trace_id)
    assert span.parent_id == parent_id
    assert span.name == "POST /predictions/{model}"
    assert span.trace_state == "a=b,c=d"
    assert reply.headers["tracestate"] == "a=b,c=d"
    assert reply.headers["traceparent"] == f"00-{trace_id}-{span.span_id}-01"
    known = {
        "http.request.method": "POST",
        "http.route": "/predictions/{model}",
        "url.path": "/predictions/digits",
        "http.response.status_code": 200,
        "convoy.model.name": "digits",
        "convoy.model.version": "1",
        "convoy.outcome": "answered",
    }
    assert known.items() <= span.attributes.items()
    assert not span.is_error
    assert span.resource["service.name"] == "convoy"
    check_stages(receiver, span, *ALL_STAGES)
    batch = check_batch(receiver, span)
    assert batch.attributes["convoy.batch.samples"] == batch.attributes["convoy.batch.requests"] == 1
    told_ms = reply.json()["timing_ms"]
    by_name = {stage.name: stage.ns / 1e6 for stage in receiver.below(span)}
    assert by_name["decode"] == pytest.approx(told_ms["decode"], abs=0.001)
    assert by_name["queue"] + by_name.get("device_wait", 0.0) == pytest.approx(told_ms["queue"], abs=0.001)


def test_a_request_without_a_trace_begins_one(server: Server, receiver: SpanReceiver) -> None:
    tensor = {"name": "images", "shape": [1, 32, 32, 3], "datatype": "UINT8", "data": [0] * 3072}
    for version in ("", "/versions/1"):
        reply = server.post(f"/v2/models/digits{version}/infer", json={"inputs": [tensor]})
        span = receiver.await_request(own_trace(reply.headers["traceparent"]))
        assert span.parent_id == ""
        assert span.name == f"POST /v2/models/{{model}}{version and '/versions/{version}'}/infer"
        check_stages(receiver, span, *ALL_STAGES)
        check_batch(receiver, span)
        line = f"/infer 200 .* trace {reply.headers['traceparent']}"
        wait_until(lambda line=line: re.search(line, server.log_so_far), "the log names it")  # type: ignore[misc]


def test_a_request_over_grpc_is_a_span_in_its_clients_trace(server: Server, receiver: SpanReceiver) -> None:
    trace_id, parent_id, headers = trace_context()
    with asking(server) as stub:
        _, call = stub.ModelInfer.with_call(IMAGE, metadata=(*headers.items(), ("tracestate", "a=b")))
    span = receiver.await_request(trace_id)
    trailer = dict(call.trailing_metadata())
    assert (trailer["traceparent"], trailer["tracestate"]) == (f"00-{trace_id}-{span.span_id}-01", "a=b")
    assert (span.parent_id, span.name, span.kind) == (parent_id, f"{SERVICE}/ModelInfer", SERVER_KIND)
    known = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": "ModelInfer", "rpc.grpc.status_code": 0}
    assert known.items() <= span.attributes.items()
    check_stages(receiver, span, *ALL_STAGES)
    check_batch(receiver, span)


def test_each_request_of_a_stream_is_a_span(server: Server, receiver: SpanReceiver) -> None:
    trace_id, parent_id, headers = trace_context()
    with asking(server) as stub:
        answers = list(stub.ModelStreamInfer(iter([IMAGE] * 3), metadata=tuple(headers.items())))
    assert [one.error_message for one in answers] == [""] * 3
    name = f"{SERVICE}/ModelStreamInfer"

    def spans() -> list[Received]:
        return [span for span in receiver.named(name) if (span.trace_id, span.parent_id) == (trace_id, parent_id)]

    wait_until(lambda: len(spans()) == 3, "the stream's spans have come")


def test_errors_say_what_became_of_the_request(server: Server, receiver: SpanReceiver) -> None:
    for path, body, status in (
        ("/predictions/digits", b"no image", 400),
        ("/predictions/cats", digit("one"), 404),
    ):
        trace_id, _, headers = trace_context()
        assert server.post(path, content=body, headers=headers).status_code == status
        span = receiver.await_request(trace_id)
        assert (span.attributes["http.response.status_code"], span.attributes["convoy.outcome"]) == (status, "invalid")
        assert not span.is_error  # it is the client's
        assert span.links == []
    trace_id, _, headers = trace_context()
    with asking(server) as stub, pytest.raises(grpc.RpcError):
        stub.ModelInfer(service_pb2.ModelInferRequest(model_name="cats"), metadata=tuple(headers.items()))
    assert receiver.await_request(trace_id).attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]


def test_what_its_client_does_not_sample_has_no_span(server: Server, receiver: SpanReceiver) -> None:
    unsampled, _, headers = trace_context(sampled=False)
    reply = server.post("/predictions/digits", content=digit("seven"), headers=headers)
    assert reply.headers["traceparent"] == headers["traceparent"]
    for path in ("/v2/health/ready", "/metrics", "/v2/models/digits"):
        server.get(path)
    sampled, _, headers = trace_context()
    server.post("/predictions/digits", content=digit("seven"), headers=headers)
    receiver.await_request(sampled)
    assert not [span for span in receiver.spans if span.trace_id == unsampled]
    assert {span.name for span in receiver.spans if span.kind == SERVER_KIND} <= {
        *(f"POST /predictions/{{model}}{version}" for version in ("", "/{version}")),
        *(f"POST /v2/models/{{model}}{version}/infer" for version in ("", "/versions/{version}")),
        *(f"{SERVICE}/{method}" for method in ("ModelInfer", "ModelStreamInfer")),
    }


def test_openmetrics_lead_from_a_bucket_to_a_trace(server: Server, receiver: SpanReceiver) -> None:
    """A bucket names the last request of it that has a span."""
    asked: list[str] = []

    def exemplars() -> dict[str, dict[tuple[str, str], Any]]:
        """By trace, those of the requests that were asked here."""
        reply = server.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert reply.headers["content-type"].startswith("application/openmetrics-text")
        found: dict[str, dict[tuple[str, str], Any]] = {}
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                trace_id = "" if sample.exemplar is None else sample.exemplar.labels["trace_id"]
                if trace_id in asked:
                    where = sample.name, sample.labels.get("stage", "")
                    found.setdefault(trace_id, {})[where] = sample.exemplar
        return found

    def whole() -> tuple[str, dict[tuple[str, str], Any]] | None:
        """One request more, and a request that all of its buckets name."""
        trace_id, _, headers = trace_context()
        assert server.post("/predictions/digits", content=digit("seven"), headers=headers).status_code == 200
        asked.append(trace_id)
        return next(((one, found) for one, found in exemplars().items() if needed <= found.keys()), None)

    calls, stage = "convoy_call_duration_seconds_bucket", "convoy_stage_duration_seconds_bucket"
    needed = {(calls, ""), *((stage, name) for name in ALL_STAGES)}
    trace_id, found = wait_until(whole, "a request is an example")
    span = receiver.await_request(trace_id)
    assert found[calls, ""].labels["span_id"] == span.span_id
    assert found[calls, ""].value == pytest.approx(span.ns / 1e9, abs=1e-3)
    assert {name for family, name in found if family == stage} <= {"decode_wait", *ALL_STAGES}
    plain = server.get("/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert trace_id not in plain.text


def test_two_requests_of_a_batch_are_linked_to_the_same_span(one_lane: FakeServer, receiver: SpanReceiver) -> None:
    ids = [trace_context() for _ in range(4)]
    one_lane.switch_on("hold")
    with ThreadPoolExecutor(4) as threads:
        asking = []
        for count, (_, _, headers) in enumerate(ids, start=1):
            asking.append(threads.submit(one_lane.infer, 1.0, headers=headers))
            wait_until(lambda count=count: one_lane.stats()["unfinished_requests"] == count, "it runs, or waits")
        one_lane.switch_off("hold")
        assert [one.result().status_code for one in asking] == [200] * 4
    spans = [receiver.await_request(trace_id) for trace_id, _, _ in ids]
    batches = [check_batch(receiver, span) for span in spans]
    by_id = {batch.span_id: batch for batch in batches}
    shared = next(batch for batch in by_id.values() if len(batch.links) > 1)  # who came first ran alone
    together = [span for span in spans if shared.where in span.links]
    assert {span.where for span in together} == {*shared.links}
    assert shared.attributes["convoy.batch.requests"] == shared.attributes["convoy.batch.samples"] == len(together)
    for span in together:
        stages = {stage.name: stage for stage in receiver.below(span)}
        assert stages["queue"].end_ns <= stages["copy_in"].start_ns
        check_stages(receiver, span, *ALL_STAGES)


def test_a_batch_is_told_where_one_of_its_requests_is_sampled(one_lane: FakeServer, receiver: SpanReceiver) -> None:
    contexts = [trace_context(sampled=number == 3) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda one: one_lane.infer(1.0, headers=one[2]), contexts))
    span = receiver.await_request(contexts[3][0])
    assert check_batch(receiver, span).links == [span.where]


def test_a_failed_request_is_an_error(one_lane: FakeServer, receiver: SpanReceiver) -> None:
    trace_id, _, headers = trace_context()
    assert one_lane.infer(1.0, headers=headers, params={"timeout_ms": "20"}).status_code == 504
    span = receiver.await_request(trace_id)
    assert span.is_error
    assert (span.attributes["http.response.status_code"], span.attributes["error.type"]) == (504, "late")


def test_a_batch_that_fails_is_an_error_that_its_request_leads_to(one_lane: FakeServer, receiver: SpanReceiver) -> None:
    trace_id, _, headers = trace_context()
    assert one_lane.infer(POISON, headers=headers).status_code == 500
    span = receiver.await_request(trace_id)
    assert (span.is_error, span.attributes["error.type"]) == (True, "failed")
    ((batch_trace_id, batch_span_id),) = span.links
    batch = receiver.find(batch_trace_id, batch_span_id)
    assert batch is not None
    assert (batch.name, batch.is_error, batch.attributes["error.type"]) == ("batch", True, "batch")
    assert batch.attributes["convoy.batch.requests"] == 1
    assert batch.links == [span.where]
    assert 0 < batch.ns <= span.ns


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_clients_program_leads_its_trace_through_the_server(
    server: Server, receiver: SpanReceiver, wire: str
) -> None:
    url = server.url if wire == "http" else f"grpc://{server.grpc_address}"
    context: ContextVar[dict[str, str]] = ContextVar("context")
    with convoy.Client(url, headers=context.get) as client:
        traces = [trace_context() for _ in range(2)]
        for (_, _, headers), images in zip(traces, (digit("seven"), [digit("seven"), digit("four")]), strict=True):
            context.set({"traceparent": headers["traceparent"]})
            client.predict("digits", images)  # several are asked in threads, where the caller's context holds, too
    for trace_id, parent_id, _ in traces:
        assert receiver.await_request(trace_id).parent_id == parent_id


def test_a_form_has_the_stages_of_each_file(server: Server, receiver: SpanReceiver) -> None:
    trace_id, _, headers = trace_context()
    files = [("file", digit(word)) for word in ("one", "two", "three")]
    assert server.post("/predictions/digits", files=files, headers=headers).status_code == 200
    span = receiver.await_request(trace_id)
    stages = [stage.name for stage in receiver.below(span)]
    assert (stages.count("decode"), stages.count("compute"), stages.count("encode")) == (3, 3, 1)
    assert len(span.links) == 3


def test_the_samplers_variables_count(receiver: SpanReceiver) -> None:
    ratio = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    with start_server("--tracing", env={**receiver.environment, **ratio, "OTEL_SERVICE_NAME": "eyes"}) as server:
        before = {span.where for span in receiver.spans}
        for _ in range(20):
            assert "traceparent" not in server.post("/predictions/digits", content=digit("one")).headers
        trace_id, _, headers = trace_context()
        server.post("/predictions/digits", content=digit("one"), headers=headers)
        span = receiver.await_request(trace_id)
        assert span.resource["service.name"] == "eyes"
        new = [one for one in receiver.spans if one.where not in before]
        assert [one for one in new if one.kind == SERVER_KIND] == [span]


def test_without_the_switch_nothing_is_sent(receiver: SpanReceiver) -> None:
    with start_server(env=receiver.environment) as server:
        before = len(receiver.spans)
        trace_id, _, headers = trace_context()
        reply = server.post("/predictions/digits", content=digit("one"), headers={**headers, "tracestate": "a=b"})
        assert reply.headers["traceparent"] == headers["traceparent"]
        assert "tracestate" not in reply.headers
    assert not [span for span in receiver.spans[before:] if span.trace_id == trace_id]


def test_spans_that_wait_are_sent_before_the_end(receiver: SpanReceiver) -> None:
    trace_id, _, headers = trace_context()
    late = {**receiver.environment, "OTEL_BSP_SCHEDULE_DELAY": "600000"}
    with start_server("--tracing", env=late) as server:
        server.post("/predictions/digits", content=digit("one"), headers=headers)
    (_,) = [span for span in receiver.spans if span.trace_id == trace_id and span.kind == SERVER_KIND]


def test_a_collector_that_is_away_harms_nobody() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        away = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{taken.getsockname()[1]}",
            "OTEL_BSP_SCHEDULE_DELAY": "20",
            "OTEL_BSP_MAX_QUEUE_SIZE": "16",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8",
        }
        with start_server("--tracing", env=away) as server, server.client() as client:
            for _ in range(50):
                assert client.post("/predictions/digits", content=digit("one")).status_code == 200
            assert server.is_ready()


def test_spans_travel_over_http_where_the_variables_say_so() -> None:
    with receiving_over_http() as receiver, start_server("--tracing", env=receiver.environment) as server:
        trace_id, _, headers = trace_context()
        server.post("/predictions/digits", content=digit("one"), headers=headers)
        check_batch(receiver, receiver.await_request(trace_id))


def test_a_protocol_that_is_none_is_a_wrong_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    done = run_convoy("serve", "--tracing", "--port", "0", "--grpc-port", "-1")
    check_ended(done, 2, "OTEL_EXPORTER_OTLP_PROTOCOL must be grpc or http/protobuf, got 'carrier-pigeon'")
