"""The server's own figures for a run, and the interface of the clients that read them (`http_client`, `grpc_client`).

Counters come from the statistics extension of the protocol (queue, copies and compute per request, and the number of
batches of each size) and from Convoy's histogram of stages in /metrics (decode_wait, decode and encode). They are read
before and after the run, and the difference covers all requests in between, including the warm-up. A server may have
neither.

CPU and memory come from `convoy_process_*`, else `process_*`, in /metrics. They are read several times during a run,
which gives the intervals of CPU time. The readings themselves are part of what the server used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from convoy.loadtest import bodies
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.records import Records
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.rows import GOOD
from convoy.loadtest.statistics import ConfidenceInterval, Window, ratio_interval
from convoy.loadtest.units import BYTES_PER_MIB, MS_PER_S, NS_PER_MS, NS_PER_S
from convoy.models.errors import JobError

# In the order of a request; then the names of the extension for those that it has.
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
    """How many requests passed a stage since the start of the server, and their total time in it."""

    name: str
    count: int
    ns: float


@dataclass(frozen=True, slots=True)
class BatchCount:
    """The number of batches of `size` samples."""

    size: int
    count: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters of the server at one time."""

    stages: tuple[StageTotal, ...]
    batches: tuple[BatchCount, ...]


@dataclass(frozen=True, slots=True)
class StageMean:
    """The mean time of a request in one stage."""

    name: str
    mean_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class ServerSide:
    """Stages and batches of the requests between two readings. Either may be empty."""

    stages: tuple[StageMean, ...]
    batches: tuple[BatchCount, ...]

    @property
    def mean_batch(self) -> float | None:
        """The mean batch size."""
        count = sum(batch.count for batch in self.batches)
        return sum(batch.size * batch.count for batch in self.batches) / count if count else None


def snapshot(statistics: dict[str, Any], metrics: str, model: str) -> Snapshot:
    """From the document of the extension and the text of /metrics; each is empty if the server has none."""
    rows: Any = statistics.get("model_stats")
    models = [row for row in rows or () if isinstance(row, dict) and row.get("name") == model]
    totals = [*_extension_totals(models), *_metric_totals(metrics, model)]
    return Snapshot(tuple(_added(totals)), tuple(_batches(models)))


def difference(before: Snapshot, after: Snapshot) -> ServerSide:
    """The difference. Counters that went down are left out, because the server was restarted."""
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
    """The counts and sums of the histogram."""
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
    """One total per stage, over all versions of the model."""
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


OF_EACH, OF_ONE = "convoy_process_", "process_"
FIGURES = ("cpu_seconds_total", "resident_memory_bytes", "start_time_seconds")


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process at one time. `began_s` tells a process from a later one with the same name."""

    name: str
    cpu_s: float
    memory_bytes: float
    began_s: float


@dataclass(frozen=True, slots=True)
class UseReading:
    """All processes at one time of CLOCK_MONOTONIC."""

    at_ns: int
    processes: tuple[ProcessReading, ...]


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process over the measured time."""

    name: str
    cpu_s: float
    peak_mib: float


@dataclass(frozen=True, slots=True)
class UseSample:
    """All processes between two readings. `cores` is CPU time over time, `memory_mib` is from the second reading."""

    start_s: float
    end_s: float
    cores: float
    memory_mib: float


@dataclass(frozen=True, slots=True)
class ServerUse:
    """All processes between the first and the last reading in the measured window.

    `cpu_ms_per_answer` is CPU time per successful response; None without any. Intervals are 95 % confidence intervals
    by bootstrap over the samples; None for fewer than ten. `peak_mib` is the highest reading.
    """

    cpu_s: float
    cores: float
    cores_interval: ConfidenceInterval | None
    cpu_ms_per_answer: float | None
    cpu_ms_per_answer_interval: ConfidenceInterval | None
    peak_mib: float
    processes: tuple[ProcessUse, ...]
    samples: tuple[UseSample, ...]


def read_processes(metrics: str) -> tuple[ProcessReading, ...]:
    """From the text of /metrics; empty if it has no processes."""
    for prefix in (OF_EACH, OF_ONE):
        wanted = tuple(prefix + figure for figure in FIGURES)
        # Parsing all lines would take longer than the server took to write them.
        lines = [line for line in metrics.splitlines() if line.startswith(wanted)]
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name = sample.labels.get("process", "server")
                found.setdefault(name, {})[sample.name.removeprefix(prefix)] = sample.value
        if found:
            return tuple(
                ProcessReading(name, *(of.get(figure, 0.0) for figure in FIGURES)) for name, of in found.items()
            )
    return ()


def server_use(readings: Sequence[UseReading], records: Records, window: Window) -> ServerUse | None:
    """The use in the window; None with fewer than two readings in it."""
    within = [one for one in readings if window.start_ns <= one.at_ns <= window.end_ns]
    if len(within) < 2:
        return None
    pairs = list(pairwise(within))
    spent_s = [_spent_s(first, second) for first, second in pairs]
    cpu_s = np.array([sum(of.values()) for of in spent_s])
    at_ns = np.array([one.at_ns for one in within])
    seconds = np.diff(at_ns) / NS_PER_S
    finished_ns = np.sort(records.finished_ns[records.outcome == GOOD])
    answers = np.diff(np.searchsorted(finished_ns, at_ns)).astype(np.float64)
    per_answer = ratio_interval(cpu_s, answers)
    return ServerUse(
        cpu_s=float(cpu_s.sum()),
        cores=float(cpu_s.sum() / seconds.sum()),
        cores_interval=ratio_interval(cpu_s, seconds),
        cpu_ms_per_answer=float(MS_PER_S * cpu_s.sum() / answers.sum()) if answers.sum() else None,
        cpu_ms_per_answer_interval=per_answer
        and ConfidenceInterval(MS_PER_S * per_answer.low, MS_PER_S * per_answer.high),
        peak_mib=max(_memory_mib(one) for one in within),
        processes=_by_process(within, spent_s),
        samples=tuple(
            UseSample(
                start_s=(first.at_ns - window.run_start_ns) / NS_PER_S,
                end_s=(second.at_ns - window.run_start_ns) / NS_PER_S,
                cores=float(cpu / length),
                memory_mib=_memory_mib(second),
            )
            for (first, second), cpu, length in zip(pairs, cpu_s, seconds, strict=True)
        ),
    )


def _spent_s(first: UseReading, second: UseReading) -> dict[str, float]:
    """The CPU time of each process between two readings; all of it for a process that started in between."""
    before = {(one.name, one.began_s): one.cpu_s for one in first.processes}
    return {one.name: max(0.0, one.cpu_s - before.get((one.name, one.began_s), 0.0)) for one in second.processes}


def _by_process(readings: Sequence[UseReading], spent_s: Sequence[dict[str, float]]) -> tuple[ProcessUse, ...]:
    peaks: dict[str, float] = {}
    for reading in readings:
        for one in reading.processes:
            peaks[one.name] = max(peaks.get(one.name, 0.0), one.memory_bytes / BYTES_PER_MIB)
    return tuple(
        ProcessUse(name, sum(of.get(name, 0.0) for of in spent_s), peak_mib) for name, peak_mib in peaks.items()
    )


def _memory_mib(reading: UseReading) -> float:
    return sum(one.memory_bytes for one in reading.processes) / BYTES_PER_MIB


Kind = Literal["image", "binary", "json"]


@dataclass(frozen=True, slots=True)
class TriedRequests:
    """Requests that the server answers, and the kind of their bodies."""

    kind: Kind
    pool: RequestPool


class ServerClient(Protocol):
    """A client of one server over one protocol. It holds a connection, so `close` must be called."""

    endpoint: Endpoint

    def server(self) -> dict[str, object]:
        """The name and version of the server; empty if it does not tell."""

    def models(self) -> list[str] | None:
        """The names of the ready models; None if the server does not list them."""

    def metadata(self, model: str) -> dict[str, object] | None:
        """Inputs and outputs; None if there is no such model. Raises JobError."""

    def try_requests(self, model: str, metadata: dict[str, object], options: LoadTestOptions) -> TriedRequests:
        """Requests of the kind that the options name, one of them tested. Raises JobError."""

    def snapshot(self, model: str) -> Snapshot | None:
        """The counters of the server; None if it has none or does not respond."""

    def processes(self) -> tuple[ProcessReading, ...]:
        """CPU time and memory of its processes; empty if it does not tell or does not respond at once."""

    def close(self) -> None: ...


def inputs_of(metadata: dict[str, object]) -> list[bodies.Input]:
    """The inputs in the metadata. Raises JobError for invalid metadata."""
    rows = metadata.get("inputs")
    try:
        if not isinstance(rows, list) or not rows:
            raise ValueError("no inputs")
        return [bodies.Input(str(row["name"]), str(row["datatype"]), tuple(map(int, row["shape"]))) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(f"the server's metadata cannot be used ({error}); use --body image for an image model") from None


def without_protocol(url: str) -> JobError:
    """The error for a server that responds but is no inference server."""
    return JobError(
        f"{url} does not speak the Open Inference Protocol (it has neither server metadata nor a list of models); "
        "check --url and --protocol"
    )
