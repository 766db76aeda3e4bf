"""A collector of spans, made of the protocol's own stubs: OTLP over gRPC, and over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.support.grpc_calls import answering
from tests.support.played_http import Asked, playing
from tests.support.servers import wait_until

_BATCH = ("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds


class Received:
    """One span, with what its process said of itself."""

    def __init__(self, span: Any, resource: Any) -> None:
        self.name: str = span.name
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.kind: int = span.kind
        self.start_ns, self.end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
        self.is_error = span.status.code == 2
        self.trace_state: str = span.trace_state
        self.attributes = _plain(span.attributes)
        self.resource = _plain(resource.attributes)

    @property
    def ns(self) -> int:
        return int(self.end_ns - self.start_ns)

    @property
    def where(self) -> tuple[str, str]:
        """As a link names it."""
        return self.trace_id, self.span_id


class SpanReceiver(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Keeps all that comes."""

    def __init__(self) -> None:
        self._spans: list[Received] = []
        self._lock = threading.Lock()
        self.environment: dict[str, str] = {}

    def Export(self, request: Any, context: grpc.ServicerContext | None) -> Any:  # noqa: N802 - the stubs' name
        with self._lock:
            for group in request.resource_spans:
                for scope in group.scope_spans:
                    self._spans += [Received(span, group.resource) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Received]:
        with self._lock:
            return [*self._spans]

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def below(self, parent: Received) -> list[Received]:
        """In the order of their beginnings."""
        found = [span for span in self.spans if (span.trace_id, span.parent_id) == parent.where]
        return sorted(found, key=lambda span: span.start_ns)

    def await_request(self, trace_id: str) -> Received:
        """The span of the request in this trace, once it and its batch have come."""

        def found() -> Received | None:
            one = next((span for span in self.spans if span.trace_id == trace_id and span.kind == 2), None)
            return one if one is not None and all(self.find(*link) for link in one.links) else None

        span: Received = wait_until(found, f"the span of trace {trace_id} has come")
        return span

    def find(self, trace_id: str, span_id: str) -> Received | None:
        return next((span for span in self.spans if span.where == (trace_id, span_id)), None)


@contextmanager
def receiving() -> Iterator[SpanReceiver]:
    """Over gRPC; `environment` leads a server there."""
    receiver = SpanReceiver()
    with answering(receiver, trace_service_pb2_grpc.add_TraceServiceServicer_to_server) as address:
        receiver.environment = dict([_BATCH, ("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")])
        yield receiver


@contextmanager
def receiving_over_http() -> Iterator[SpanReceiver]:
    receiver = SpanReceiver()

    def answer(asked: Asked) -> tuple[int, dict[str, str], bytes]:
        assert asked.path == "/v1/traces"
        reply = receiver.Export(trace_service_pb2.ExportTraceServiceRequest.FromString(asked.body), None)
        return 200, {}, reply.SerializeToString()

    with playing(answer) as url:
        receiver.environment = {
            **dict([_BATCH]),
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        }
        yield receiver


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
