"""Every metric that Convoy exports, its name, its labels and its buckets.

One registry per core. Label values come only from what is loaded, so their number is bounded; a request
for a model that does not exist is counted under an empty model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from convoy.app.batch import StageTimes
from convoy.app.scheduling.request import SECOND_NS, ModelKey
from convoy.app.telemetry.histograms import Histogram
from convoy.app.telemetry.observed import Observed, ObservedEngine
from convoy.app.telemetry.statistics import STAGES

_LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MODEL = ("model", "version")
_BATCH_STAGES = ("copy_in", "compute", "copy_out")


class ModelMeters:
    """The series of one version, found once: finding them costs more than adding to them."""

    def __init__(self, metrics: Metrics, labels: tuple[str, str]) -> None:
        self._calls_by_labels = lru_cache(maxsize=None)(partial(metrics.requests.labels, *labels))
        self._duration = metrics.duration.at(*labels)
        self._stages = {stage: metrics.stage.at(*labels, stage) for stage in STAGES if stage != "total"}
        self._copy_in, self._compute, self._copy_out = (self._stages[stage] for stage in _BATCH_STAGES)
        self._batch = metrics.batch.at(*labels)
        self._padding = metrics.padding.labels(*labels)

    def calls_ended(self, protocol: str, outcome: str, took_ns: Sequence[int]) -> None:
        """Some calls ended alike, each after so many nanoseconds."""
        self._calls_by_labels(protocol, outcome).inc(len(took_ns))
        self._duration.observe(*took_ns)

    def stage_took(self, stage: str, took_ns: Iterable[int]) -> None:
        self._stages[stage].observe(*took_ns)

    def batch_ran(self, samples: int, padded: int, times: StageTimes, queued_ns: Iterable[int]) -> None:
        """One batch; `queued_ns` are its requests'."""
        self._batch.observe(samples)
        if padded > samples:
            self._padding.inc(padded - samples)
        self._copy_in.observe(times.copy_in_ns)
        self._compute.observe(times.compute_ns)
        self._copy_out.observe(times.copy_out_ns)
        self._stages["queue"].observe(*queued_ns)


class Metrics:
    """The metrics of one core."""

    def __init__(self, version: str) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "convoy_requests", "Requests by how they ended", (*_MODEL, "protocol", "outcome"), registry=registry
        )
        self.duration = Histogram(
            "convoy_request_duration_seconds",
            "From the arrival of the headers to the answer",
            _MODEL,
            _LATENCY_BUCKETS_S,
            per_unit=SECOND_NS,
        )
        self.stage = Histogram(
            "convoy_stage_duration_seconds",
            "Time in one stage: decode, queue and encode per request, copy_in, compute and copy_out per batch",
            (*_MODEL, "stage"),
            _LATENCY_BUCKETS_S,
            per_unit=SECOND_NS,
        )
        self.batch = Histogram("convoy_batch_size", "Samples per batch", _MODEL, _BATCH_BUCKETS)
        for histogram in (self.duration, self.stage, self.batch):
            registry.register(histogram)
        self.padding = Counter(
            "convoy_padding_samples", "Samples computed only to fill a batch", _MODEL, registry=registry
        )
        self._depth = Gauge("convoy_queue_depth", "Samples that wait", _MODEL, registry=registry)
        self._inflight = Gauge("convoy_inflight_bytes", "Bytes of memory held by requests", registry=registry)
        self._rejected = Counter("convoy_rejected", "Requests turned away, by reason", ("reason",), registry=registry)
        Gauge("convoy_build_info", "The version of Convoy", ("version",), registry=registry).labels(version).set(1)
        self._meters: dict[ModelKey, ModelMeters] = {}

    def watch_inflight_bytes(self, read: Callable[[], int]) -> None:
        self._inflight.set_function(read)

    def watch_model(self, served: Observed, waiting: Callable[[], int]) -> None:
        """Start the series of a model that is now served."""
        self._depth.labels(*_labels(served)).set_function(waiting)

    def forget_model(self, served: Observed) -> None:
        """End every series of a version that has left, so that the labels stay bounded by what is loaded."""
        own = dict(zip(_MODEL, _labels(served), strict=True))
        for series in (self.requests, self.padding, self._depth):
            series.remove_by_labels(own)
        for histogram in (self.duration, self.stage, self.batch):
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

    def strangers_ended(self, protocol: str, outcome: str, count: int) -> None:
        """Calls ended for which no model was found."""
        self.requests.labels("", "", protocol, outcome).inc(count)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class EngineMetrics(Collector):
    """Which engine serves a model and why: 1. Why others do not: 0, and the reason names them."""

    def __init__(self, served: Callable[[], Iterable[Observed]]) -> None:
        self._served = served

    def collect(self) -> Iterable[Metric]:
        engines = Metric(
            "convoy_engine_info", "Which engine serves a model (1), why, and why others do not (0)", "gauge"
        )
        for served in self._served():
            for one in served.listed:
                engines.add_sample(engines.name, _engine_labels(served, one), 1)
            for reason in dict.fromkeys(served.loaded.skipped):
                engines.add_sample(engines.name, _passed_over_labels(served, reason), 0)
        return [engines]


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
            labels = dict(zip(_MODEL, _labels(served), strict=True))
            for name, _, read in _TRITON_COUNTERS:
                counters[name].add_sample(name, labels, read(served))
            for reason, count in served.statistics.failures_by_reason.items():
                failures.add_sample(failures.name, {**labels, "reason": reason}, count)
            load.add_sample(load.name, labels, served.loaded.load_s)
            pending.add_sample(pending.name, labels, self._waiting(served.key))
        return [*counters.values(), failures, load, pending]


_TRITON_COUNTERS: tuple[tuple[str, str, Callable[[Observed], float]], ...] = (
    ("nv_inference_request_success", "Number of successful requests", lambda s: s.statistics.success.count),
    ("nv_inference_count", "Number of samples inferred", lambda s: s.statistics.inference_count),
    ("nv_inference_exec_count", "Number of batches run", lambda s: s.statistics.execution_count),
    ("nv_inference_request_duration_us", "Cumulative request time", lambda s: s.statistics.success.ns / 1e3),
    ("nv_inference_queue_duration_us", "Cumulative queue time", lambda s: s.statistics.queue.ns / 1e3),
    ("nv_inference_compute_input_duration_us", "Cumulative input time", lambda s: s.statistics.compute_input.ns / 1e3),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute time",
        lambda s: s.statistics.compute_infer.ns / 1e3,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative output time",
        lambda s: s.statistics.compute_output.ns / 1e3,
    ),
)


def _labels(served: Observed) -> tuple[str, str]:
    return served.key.model, str(served.key.version)


def _engine_labels(served: Observed, engine: ObservedEngine) -> dict[str, str]:
    info = engine.info
    about = {"engine": info.engine, "precision": info.precision, "device": info.device, "reason": engine.reason}
    return dict(zip(_MODEL, _labels(served), strict=True)) | about


def _passed_over_labels(served: Observed, reason: str) -> dict[str, str]:
    about = {"engine": "", "precision": "", "device": "", "reason": reason}
    return dict(zip(_MODEL, _labels(served), strict=True)) | about
