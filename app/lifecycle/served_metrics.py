"""Metrics of what is served now, read at every scrape: engines, memory for dynamic sizes, and Triton's names.

`telemetry/metrics.py` counts requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import add

from prometheus_client.core import Metric

from convoy.app.engines.base import WarmShapes
from convoy.app.engines.table import AUTO
from convoy.app.lifecycle.catalog import Catalog, Served
from convoy.app.loading.proving import ProvedEngine
from convoy.app.scheduling.request import ModelKey
from convoy.app.telemetry.statistics import ModelStatistics


def engine_metrics(catalog: Catalog) -> Iterable[Metric]:
    """The engines that serve, with a code for the reason; `/stats` has the sentence."""
    engines = Metric("convoy_engine_info", "Engines that serve a model, always 1", "gauge")
    for served in catalog.served():
        for one in served.listed:
            info = one.info
            about = {
                "engine": info.engine,
                "precision": info.precision,
                "device": info.device,
                "reason": _code(served, one),
            }
            engines.add_sample(engines.name, _model(served) | about, 1)
    return [engines]


def _code(served: Served, one: ProvedEngine) -> str:
    """The reason as one of a few stable codes, for a label."""
    if any(wish.device.name == one.info.device for wish in served.loaded.wishes):
        return "fallback_while_building"
    if served.options.precision != "auto" or served.options.engine != AUTO:
        return "forced"
    return one.code


def shapes_of(engines: Iterable[ProvedEngine]) -> WarmShapes | None:
    """What these engines keep for dynamic sizes together; None if the sizes are fixed."""
    held = [shapes for engine in engines if (shapes := engine.shapes) is not None]
    return reduce(add, held) if held else None


def shape_metrics(catalog: Catalog) -> Iterable[Metric]:
    """What the engines of models with dynamic sizes keep."""
    families = {name: Metric(name, told, "gauge") for name, told, _ in _SHAPES}
    for served in catalog.served():
        if (held := shapes_of(served.listed)) is not None:
            for name, _, read in _SHAPES:
                families[name].add_sample(name, _model(served), read(held))
    return families.values()


_SHAPES: tuple[tuple[str, str, Callable[[WarmShapes], float]], ...] = (
    ("convoy_warm_shapes", "Shapes whose execution setup is cached", lambda s: s.warm),
    ("convoy_warm_shapes_limit", "Most shapes cached; then the cache is cleared", lambda s: s.limit),
    ("convoy_shape_buffer_bytes", "Memory for batches of variable shapes", lambda s: s.buffer_bytes),
    ("convoy_shape_buffer_limit_bytes", "Most of that memory that is kept", lambda s: s.buffer_limit_bytes),
)


def triton_metrics(catalog: Catalog, waiting: Callable[[ModelKey], int]) -> Iterable[Metric]:
    """Triton's metric names over our statistics, for existing dashboards.

    Their counters have no `_total` suffix, which the client library always adds to counters; so they are exported
    untyped under the exact names.
    """
    failures = Metric("nv_inference_request_failure", "Number of failed requests", "unknown")
    load = Metric("nv_model_load_duration_secs", "Model load time", "gauge")
    pending = Metric("nv_inference_pending_request_count", "Samples waiting", "gauge")
    counters = {name: Metric(name, help_text, "unknown") for name, help_text, _ in _TRITON_COUNTERS}
    for served in catalog.served():
        labels = _model(served)
        for name, _, read in _TRITON_COUNTERS:
            counters[name].add_sample(name, labels, read(served.statistics))
        for reason, count in served.statistics.failures_by_reason.items():
            failures.add_sample(failures.name, {**labels, "reason": reason}, count)
        load.add_sample(load.name, labels, served.loaded.load_s)
        pending.add_sample(pending.name, labels, waiting(served.key))
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


def _model(served: Served) -> dict[str, str]:
    return {"model": served.key.model, "version": str(served.key.version)}
