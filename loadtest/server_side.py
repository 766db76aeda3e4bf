"""What the server itself says of a run: its own counters, read before and after, and the difference.

Knows two sources: the protocol's statistics extension (Triton's and Convoy's; queue, copies and compute per
request, and how many batches of each size ran) and Convoy's histogram of stages in /metrics (decode_wait,
decode and encode, which the extension does not have). Pure; asking is the client's. A server that has neither is no
error: the report says that it offers nothing.

The difference covers all requests between the two readings, warm-up included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from convoy.loadtest.units import NS_PER_MS, NS_PER_S

# The order in which a request passes them; the extension's names for those that it has.
STAGES = ("decode wait", "decode", "queue", "copy in", "compute", "copy out", "encode")
EXTENSION = {"queue": "queue", "compute_input": "copy in", "compute_infer": "compute", "compute_output": "copy out"}
STAGE_METRIC = "convoy_stage_duration_seconds"
EDGE_STAGES = {
    "decode_wait": "decode wait",
    "decode": "decode",
    "encode": "encode",
}  # the metric's others are per batch, not per request


@dataclass(frozen=True, slots=True)
class StageTotal:
    """How often a stage was passed and how long that took altogether, since the server began."""

    name: str
    count: int
    ns: float


@dataclass(frozen=True, slots=True)
class BatchCount:
    """How many batches of `size` samples ran."""

    size: int
    count: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The server's counters at one moment."""

    stages: tuple[StageTotal, ...]
    batches: tuple[BatchCount, ...]


@dataclass(frozen=True, slots=True)
class StageMean:
    """Mean time of a request in one stage."""

    name: str
    mean_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class ServerSide:
    """Of the requests between two readings. Either may be empty."""

    stages: tuple[StageMean, ...]
    batches: tuple[BatchCount, ...]

    @property
    def mean_batch(self) -> float | None:
        """Samples in a batch, on average over batches."""
        count = sum(batch.count for batch in self.batches)
        return sum(batch.size * batch.count for batch in self.batches) / count if count else None


def snapshot(statistics: dict[str, Any], metrics: str, model: str) -> Snapshot:
    """From the extension's document and the text of /metrics, each empty where the server has none."""
    rows: Any = statistics.get("model_stats")
    models = [row for row in rows or () if isinstance(row, dict) and row.get("name") == model]
    totals = [*_extension_totals(models), *_metric_totals(metrics, model)]
    return Snapshot(tuple(_added(totals)), tuple(_batches(models)))


def difference(before: Snapshot, after: Snapshot) -> ServerSide:
    """What happened between the two. Nothing where the counters fell: then the server was started anew."""
    stages = []
    earlier = {total.name: total for total in before.stages}
    for total in after.stages:
        first = earlier.get(total.name, StageTotal(total.name, 0, 0))
        count, ns = total.count - first.count, total.ns - first.ns
        if count > 0 and ns >= 0:
            stages.append(StageMean(total.name, ns / count / NS_PER_MS, count))
    counts = {batch.size: batch.count for batch in before.batches}
    batches = (BatchCount(batch.size, batch.count - counts.get(batch.size, 0)) for batch in after.batches)
    stages.sort(key=lambda stage: STAGES.index(stage.name))
    return ServerSide(tuple(stages), tuple(batch for batch in batches if batch.count > 0))


def _extension_totals(models: list[dict[str, Any]]) -> Iterable[StageTotal]:
    for model in models:
        durations = model.get("inference_stats", {})
        for theirs, ours in EXTENSION.items():
            one = durations.get(theirs)
            if isinstance(one, dict):
                yield StageTotal(ours, int(one.get("count", 0)), float(one.get("ns", 0)))


def _metric_totals(text: str, model: str) -> Iterable[StageTotal]:
    """Counts and sums of the histogram, the sums in seconds."""
    for family in text_string_to_metric_families(text) if STAGE_METRIC in text else ():
        if family.name != STAGE_METRIC:
            continue
        for sample in family.samples:
            stage = EDGE_STAGES.get(sample.labels.get("stage", ""))
            if stage is None or sample.labels.get("model") != model:
                continue
            if sample.name.endswith("_count"):
                yield StageTotal(stage, int(sample.value), 0)
            elif sample.name.endswith("_sum"):
                yield StageTotal(stage, 0, sample.value * NS_PER_S)


def _added(totals: Iterable[StageTotal]) -> list[StageTotal]:
    """One total for each stage, over all versions of the model."""
    sums: dict[str, StageTotal] = {}
    for one in totals:
        so_far = sums.get(one.name, StageTotal(one.name, 0, 0))
        sums[one.name] = StageTotal(one.name, so_far.count + one.count, so_far.ns + one.ns)
    return list(sums.values())


def _batches(models: list[dict[str, Any]]) -> list[BatchCount]:
    sizes: dict[int, int] = {}
    for model in models:
        for row in model.get("batch_stats", []):
            size = int(row["batch_size"])
            sizes[size] = sizes.get(size, 0) + int(row.get("compute_infer", {}).get("count", 0))
    return [BatchCount(size, count) for size, count in sorted(sizes.items())]
