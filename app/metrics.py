"""Every metric that Convoy exports, its name, its labels and its buckets.

One registry per core. Label values come only from what is loaded, so their number is bounded; a request
for a model that does not exist is counted under an empty model. Labelled children are looked up once per
model, because the lookup costs more than the increment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from app.catalog import Served
from app.histograms import Histogram
from app.proving import ProvedEngine
from app.scheduling.request import StageTimes

_LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MODEL = ("model", "version")


class Metrics:
    """The metrics of one core."""

    def __init__(self, version: str) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "convoy_requests", "Requests by how they ended", (*_MODEL, "protocol", "outcome"), registry=registry
        )
        self._duration = Histogram(
            "convoy_request_duration_seconds",
            "From the arrival of the headers to the answer",
            _MODEL,
            _LATENCY_BUCKETS_S,
        )
        self._stage = Histogram(
            "convoy_stage_duration_seconds",
            "Time in one stage: decode, queue and encode per request, copy_in, compute and copy_out per batch",
            (*_MODEL, "stage"),
            _LATENCY_BUCKETS_S,
        )
        self._batch = Histogram("convoy_batch_size", "Samples per batch", _MODEL, _BATCH_BUCKETS)
        for histogram in (self._duration, self._stage, self._batch):
            registry.register(histogram)
        self._padding = Counter(
            "convoy_padding_samples", "Samples computed only to fill a batch", _MODEL, registry=registry
        )
        self._depth = Gauge("convoy_queue_depth", "Samples that wait", _MODEL, registry=registry)
        self._inflight = Gauge("convoy_inflight_bytes", "Bytes of memory held by requests", registry=registry)
        self._rejected = Counter("convoy_rejected", "Requests turned away, by reason", ("reason",), registry=registry)
        Gauge("convoy_build_info", "The version of Convoy", ("version",), registry=registry).labels(version).set(1)
        # Looked up once per model, not once per request; as many entries as there are label values.
        self._request_child = lru_cache(maxsize=None)(self._requests.labels)

    def watch_inflight_bytes(self, read: Callable[[], int]) -> None:
        self._inflight.set_function(read)

    def watch_model(self, served: Served, waiting: Callable[[], int]) -> None:
        """Start the series of a model that is now served."""
        self._depth.labels(*_labels(served)).set_function(waiting)

    def forget_model(self, served: Served) -> None:
        """End every series of a version that has left, so that the labels stay bounded by what is loaded."""
        own = dict(zip(_MODEL, _labels(served), strict=True))
        for series in (self._requests, self._padding, self._depth):
            series.remove_by_labels(own)
        for histogram in (self._duration, self._stage, self._batch):
            histogram.forget(*_labels(served))
        self._request_child.cache_clear()

    def requests_ended(self, served: Served | None, protocol: str, outcome: str, took_ns: Sequence[int]) -> None:
        """Some requests ended alike, each after so many nanoseconds."""
        labels = ("", "") if served is None else _labels(served)
        self._request_child(*labels, protocol, outcome).inc(len(took_ns))
        if served is not None:
            self._duration.at(*labels).observe_all([ns / 1e9 for ns in took_ns])

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def stage(self, served: Served, stage: str, took_ns: Iterable[int]) -> None:
        self._stage.at(*_labels(served), stage).observe_all([ns / 1e9 for ns in took_ns])

    def batch_ran(self, served: Served, samples: int, padded: int, times: StageTimes) -> None:
        labels = _labels(served)
        self._batch.at(*labels).observe(samples)
        if padded > samples:
            self._padding.labels(*labels).inc(padded - samples)
        self.stage(served, "copy_in", (times.copy_in_ns,))
        self.stage(served, "compute", (times.compute_ns,))
        self.stage(served, "copy_out", (times.copy_out_ns,))

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class EngineMetrics(Collector):
    """Which engine serves a model and why: 1. Why others do not: 0, and the reason names them."""

    def __init__(self, served: Callable[[], list[Served]]) -> None:
        self._served = served

    def collect(self) -> Iterable[Metric]:
        engines = Metric(
            "convoy_engine_info", "Which engine serves a model (1), why, and why others do not (0)", "gauge"
        )
        for served in self._served():
            for one in served.lanes:
                if one.is_listed:
                    engines.add_sample(engines.name, _engine_labels(served, one.proved), 1)
            for reason in dict.fromkeys(served.loaded.skipped):
                engines.add_sample(engines.name, _passed_over_labels(served, reason), 0)
        return [engines]


class TritonMetrics(Collector):
    """Triton's metric names over our statistics, for dashboards that already exist.

    Their counters have no `_total` suffix, which the client library's own counters always add; so they
    are exported untyped under the exact names.
    """

    def __init__(self, served: Callable[[], list[Served]], waiting: Callable[[Served], int]) -> None:
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
            pending.add_sample(pending.name, labels, self._waiting(served))
        return [*counters.values(), failures, load, pending]


_TRITON_COUNTERS: tuple[tuple[str, str, Callable[[Served], float]], ...] = (
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


def _labels(served: Served) -> tuple[str, str]:
    return served.key.model, str(served.key.version)


def _engine_labels(served: Served, proved: ProvedEngine) -> dict[str, str]:
    info = proved.engine.info
    about = {"engine": info.engine, "precision": info.precision, "device": info.device, "reason": proved.reason}
    return dict(zip(_MODEL, _labels(served), strict=True)) | about


def _passed_over_labels(served: Served, reason: str) -> dict[str, str]:
    about = {"engine": "", "precision": "", "device": "", "reason": reason}
    return dict(zip(_MODEL, _labels(served), strict=True)) | about
