from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from convoy.app.engines.batch import BatchTrace, StageTimes
from convoy.app.scheduling.request import Done, ModelKey, Outcome, Request
from convoy.app.telemetry import start_tracing as starting
from convoy.app.telemetry.metrics import Histogram
from convoy.app.telemetry.otel import SdkTracing
from convoy.app.telemetry.outcomes import ANSWERED
from convoy.app.telemetry.tracing import RequestSpan
from convoy.models.errors import UsageError

NS = st.integers(0, 10**9)
TIMES = st.builds(StageTimes, NS, NS, NS, NS)
TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


class Kept(RequestSpan):
    def end(self, *about: object) -> None:
        pass


def done(times: StageTimes | None, queue_ns: int, batch: BatchTrace | None) -> Done:
    request = Request(1, ModelKey("rows", 1), 1, ((1,),), (), (), (), (), 0)
    return Done(request, Outcome.ANSWERED, (), times, queue_ns, 1, "", batch)


@given(TIMES, NS, st.integers(10**10, 10**12))
def test_stages_lie_behind_each_other_and_sum_up(times: StageTimes, waiting_ns: int, started_ns: int) -> None:
    span = Kept(TRACEPARENT, "")
    queue_ns = waiting_ns + times.waited_ns  # as the scheduler counts it
    span.answered(done(times, queue_ns, BatchTrace(TRACEPARENT, started_ns)))
    assert span.stages[0].start_ns == started_ns - waiting_ns
    for one, following in zip(span.stages, span.stages[1:], strict=False):
        assert one.end_ns == following.start_ns
    assert span.stages[-1].end_ns - span.stages[0].start_ns == queue_ns + times.total_ns
    copy_in_ns, compute_ns, copy_out_ns, _ = times
    assert dict(span.stages_ns()) == {
        "queue": queue_ns,
        "copy_in": copy_in_ns,
        "compute": compute_ns,
        "copy_out": copy_out_ns,
    }


def test_a_request_whose_batch_nobody_told_of_has_no_stages_in_it() -> None:
    span = Kept(TRACEPARENT, "")
    span.decoded(100, 30, 20)
    span.answered(done(StageTimes(1, 2, 3), 4, None))
    assert [(stage.name, stage.start_ns, stage.end_ns) for stage in span.stages] == [
        ("decode_wait", 50, 70),
        ("decode", 70, 100),
    ]
    assert span.batches == []
    assert (span.trace_id, span.span_id) == ("ab" * 16, "cd" * 8)


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30))
def test_an_exemplar_is_the_last_example_of_its_bucket(values: list[tuple[float, bool]]) -> None:
    histogram = Histogram("took_seconds", "So long", ("model",), (1.0, 10.0, 50.0), per_unit=2.0)
    expected: dict[str, float] = {}
    for value, is_example in values:
        series = histogram.at("rows")
        series.observe(value)
        if is_example:
            series.exemplify(value, {"trace_id": "1"})
            bound = next((bound for bound in (1.0, 10.0, 50.0) if value / 2 <= bound), "+Inf")
            expected[str(bound)] = value / 2
    registry = CollectorRegistry()
    registry.register(histogram)
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())  # which checks where they may be
    found = {one.labels["le"]: one.exemplar.value for one in family.samples if one.exemplar is not None}
    assert found == pytest.approx(expected)


def test_series_that_are_added_up_keep_the_last_exemplar_of_each_bucket() -> None:
    histogram = Histogram("took_seconds", "So long", ("model", "outcome"), (1.0,))
    histogram.at("rows", "answered").exemplify(0.5, {"trace_id": "the one before"})
    for outcome, value in (("late", 3.0), ("late", 0.5), ("answered", 0.5)):
        series = histogram.at("rows", outcome)
        series.observe(value)
        series.exemplify(value, {"trace_id": outcome})
    family = histogram.family("all_seconds", "All", 1)
    assert [one.exemplar and one.exemplar.labels["trace_id"] for one in family.samples[:2]] == ["answered", "late"]


@pytest.mark.parametrize("found", [{"return_value": None}, {"side_effect": ModuleNotFoundError("opentelemetry")}])
def test_without_the_library_the_switch_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]
) -> None:
    monkeypatch.setattr(starting, "find_spec", Mock(**found))
    with pytest.raises(UsageError, match=r"pip install .*\[otel\]"):
        starting.start_tracing(is_wanted=True)
    assert starting.start_tracing(is_wanted=False) is None


LATIN = st.text(st.characters(max_codepoint=255), max_size=80)
HEX = st.text("0123456789abcdefg", max_size=33)


@pytest.fixture(scope="module")
def sdk() -> Iterator[SdkTracing]:
    tracing = SdkTracing(InMemorySpanExporter())
    yield tracing
    tracing.close(10.0)


@given(
    LATIN | st.builds("{}-{}-{}-{}".format, HEX, HEX, HEX, HEX), LATIN | st.builds("{}={},{}".format, LATIN, HEX, HEX)
)
def test_whatever_a_client_calls_a_trace_its_call_has_a_span_or_none(
    sdk: SdkTracing, traceparent: str, tracestate: str
) -> None:
    given = {"traceparent": traceparent, "tracestate": tracestate}
    span = sdk.begin("http", "POST /", {}, given, 0)
    if span is not None:
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", span.traceparent)
        assert span.tracestate.isascii()
        assert not {*"\r\n"} & {*span.tracestate}
        span.end(None, ANSWERED, 0, 1)


def test_a_trace_that_w3c_allows_is_gone_on_with(sdk: SdkTracing) -> None:
    given = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "vendor=1"}
    span = sdk.begin("grpc", "ModelInfer", {}, given, 0)
    assert span is not None
    assert (span.trace_id, span.tracestate) == ("ab" * 16, "vendor=1")
    assert span.span_id != "cd" * 8
    assert sdk.begin("grpc", "ModelInfer", {}, {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-00"}, 0) is None
