"""Spans by OpenTelemetry's SDK, which reads its own variables: endpoint, protocol, sampler, resource, batches.

Spans are created when they end, from the timestamps of `tracing`. Only a request's own span is created at its
beginning, because its ids go out with the response and with the request to its batch, and because the sampler decides
then. A thread of the SDK sends the spans; what it cannot send it drops, with a log message.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from convoy.app.engines.batch import BatchResult, BatchTrace, EngineFailure
from convoy.app.scheduling.queues import Dispatch
from convoy.app.scheduling.request import ModelKey
from convoy.app.telemetry.outcomes import CallEnd, CallOutcome
from convoy.app.telemetry.tracing import RequestSpan, SpanStage, TracedWire, batch_stages
from convoy.app.version import VERSION
from convoy.models.errors import UsageError

# The names of the semantic conventions.
_STATUS: dict[TracedWire, str] = {"http": "http.response.status_code", "grpc": "rpc.grpc.status_code"}
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
# UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS: server errors by the conventions.
_GRPC_ERRORS = frozenset((2, 4, 12, 13, 14, 15))
_propagator = TraceContextTextMapPropagator()


class SdkTracing:
    """One process's spans. Used on one event loop; `close` may be called from any thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        resource = _resource()
        # `close` ends them in time; at the interpreter's exit, the SDK would wait for an unreachable collector.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        # A batch belongs to many traces. It has a span if one of them is sampled, whatever a sampler decides for it
        # alone.
        batches = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        processor = BatchSpanProcessor(exporter)
        for provider in (self._provider, batches):
            provider.add_span_processor(processor)
        self._requests = self._provider.get_tracer("convoy", VERSION)
        self._batches = batches.get_tracer("convoy", VERSION)

    def begin(
        self, wire: TracedWire, name: str, attributes: Mapping[str, str], parent: Mapping[str, str], arrival_ns: int
    ) -> RequestSpan | None:
        """As in `Tracing`."""
        clock_ns = _wall_ahead_ns()
        context = _propagator.extract(parent, Context())
        span = self._requests.start_span(
            name, context, SpanKind.SERVER, dict(attributes), start_time=arrival_ns + clock_ns
        )
        return _SdkSpan(self._requests, span, wire, clock_ns) if span.is_recording() else None

    def batch_ended(
        self, dispatch: Dispatch, started_ns: int, ended_ns: int, result: BatchResult | EngineFailure
    ) -> BatchTrace | None:
        """As in `Tracing`. A trace of its own, linked to the requests' spans."""
        links = [Link(_context_of(one.trace)) for one in dispatch.requests if one.trace is not None]
        if not links:
            return None
        clock_ns, samples = _wall_ahead_ns(), dispatch.samples
        attributes = {
            **_model_attributes(dispatch.key),
            "convoy.device": dispatch.lane.device,
            "convoy.batch.requests": len(dispatch.requests),
            "convoy.batch.samples": samples,
            "convoy.batch.computed_samples": max(samples, dispatch.lane.padded(samples)),
        }
        span = self._batches.start_span(
            "batch", Context(), attributes=attributes, links=links, start_time=started_ns + clock_ns
        )
        if isinstance(result, BatchResult):
            stages = batch_stages(started_ns, result.times)
            # After this iteration of the loop, in which the answers are delivered.
            asyncio.get_running_loop().call_soon(_end_with, self._batches, span, stages, clock_ns)
        else:
            span.set_attribute("error.type", result.scope.value)
            span.set_status(Status(StatusCode.ERROR, str(result)))
            span.end(ended_ns + clock_ns)
        return BatchTrace(_traceparent(span.get_span_context()), started_ns)

    def close(self, within_s: float) -> None:
        """Send the spans that have ended, for at most `within_s`. Can be called twice."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(within_s)


class _SdkSpan(RequestSpan):
    """The SDK's span of a call; `clock_ns` is how far its clock is ahead of CLOCK_MONOTONIC."""

    def __init__(self, tracer: Tracer, span: Span, wire: TracedWire, clock_ns: int) -> None:
        context = span.get_span_context()
        super().__init__(_traceparent(context), context.trace_state.to_header())
        self._tracer, self._span, self._clock_ns, self._wire = tracer, span, clock_ns, wire

    def end(self, key: ModelKey | None, ending: CallEnd, answered_ns: int, ended_ns: int) -> None:
        span, status = self._span, self.status
        if answered_ns:
            self.stages.append(SpanStage("encode", answered_ns, ended_ns))
        span.set_attribute("convoy.outcome", ending.outcome.value)
        if ending.reason:
            span.set_attribute("convoy.reason", str(ending.reason))
        if key is not None:
            span.set_attributes(_model_attributes(key))
        if status is not None:
            span.set_attribute(_STATUS[self._wire], status)
        if self._is_error(status) or ending.outcome is CallOutcome.FAILED:
            span.set_attribute("error.type", str(ending.reason or ending.outcome))
            span.set_status(Status(StatusCode.ERROR))
        for batch in self.batches:
            span.add_link(_context_of(batch.traceparent))
        _add_stages(self._tracer, span, self.stages, self._clock_ns)
        span.end(ended_ns + self._clock_ns)

    def _is_error(self, status: int | None) -> bool:
        return status is not None and (status >= 500 if self._wire == "http" else status in _GRPC_ERRORS)


def start() -> SdkTracing:
    """Export spans to where the variables say. Raises UsageError for an unknown protocol."""
    protocol = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL)
    module = _EXPORTERS.get(protocol or "grpc")
    if module is None:
        raise UsageError(f"{OTEL_EXPORTER_OTLP_PROTOCOL} must be {' or '.join(_EXPORTERS)}, got {str(protocol)[:40]!r}")
    exporter: SpanExporter = import_module(module).OTLPSpanExporter()
    return SdkTracing(exporter)


def _resource() -> Resource:
    """As the variables name it; `convoy` if they name no service."""
    process: dict[str, str | int] = {"process.pid": os.getpid(), SERVICE_VERSION: VERSION}
    named = Resource.create(process)
    is_named = not str(named.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service")
    return named if is_named else Resource.create({**process, SERVICE_NAME: "convoy"})


def _add_stages(tracer: Tracer, span: Span, stages: Iterable[SpanStage], clock_ns: int) -> None:
    within = set_span_in_context(span, Context())
    for name, start_ns, end_ns in stages:
        tracer.start_span(name, within, start_time=start_ns + clock_ns).end(end_ns + clock_ns)


def _end_with(tracer: Tracer, span: Span, stages: Sequence[SpanStage], clock_ns: int) -> None:
    _add_stages(tracer, span, stages, clock_ns)
    span.end(stages[-1].end_ns + clock_ns)


def _model_attributes(key: ModelKey) -> dict[str, Any]:
    return {"convoy.model.name": key.model, "convoy.model.version": str(key.version)}


def _wall_ahead_ns() -> int:
    """How far the wall clock is ahead of CLOCK_MONOTONIC now."""
    return time.time_ns() - time.monotonic_ns()


def _traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _context_of(traceparent: str) -> SpanContext:
    """Parse what `_traceparent` wrote."""
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
