"""Every metric of Convoy: its name, its labels and its buckets.

One registry per core. Label values come only from what is loaded, so their number is bounded; a request for an unknown
model is counted under an empty model.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from convoy.app.scheduling.request import SECOND_NS, ModelKey
from convoy.app.telemetry.outcomes import CallEnd, CallOutcome, Refusal
from convoy.app.telemetry.statistics import STAGES, BatchRecord, MinuteCounts, Observed
from convoy.app.telemetry.tracing import RequestSpan

LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_MODEL = ("model", "version")
CanaryResult = Literal["passed", "failed", "hung"]
PlanResult = Literal["serves", "not_built", "not_proved", "not_faster"]
LoadResult = Literal["loaded", "refused"]


class Distribution:
    """One series of a histogram: how many values fell at or below each of `bounds` (ascending), or above all of them.

    Values are in units of which `per_unit` make one of the bounds' units.
    """

    def __init__(self, bounds: Sequence[float], per_unit: float) -> None:
        self._bounds = np.array(bounds, np.float64)
        self._per_unit = per_unit
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total: float = 0  # in the values' own unit: integers are added exactly
        self._unsorted: list[float] = []
        self.exemplars: dict[int, Exemplar] = {}  # the last one of a bucket, by its index

    def exemplify(self, value: float, labels: dict[str, str]) -> None:
        """Record the labels of an observed value as an exemplar."""
        in_unit = value / self._per_unit
        self.exemplars[int(np.searchsorted(self._bounds, in_unit))] = Exemplar(labels, in_unit, time.time())

    def observe(self, *values: float) -> None:
        self._unsorted += values
        if len(self._unsorted) > 1024:
            self.sorted()

    def sorted(self) -> tuple[np.ndarray, float]:
        """The number of values by bucket, the last without a bound, and their sum in the bounds' unit."""
        if self._unsorted:
            buckets = np.searchsorted(self._bounds, np.array(self._unsorted, np.float64) / self._per_unit)
            self._counts += np.bincount(buckets, minlength=len(self._counts))
            self._total += sum(self._unsorted)
            self._unsorted = []
        return self._counts, self._total / self._per_unit


class Histogram(Collector):
    """Distributions by label values. Values are in units of which `per_unit` make one of the bounds'.

    The client library's histogram takes a lock per bucket and per sum, which is too slow for a hot path. Everything
    here is counted and rendered on the event loop, so no locks are needed. Values are buffered, and sorted into buckets
    many at a time.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float], *, per_unit: float = 1.0
    ) -> None:
        self._name, self._documentation, self._labels, self._bounds = name, documentation, labels, bounds
        self._per_unit = per_unit
        self._series: dict[tuple[str, ...], Distribution] = {}

    def at(self, *values: str) -> Distribution:
        """The series with these label values; it begins empty."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Distribution(self._bounds, self._per_unit)
        return found

    def forget(self, *first: str) -> None:
        """End every series whose first label values are these."""
        self._series = {key: one for key, one in self._series.items() if key[: len(first)] != first}

    def family(self, name: str, documentation: str, labels: int) -> HistogramMetricFamily:
        """The series for Prometheus; those with the same first `labels` label values are added up."""
        family = HistogramMetricFamily(name, documentation, labels=self._labels[:labels])
        bounds = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        together: defaultdict[tuple[str, ...], list[Distribution]] = defaultdict(list)
        for values, one in self._series.items():
            together[values[:labels]].append(one)
        for values, series in together.items():
            counts, totals = zip(*(one.sorted() for one in series), strict=True)
            buckets: list[Any] = [
                (bound, float(count), _latest([one.exemplars[number] for one in series if number in one.exemplars]))
                for number, (bound, count) in enumerate(zip(bounds, np.sum(counts, axis=0).cumsum(), strict=True))
            ]
            family.add_metric(list(values), buckets, sum(totals))
        return family

    def collect(self) -> Iterable[Metric]:
        return [self.family(self._name, self._documentation, len(self._labels))]


def _latest(exemplars: Sequence[Exemplar]) -> Exemplar | None:
    return max(exemplars, key=lambda one: float(one.timestamp or 0), default=None)


class Metrics:
    """The metrics of one core."""

    def __init__(self, version: str) -> None:
        # The registry's first collector counts pending records before anything is read.
        self.before_looking: Callable[[], None] = lambda: None
        self.registry = registry = CollectorRegistry()
        self.collect(self._count_first)
        self.requests = Counter(
            "convoy_requests", "Requests by outcome", (*_MODEL, "protocol", "outcome"), registry=registry
        )
        self.calls = Histogram(
            "convoy_call_duration_seconds",
            "Time from the arrival of the headers to the end of a call, by outcome",
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
        for collect in (self.calls.collect, self._request_durations, self.stage.collect, self.batch.collect):
            self.collect(collect)
        self.padding = Counter(
            "convoy_padding_samples", "Samples computed only to fill a batch", _MODEL, registry=registry
        )
        self._depth = Gauge("convoy_queue_depth", "Samples waiting", _MODEL, registry=registry)
        self._rejected = Counter("convoy_rejected", "Refused requests by reason", ("reason",), registry=registry)
        self._canaries = Counter(
            "convoy_canary_runs", "Canary runs of serving engines, by result", (*_MODEL, "result"), registry=registry
        )
        self._losses = Counter("convoy_engine_losses", "Engines that failed and stopped", _MODEL, registry=registry)
        self._replacements = Counter(
            "convoy_engine_replacements", "Failed engines that were replaced", _MODEL, registry=registry
        )
        told = "TensorRT plans built or loaded in the background, by result"
        self._plans = Counter("convoy_plans", told, (*_MODEL, "result"), registry=registry)
        self._loads = Counter("convoy_loads", "Versions that were loaded or refused", ("result",), registry=registry)
        # `rate()` needs a first sample: rare events with an alert start at zero.
        for reason in Refusal:
            self._rejected.labels(reason)
        for result in get_args(LoadResult):
            self._loads.labels(result)
        self._device_ns = Tally[str]()
        self.collect(self._device_seconds)
        Gauge("convoy_build_info", "The version of Convoy", ("version",), registry=registry).labels(version).set(1)
        # By model and version: those that are served, and those with any counts.
        self._watched, self._counted = set[tuple[str, str]](), set[tuple[str, str]]()
        # Of the last minute.
        self._refusals, self._strangers, self._computed_ns = (MinuteCounts[str]() for _ in range(3))

    def refusals(self) -> MinuteCounts[str]:
        """Of the whole server, by reason."""
        self.before_looking()
        return self._refusals

    def strangers(self) -> MinuteCounts[str]:
        """Calls for unknown models, by outcome."""
        self.before_looking()
        return self._strangers

    def computed_ns(self) -> MinuteCounts[str]:
        """Nanoseconds of compute by device."""
        self.before_looking()
        return self._computed_ns

    def collect(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add a collector after the existing ones."""
        self.registry.register(_Collects(read))

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
        labels = _labels(served)
        self._watched.discard(labels)
        self._counted.discard(labels)
        life = self._canaries, self._losses, self._replacements, self._plans
        for series in (self.requests, self.padding, self._depth, *life):
            series.remove_by_labels(dict(zip(_MODEL, labels, strict=True)))
        for histogram in (self.calls, self.stage, self.batch):
            histogram.forget(*labels)

    def _begin(self, served: Observed) -> tuple[str, str]:
        """The labels of a version, whose series exist from now on, also empty ones."""
        labels = _labels(served)
        if labels not in self._counted:
            self._counted.add(labels)
            self.batch.at(*labels)
            self.padding.labels(*labels)
            for stage in STAGES:
                if stage != "total":
                    self.stage.at(*labels, stage)
        return labels

    def calls_ended(
        self, served: Observed | None, protocol: str, ending: CallEnd, took_ns: Sequence[int], second: int
    ) -> None:
        """Count calls with equal endings, with their durations `took_ns`, in this second of the monotonic clock.

        `served` is None if no model was found.
        """
        labels = ("", "") if served is None else self._begin(served)
        if served is None:
            self._strangers.add(ending.outcome.value, len(took_ns), second)
        word = "failed" if ending.reason in _ONCE_FAILED else _WORDS_OF_REQUESTS.get(ending.outcome, ending.outcome)
        self.requests.labels(*labels, protocol, word).inc(len(took_ns))
        self.calls.at(*labels, protocol, ending.outcome).observe(*took_ns)

    def stage_took(self, served: Observed, stage: str, took_ns: Iterable[int]) -> None:
        self.stage.at(*self._begin(served), stage).observe(*took_ns)

    def rejected(self, reason: str, count: int, second: int) -> None:
        """Count `count` refusals in this second of the monotonic clock."""
        self._refusals.add(str(reason), count, second)
        self._rejected.labels(reason).inc(count)

    def batches_ran(self, served: Observed, batches: Sequence[BatchRecord], second: int) -> None:
        """Count batches of a version in this second of the monotonic clock."""
        labels = self._begin(served)
        self.batch.at(*labels).observe(*[one.samples for one in batches])
        self.padding.labels(*labels).inc(sum([one.padded - one.samples for one in batches]))
        computed_ns = Tally[str]()
        for one in batches:
            computed_ns[one.device] += one.times.compute_ns
        for device, ns in computed_ns.items():
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
        if labels in self._watched:  # otherwise it has left, and this was its last work
            counter.labels(*labels, *result).inc()

    def exemplify(self, key: ModelKey, protocol: str, ending: CallEnd, took_ns: int, span: RequestSpan) -> None:
        """Record the span of a call of this version, and its stages, as exemplars."""
        labels, where = (key.model, str(key.version)), {"trace_id": span.trace_id, "span_id": span.span_id}
        self.calls.at(*labels, protocol, ending.outcome).exemplify(took_ns, where)
        for stage, ns in span.stages_ns():
            self.stage.at(*labels, stage).exemplify(ns, where)

    def _count_first(self) -> Iterable[Metric]:
        """Has no series; the registry calls it first."""
        self.before_looking()
        return ()

    def _request_durations(self) -> Iterable[Metric]:
        """Every call to a model, however it ended, under a deprecated name."""
        name, text = "convoy_request_duration_seconds", "Deprecated: use convoy_call_duration_seconds"
        family = self.calls.family(name, text, len(_MODEL))
        family.samples = [one for one in family.samples if one.labels["model"]]  # it never had others
        return [family]

    def _device_seconds(self) -> Iterable[Metric]:
        told = "Compute time of all batches; above 1 per second when batches overlap"
        family = CounterMetricFamily("convoy_device_compute_seconds", told, labels=("device",))
        for device, ns in self._device_ns.items():
            family.add_metric((device,), ns / SECOND_NS)
        return [family]

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def render_for(self, accept: str) -> tuple[bytes, str]:
        """All metrics and their content type: OpenMetrics with exemplars, for a client that accepts that."""
        if "application/openmetrics-text" not in accept:
            return self.render(), "text/plain; version=0.0.4; charset=utf-8"
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


def process_metrics(dropped_lines: Callable[[], int]) -> Iterable[Metric]:
    """CPU and memory of this process as Linux counts them, and the number of dropped log lines.

    `process_*`, which every Prometheus client has, and `convoy_process_*` have the same figures; the latter are
    deprecated.
    """
    yield from ProcessCollector(registry=None).collect()
    told = "Log lines dropped because nothing read the log"
    yield CounterMetricFamily("convoy_log_lines_dropped", told, value=dropped_lines())
    for own in ProcessCollector("convoy", registry=None).collect():
        (sample,) = own.samples
        told = f"Deprecated: use {sample.name.removeprefix('convoy_')}"
        family = Metric(own.name, told, own.type)
        family.add_sample(sample.name, {"process": "core"}, sample.value)
        yield family


class _Collects(Collector):
    """Collects what a function returns."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


# The label values of `convoy_requests_total`, which is deprecated, are older than the outcomes.
_WORDS_OF_REQUESTS = {
    CallOutcome.ANSWERED: "success",
    CallOutcome.REFUSED: "rejected",
    CallOutcome.LATE: "deadline_exceeded",
}
_ONCE_FAILED = frozenset((Refusal.DRAINING, Refusal.NOT_READY))


def _labels(served: Observed) -> tuple[str, str]:
    return served.key.model, str(served.key.version)
