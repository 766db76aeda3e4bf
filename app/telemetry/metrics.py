"""Every metric that Convoy exports, its name, its labels and its buckets.

One registry per core. Label values come only from what is loaded, so their number is bounded; a request
for a model that does not exist is counted under an empty model.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from convoy.app.engines.base import WarmShapes
from convoy.app.scheduling.request import SECOND_NS, ModelKey
from convoy.app.telemetry.histograms import Distribution, Histogram
from convoy.app.telemetry.last_minute import BATCH_STAGES, STAGES, MinuteCounts
from convoy.app.telemetry.outcomes import CallEnd, CallOutcome, Refusal
from convoy.app.telemetry.ran_batches import RanBatches
from convoy.app.telemetry.statistics import ModelStatistics, Observed, shapes_of
from convoy.app.telemetry.tracing import Exemplar

LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_MODEL = ("model", "version")
_OPENMETRICS = "application/openmetrics-text"
CanaryResult = Literal["passed", "failed", "hung"]
PlanResult = Literal["serves", "not_built", "not_proved", "not_faster"]
LoadResult = Literal["loaded", "refused"]


class ModelMeters:
    """The series of one version, found once: finding them costs more than adding to them."""

    def __init__(self, metrics: Metrics, labels: tuple[str, str]) -> None:
        self._calls = lru_cache(maxsize=None)(partial(metrics.calls_of, *labels))
        self._stages = {stage: metrics.stage.at(*labels, stage) for stage in STAGES if stage != "total"}
        self._batch = metrics.batch.at(*labels)
        self._padding = metrics.padding.labels(*labels)

    def calls_ended(self, protocol: str, ending: CallEnd, took_ns: Sequence[int]) -> None:
        """Some calls ended alike, each after one of `took_ns`."""
        requests, durations = self._calls(protocol, ending)
        requests.inc(len(took_ns))
        durations.observe(*took_ns)

    def stage_took(self, stage: str, took_ns: Iterable[int]) -> None:
        self._stages[stage].observe(*took_ns)

    def batches_ran(self, ran: RanBatches) -> None:
        self._batch.observe(*ran.samples)
        if ran.padding:
            self._padding.inc(ran.padding)
        for stage, each_ns in zip(BATCH_STAGES, (ran.copy_in_ns, ran.compute_ns, ran.copy_out_ns), strict=True):
            self.stage_took(stage, each_ns)
        self.stage_took("queue", ran.queued_ns)


class Metrics:
    """The metrics of one core."""

    def __init__(self, version: str) -> None:
        # What has not been counted yet is counted before anything is read: it is the registry's first collector.
        self.before_looking: Callable[[], None] = lambda: None
        self.registry = registry = CollectorRegistry()
        registry.register(_Collects(self._count_first))
        self.requests = Counter(
            "convoy_requests", "Requests by how they ended", (*_MODEL, "protocol", "outcome"), registry=registry
        )
        self.calls = Histogram(
            "convoy_call_duration_seconds",
            "From the arrival of the headers to the end of a call, by how it ended",
            (*_MODEL, "protocol", "outcome"),
            LATENCY_BUCKETS_S,
            per_unit=SECOND_NS,
        )
        self.stage = Histogram(
            "convoy_stage_duration_seconds",
            "Time in one stage: decode_wait, decode, queue, encode per request, copy_in, compute, copy_out per batch",
            (*_MODEL, "stage"),
            LATENCY_BUCKETS_S,
            per_unit=SECOND_NS,
        )
        self.batch = Histogram("convoy_batch_size", "Samples per batch", _MODEL, (1, 2, 4, 8, 16, 32, 64, 128, 256))
        for collector in (self.calls, _Collects(self._request_durations), self.stage, self.batch):
            registry.register(collector)
        self.padding = Counter(
            "convoy_padding_samples", "Samples computed only to fill a batch", _MODEL, registry=registry
        )
        self._depth = Gauge("convoy_queue_depth", "Samples that wait", _MODEL, registry=registry)
        self._rejected = Counter("convoy_rejected", "Requests turned away, by reason", ("reason",), registry=registry)
        self._canaries = Counter(
            "convoy_canary_runs", "Canaries of engines at work, by result", (*_MODEL, "result"), registry=registry
        )
        self._losses = Counter("convoy_engine_losses", "Engines that could run nothing more", _MODEL, registry=registry)
        self._replacements = Counter(
            "convoy_engine_replacements", "Lost engines that were loaded again", _MODEL, registry=registry
        )
        told = "Plans wanted beside the serving, by what became of them"
        self._plans = Counter("convoy_plans", told, (*_MODEL, "result"), registry=registry)
        self._loads = Counter("convoy_loads", "Versions that were loaded or refused", ("result",), registry=registry)
        # A rate knows only how a series went on: what is rare and has an alert begins with zero, before the first time.
        for reason in Refusal:
            self._rejected.labels(reason)
        for result in get_args(LoadResult):
            self._loads.labels(result)
        self._device_ns = Tally[str]()
        registry.register(_Collects(self._device_seconds))
        Gauge("convoy_build_info", "The version of Convoy", ("version",), registry=registry).labels(version).set(1)
        self._meters: dict[ModelKey, ModelMeters] = {}
        self._watched = set[tuple[str, str]]()
        # Of the last minute.
        self._refusals, self._strangers, self._computed_ns = MinuteCounts(), MinuteCounts(), MinuteCounts()

    def refusals(self) -> MinuteCounts:
        """Of the whole server, by reason."""
        self.before_looking()
        return self._refusals

    def strangers(self) -> MinuteCounts:
        """Calls for no model, by outcome."""
        self.before_looking()
        return self._strangers

    def computed_ns(self) -> MinuteCounts:
        """Nanoseconds of compute by device."""
        self.before_looking()
        return self._computed_ns

    def watch(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """A gauge of the whole server, read at every scrape."""
        Gauge(name, documentation, registry=self.registry).set_function(read)

    def watch_model(self, served: Observed, waiting: Callable[[], int]) -> None:
        """Start the series of a model that is now served."""
        labels = _labels(served)
        self._watched.add(labels)
        self._depth.labels(*labels).set_function(waiting)
        for counter in (self._losses, self._replacements):
            counter.labels(*labels)
        for counter, results in ((self._canaries, CanaryResult), (self._plans, PlanResult)):
            for result in get_args(results):
                counter.labels(*labels, result)

    def forget_model(self, served: Observed) -> None:
        """End every series of a version that has left, so that the labels stay bounded by what is loaded."""
        self._watched.discard(_labels(served))
        life = self._canaries, self._losses, self._replacements, self._plans
        for series in (self.requests, self.padding, self._depth, *life):
            series.remove_by_labels(_model(served))
        for histogram in (self.calls, self.stage, self.batch):
            histogram.forget(*_labels(served))

    def forget_meters(self, served: Observed) -> None:
        """Nothing more will be counted for this load of a version; its series go on with the next one's."""
        self._meters.pop(served.key, None)

    def of(self, served: Observed) -> ModelMeters:
        """The series of a version, whose series exist from now on."""
        found = self._meters.get(served.key)
        if found is None:
            found = self._meters[served.key] = ModelMeters(self, _labels(served))
        return found

    def calls_of(self, model: str, version: str, protocol: str, ending: CallEnd) -> tuple[Counter, Distribution]:
        """The series of calls that ended alike."""
        word = _WORDS_OF_REQUESTS.get(ending.outcome, str(ending.outcome))
        requests = self.requests.labels(model, version, protocol, "failed" if ending.reason in _ONCE_FAILED else word)
        return requests, self.calls.at(model, version, protocol, ending.outcome)

    def strangers_ended(self, protocol: str, ending: CallEnd, took_ns: Sequence[int], second: int) -> None:
        """Calls ended for which no model was found, in this second of the monotonic clock."""
        self._strangers.add(ending.outcome.value, len(took_ns), second)
        requests, durations = self.calls_of("", "", protocol, ending)
        requests.inc(len(took_ns))
        durations.observe(*took_ns)

    def rejected(self, reason: str, count: int, second: int) -> None:
        """`count` were turned away, in this second of the monotonic clock."""
        self._refusals.add(str(reason), count, second)
        self._rejected.labels(reason).inc(count)

    def batches_ran(self, served: Observed, ran: RanBatches, second: int) -> None:
        """Some of a version ran, in this second of the monotonic clock."""
        self.of(served).batches_ran(ran)
        for device, ns in ran.compute_ns_by_device.items():
            self._computed_ns.add(device, ns, second)
            self._device_ns[device] += ns

    def canary_ran(self, served: Observed, result: CanaryResult) -> None:
        self._count(self._canaries, served, result)

    def engine_lost(self, served: Observed) -> None:
        self._count(self._losses, served)

    def engine_replaced(self, served: Observed) -> None:
        self._count(self._replacements, served)

    def plan_tried(self, served: Observed, result: PlanResult) -> None:
        self._count(self._plans, served, result)

    def load_ended(self, result: LoadResult) -> None:
        self._loads.labels(result).inc()

    def _count(self, counter: Counter, served: Observed, *result: str) -> None:
        labels = _labels(served)
        if labels in self._watched:  # else it has left, and what was still at work for it ends now
            counter.labels(*labels, *result).inc()

    def exemplify(self, served: Observed, exemplar: Exemplar) -> None:
        """A call of this version that was counted has a span, and so have its stages."""
        labels, where = _labels(served), {"trace_id": exemplar.trace_id, "span_id": exemplar.span_id}
        self.calls.at(*labels, exemplar.protocol, exemplar.ending.outcome).exemplify(exemplar.took_ns, where)
        for stage, ns in exemplar.stages_ns:
            self.stage.at(*labels, stage).exemplify(ns, where)

    def _count_first(self) -> Iterable[Metric]:
        """No series, but the first that the registry asks for."""
        self.before_looking()
        return ()

    def _request_durations(self) -> Iterable[Metric]:
        """Every call to a model, however it ended, under a name that goes with the next version."""
        name, text = "convoy_request_duration_seconds", "All of convoy_call_duration_seconds together; use that"
        family = self.calls.family(name, text, len(_MODEL))
        family.samples = [one for one in family.samples if one.labels["model"]]  # it never knew any others
        return [family]

    def _device_seconds(self) -> Iterable[Metric]:
        told = "Compute of all batches; above a second a second where they run beside each other"
        family = CounterMetricFamily("convoy_device_compute_seconds", told, labels=("device",))
        for device, ns in self._device_ns.items():
            family.add_metric((device,), ns / SECOND_NS)
        return [family]

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def render_for(self, accept: str) -> tuple[bytes, str]:
        """All of them, and their content type: as OpenMetrics, with exemplars, for a client that accepts that."""
        if _OPENMETRICS not in accept:
            return self.render(), "text/plain; version=0.0.4; charset=utf-8"
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _Collects(Collector):
    """Collects what a function returns."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


class EngineMetrics(Collector):
    """Which engine serves a model and why: 1. Why others do not: 0, and the reason names them."""

    def __init__(self, served: Callable[[], Iterable[Observed]]) -> None:
        self._served = served

    def collect(self) -> Iterable[Metric]:
        told = "Which engine serves a model (1), why, and why others do not (0)"
        engines = Metric("convoy_engine_info", told, "gauge")

        def add(served: Observed, engine: str, precision: str, device: str, reason: str, value: int) -> None:
            about = {"engine": engine, "precision": precision, "device": device, "reason": reason}
            engines.add_sample(engines.name, _model(served) | about, value)

        for served in self._served():
            for one in served.listed:
                add(served, one.info.engine, one.info.precision, one.info.device, one.reason, 1)
            for reason in dict.fromkeys(served.loaded.skipped):
                add(served, "", "", "", reason, 0)
        return [engines]


class ShapeMetrics(Collector):
    """What the engines of models with free sizes hold for these, read at every scrape."""

    def __init__(self, served: Callable[[], Iterable[Observed]]) -> None:
        self._served = served

    def collect(self) -> Iterable[Metric]:
        families = {name: Metric(name, told, "gauge") for name, told, _ in _SHAPES}
        for served in self._served():
            if (held := shapes_of(served.listed)) is None:
                continue
            for name, _, read in _SHAPES:
                families[name].add_sample(name, _model(served), read(held))
        return families.values()


_SHAPES: tuple[tuple[str, str, Callable[[WarmShapes], float]], ...] = (
    ("convoy_warm_shapes", "Shapes that it is kept of how they run", lambda s: s.warm),
    ("convoy_warm_shapes_limit", "The most of them; then they begin anew", lambda s: s.limit),
    ("convoy_shape_buffer_bytes", "Memory that batches of free sizes lie in", lambda s: s.buffer_bytes),
    ("convoy_shape_buffer_limit_bytes", "The most that is kept of it", lambda s: s.buffer_limit_bytes),
)


class TritonMetrics(Collector):
    """Triton's metric names over our statistics, for dashboards that already exist.

    Their counters have no `_total` suffix, which the client library's own counters always add; so they
    are exported untyped under the exact names.
    """

    def __init__(self, served: Callable[[], Iterable[Observed]], waiting: Callable[[ModelKey], int]) -> None:
        self._served = served
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        failures = Metric("nv_inference_request_failure", "Number of failed requests", "unknown")
        load = Metric("nv_model_load_duration_secs", "Model load time", "gauge")
        pending = Metric("nv_inference_pending_request_count", "Samples waiting", "gauge")
        counters = {name: Metric(name, help_text, "unknown") for name, help_text, _ in _TRITON_COUNTERS}
        for served in self._served():
            labels = _model(served)
            for name, _, read in _TRITON_COUNTERS:
                counters[name].add_sample(name, labels, read(served.statistics))
            for reason, count in served.statistics.failures_by_reason.items():
                failures.add_sample(failures.name, {**labels, "reason": reason}, count)
            load.add_sample(load.name, labels, served.loaded.load_s)
            pending.add_sample(pending.name, labels, self._waiting(served.key))
        return [*counters.values(), failures, load, pending]


_TRITON_COUNTERS: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    ("nv_inference_request_success", "Number of successful requests", lambda s: s.success.count),
    ("nv_inference_count", "Number of samples inferred", lambda s: s.inference_count),
    ("nv_inference_exec_count", "Number of batches run", lambda s: s.execution_count),
    ("nv_inference_request_duration_us", "Cumulative request time", lambda s: s.success.ns / 1e3),
    ("nv_inference_queue_duration_us", "Cumulative queue time", lambda s: s.queue.ns / 1e3),
    ("nv_inference_compute_input_duration_us", "Cumulative input time", lambda s: s.compute.compute_input.ns / 1e3),
    ("nv_inference_compute_infer_duration_us", "Cumulative compute time", lambda s: s.compute.compute_infer.ns / 1e3),
    ("nv_inference_compute_output_duration_us", "Cumulative output time", lambda s: s.compute.compute_output.ns / 1e3),
)


# The words of `convoy_requests_total` are older than the outcomes, and stay for one version.
_WORDS_OF_REQUESTS = {
    CallOutcome.ANSWERED: "success",
    CallOutcome.REFUSED: "rejected",
    CallOutcome.LATE: "deadline_exceeded",
}
_ONCE_FAILED = frozenset((Refusal.DRAINING, Refusal.NOT_READY))


def _labels(served: Observed) -> tuple[str, str]:
    return served.key.model, str(served.key.version)


def _model(served: Observed) -> dict[str, str]:
    return dict(zip(_MODEL, _labels(served), strict=True))
