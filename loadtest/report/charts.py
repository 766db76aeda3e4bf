"""The charts of the report. Computes the points of curves from the records of a run, and no other figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree.ElementTree import Element

import numpy as np

from convoy.loadtest.capacity import SHARE
from convoy.loadtest.records import Records
from convoy.loadtest.results import LoadTestOutcome, Result
from convoy.loadtest.rows import GOOD, PENDING
from convoy.loadtest.server_side import BatchCount, ServerSide, ServerUse
from convoy.loadtest.statistics import ANSWERS_BEYOND, Percentile, Window
from convoy.loadtest.units import NS_PER_MS, NS_PER_S
from convoy.models.page.axis import Axis, number, spanning
from convoy.models.page.chart import Chart
from convoy.models.page.markup import Content, element, table

MOST_BINS = 100
GOOD_PER_BIN = 50  # for a steady median in each bin
LEAST_BIN_S = 0.1
CURVE_POINTS = 400


@dataclass(frozen=True, slots=True)
class TimeBin:
    """Requests that were due in this time. Latencies are of successful requests; None without any."""

    start_s: float
    end_s: float
    due: int
    good: int
    failed: int
    p50_ms: float | None
    p90_ms: float | None
    max_ms: float | None

    @property
    def middle_s(self) -> float:
        return (self.start_s + self.end_s) / 2

    def per_s(self, count: int) -> float:
        return count / (self.end_s - self.start_s)


def over_time(records: Records, window: Window) -> list[TimeBin]:
    """The whole run with its warm-up in equal bins of time; none for a run that was stopped before it began."""
    total_s = (window.end_ns - window.run_start_ns) / NS_PER_S
    if total_s <= 0:
        return []
    good = int(np.count_nonzero(records.outcome == GOOD))
    bins = max(1, min(MOST_BINS, good // GOOD_PER_BIN, int(total_s / LEAST_BIN_S)))
    edges_ns = np.linspace(window.run_start_ns, window.end_ns, bins + 1).astype(np.int64)
    ends = np.searchsorted(records.intended_ns, edges_ns)  # records are in the order of their due times
    return [_time_bin(records, window, edges_ns[i : i + 2], slice(ends[i], ends[i + 1])) for i in range(bins)]


def _time_bin(records: Records, window: Window, edges_ns: np.ndarray, rows: slice) -> TimeBin:
    outcome = records.outcome[rows]
    is_good = outcome == GOOD
    latency_ms = (records.finished_ns[rows] - records.intended_ns[rows])[is_good] / NS_PER_MS
    start_s, end_s = (edges_ns - window.run_start_ns) / NS_PER_S
    p50_ms, p90_ms, max_ms = np.percentile(latency_ms, [50, 90, 100]) if len(latency_ms) else (None, None, None)
    return TimeBin(
        start_s=float(start_s),
        end_s=float(end_s),
        due=len(outcome),
        good=int(np.count_nonzero(is_good)),
        failed=int(np.count_nonzero((outcome != GOOD) & (outcome != PENDING))),
        p50_ms=None if p50_ms is None else float(p50_ms),
        p90_ms=None if p90_ms is None else float(p90_ms),
        max_ms=None if max_ms is None else float(max_ms),
    )


@dataclass(frozen=True, slots=True)
class Curve:
    """Latency at each share of the successful requests: `sure` while at least ten are slower, then `rest`."""

    sure: list[tuple[float, float]]
    rest: list[tuple[float, float]]


def distribution(records: Records, window: Window) -> Curve:
    """The distribution of the requests due in the window."""
    chosen = (records.outcome == GOOD) & (records.intended_ns >= window.start_ns)
    chosen &= records.intended_ns < window.end_ns
    latency_ms = np.sort((records.finished_ns - records.intended_ns)[chosen]) / NS_PER_MS
    count = len(latency_ms)
    if not count:
        return Curve([], [])
    beyond = np.unique(np.geomspace(1, count, CURVE_POINTS).astype(np.int64))[::-1]
    points = [(float((count - left) / count), float(latency_ms[count - left])) for left in beyond]
    sure = [point for point, left in zip(points, beyond, strict=True) if left >= ANSWERS_BEYOND]
    return Curve(sure, points[max(0, len(sure) - 1) :])


LATENCY = "latency, ms"
_MOST_BARS = 64


def latency_over_time(outcome: LoadTestOutcome) -> Element | None:
    """Median, 90th percentile and maximum latency over time."""
    result, slo_ms = outcome.shown, outcome.options.slo_ms
    bins = over_time(result.measurement.records, result.window)
    seen = [one for one in bins if one.max_ms is not None]
    if not seen:
        return None
    values = [value for one in seen for value in (one.p50_ms, one.p90_ms, one.max_ms) if value is not None]
    chart = Chart(
        "Latency over time",
        "Median, 90th percentile and maximum latency by the time when requests were scheduled.",
        Axis("scheduled time, seconds since the start", 0, bins[-1].end_s),
        spanning(LATENCY, [*values, *([slo_ms] if slo_ms else [])], from_zero=False),
    )
    _mark_times(chart, result)
    chart.broken_line([(one.middle_s, one.max_ms) for one in bins], "line thin k1")
    chart.broken_line([(one.middle_s, one.p90_ms) for one in bins], "line k3")
    chart.broken_line([(one.middle_s, one.p50_ms) for one in bins], "line k0")
    chart.explain("median", "line k0")
    chart.explain("90th percentile", "line k3")
    chart.explain("maximum", "line thin k1")
    _draw_objective(chart, slo_ms)
    _explain_times(chart, result)
    return chart.figure()


def answers_over_time(outcome: LoadTestOutcome) -> Element | None:
    """Scheduled, successful and failed requests over time."""
    result = outcome.shown
    bins = over_time(result.measurement.records, result.window)
    if not bins:
        return None
    tops = [one.per_s(max(one.due, one.good + one.failed)) for one in bins]
    chart = Chart(
        "Requests over time",
        "Requests per second: scheduled, successful and failed.",
        Axis("scheduled time, seconds since the start", 0, bins[-1].end_s),
        spanning("requests / s", tops),
    )
    _mark_times(chart, result)
    offered = "scheduled" if result.rate is not None else "sent"
    chart.line(_steps(bins, [one.per_s(one.due) for one in bins]), "dashed soft", offered)
    chart.line(_steps(bins, [one.per_s(one.good) for one in bins]), "line k2", "successful")
    if any(one.failed for one in bins):
        chart.line(_steps(bins, [one.per_s(one.failed) for one in bins]), "line bad", "failed")
    _explain_times(chart, result)
    return chart.figure()


def latency_distribution(outcome: LoadTestOutcome) -> Element | None:
    """The distribution of latency. Each further nine takes the same width."""
    result, slo_ms = outcome.shown, outcome.options.slo_ms
    curve = distribution(result.measurement.records, result.window)
    points = [*curve.sure, *curve.rest]
    if len(points) < 2 or points[-1][0] <= 0:
        return None
    chart = Chart(
        "Distribution of latency",
        "Latency below which each share of the successful requests lies.",
        Axis("share of successful requests", 0, points[-1][0], "tail"),
        spanning(LATENCY, [*(ms for _, ms in points), *([slo_ms] if slo_ms else [])], from_zero=False),
    )
    chart.line(curve.rest, "dashed thin k0")
    chart.line(curve.sure, "line k0")
    chart.explain("latency", "line k0")
    chart.explain("fewer than 10 slower requests", "dashed thin k0")
    known = [one for one in result.summary.percentiles if one.interval_ms is not None]
    for one in known:
        assert one.interval_ms is not None
        chart.whisker(float(one.name) / 100, one.interval_ms.low, one.interval_ms.high, "k1")
    if known:
        chart.explain("95 % interval", "whisker k1")
    _draw_objective(chart, slo_ms)
    return chart.figure()


def throughput_against_latency(outcome: LoadTestOutcome) -> Element | None:
    """One dot per step or probe."""
    percentile = _common_percentile(outcome.rows)
    dots = [(row, _at(row, percentile)) for row in outcome.rows]
    drawn = [(row, ms) for row, ms in dots if ms is not None]
    if len(drawn) < 2:
        return None
    slo_ms = outcome.options.slo_ms
    chart = Chart(
        f"Throughput against p{percentile} latency",
        f"Successful requests per second and the p{percentile} latency of each step or probe.",
        spanning("successful / s", [row.summary.throughput_rps for row, _ in drawn]),
        spanning(f"p{percentile}, ms", [*(ms for _, ms in drawn), *([slo_ms] if slo_ms else [])], from_zero=False),
    )
    ordered = sorted(drawn, key=lambda one: one[0].rate or 0)
    valid = [(row.summary.throughput_rps, ms) for row, ms in ordered if row.verdict.void is None]
    chart.line(valid, "line thin k0")
    for row, ms in ordered:
        says = f"{row.name}: {number(row.rate or 0)} requests/s offered, p{percentile} {number(ms)} ms"
        chart.dot(row.summary.throughput_rps, ms, says, "ring k1" if row.verdict.void is not None else "dot k0")
    chart.explain("step" if outcome.capacity is None else "probe", "dot k0")
    if any(row.verdict.void is not None for row, _ in drawn):
        chart.explain("not valid: the load generator was late", "ring k1")
    _draw_objective(chart, slo_ms)
    return chart.figure()


def goodput_against_rate(outcome: LoadTestOutcome) -> Element | None:
    """The rate at which the objective is no longer met."""
    points = [(row, row.rate, row.summary.goodput) for row in outcome.rows]
    drawn = [(row, rate, share) for row, rate, share in points if rate is not None and share is not None]
    if len(drawn) < 2:
        return None
    lowest = min(share for _, _, share in drawn)
    chart = Chart(
        "Goodput against offered rate",
        "Share of requests that succeeded within the objective, by offered rate.",
        spanning("offered requests / s", [rate for _, rate, _ in drawn]),
        Axis("within the objective, %", 0 if lowest < 0.5 else 100 * lowest - 2, 101),
    )
    chart.level(100 * SHARE, "dashed soft", f"{100 * SHARE:.0f} %")
    valid = sorted((rate, 100 * share) for row, rate, share in drawn if row.verdict.void is None)
    chart.line(valid, "line thin k2")
    for row, rate, share in drawn:
        says = f"{row.name}: {100 * share:.2f} % at {number(rate)} requests/s"
        chart.dot(rate, 100 * share, says, "ring k1" if row.verdict.void is not None else "dot k2")
    if outcome.capacity is not None and outcome.capacity.sustained is not None:
        chart.upright(outcome.capacity.sustained, "front", "capacity")
    return chart.figure()


def stages(outcome: LoadTestOutcome) -> Element | None:
    """The mean time of a request by stage, as one bar and a table."""
    server, mean_ms = outcome.server, outcome.shown.summary.mean_ms
    if server is None or not server.stages:
        return None
    parts = [(stage.name, stage.mean_ms) for stage in server.stages]
    rest_ms = (mean_ms or 0) - sum(ms for _, ms in parts)
    if rest_ms > 0:
        parts.append(("other", rest_ms))
    total_ms = sum(ms for _, ms in parts)
    pieces = [
        element("i", class_=f"k{index}", style=f"flex: {100 * ms / total_ms:.3f}", title=f"{name}: {ms:.3f} ms")
        for index, (name, ms) in enumerate(parts)
    ]
    rows: list[list[Content]] = [
        [element("span", element("i", class_=f"swatch k{index}"), name), f"{ms:.3f}", f"{100 * ms / total_ms:.1f} %"]
        for index, (name, ms) in enumerate(parts)
    ]
    return element("div", element("div", *pieces, class_="stack"), table(("stage", "mean, ms", "share"), rows))


def batches(server: ServerSide) -> Element | None:
    """The number of batches of each size."""
    if not server.batches:
        return None
    groups = _grouped(server.batches)
    total = sum(one.count for one in server.batches)
    chart = Chart(
        "Batch sizes",
        "Share of batches of each size.",
        Axis("samples in a batch", groups[0][0] - 0.5, groups[-1][1] + 0.5),
        spanning("batches, %", [100 * count / total for *_, count in groups]),
    )
    for low, high, count in groups:
        size = f"{low}" if low == high else f"{low} to {high}"
        chart.bar(low - 0.4, high + 0.4, 100 * count / total, f"{size}: {count:,} batches", "k0")
    return chart.figure(f"{total:,} batches with a mean of {number(server.mean_batch or 0)} samples.")


def server_cpu(use: ServerUse) -> Element:
    """The cores that the server used over time."""
    chart = _use_chart(use, "CPU of the server", "Cores used by the processes of the server.", "cores")
    chart.line([(at, one.cores) for one in use.samples for at in (one.start_s, one.end_s)], "line k0")
    return chart.figure()


def server_memory(use: ServerUse) -> Element:
    """The resident memory of the server over time."""
    chart = _use_chart(use, "Memory of the server", "Resident memory of all processes of the server.", "MiB")
    chart.line([(one.end_s, one.memory_mib) for one in use.samples], "line k2")
    return chart.figure()


def _use_chart(use: ServerUse, title: str, about: str, unit: Literal["cores", "MiB"]) -> Chart:
    values = [one.cores if unit == "cores" else one.memory_mib for one in use.samples]
    times = Axis("seconds since the start", 0, use.samples[-1].end_s)
    return Chart(title, about, times, spanning(unit, values))


def _grouped(counts: Sequence[BatchCount]) -> list[tuple[int, int, int]]:
    """(smallest, largest, batches). Neighbouring sizes share a bar if there are too many sizes."""
    first, last = counts[0].size, counts[-1].size
    width = 1 + (last - first) // _MOST_BARS
    groups: dict[int, int] = {}
    for one in counts:
        groups[(one.size - first) // width] = groups.get((one.size - first) // width, 0) + one.count
    return [(first + at * width, first + (at + 1) * width - 1, count) for at, count in sorted(groups.items())]


def _steps(bins: Sequence[TimeBin], values: Sequence[float]) -> list[tuple[float, float]]:
    """A line that is flat within each bin."""
    pairs = zip(bins, values, strict=True)
    return [point for one, value in pairs for point in ((one.start_s, value), (one.end_s, value))]


def _warm_up_s(result: Result) -> float:
    return (result.window.start_ns - result.window.run_start_ns) / NS_PER_S


def _mark_times(chart: Chart, result: Result) -> None:
    """Mark the warm-up and the start of each further step."""
    if _warm_up_s(result) > 0:
        chart.area(0, _warm_up_s(result), "warm-up", "zone")
    for step in result.measurement.steps[1:]:
        chart.upright(step.start_s, "front")


def _explain_times(chart: Chart, result: Result) -> None:
    if _warm_up_s(result) > 0:
        chart.explain("warm-up, not counted", "zone")
    if len(result.measurement.steps) > 1:
        chart.explain("next step", "front")


def _draw_objective(chart: Chart, slo_ms: float | None) -> None:
    if slo_ms is not None:
        chart.level(slo_ms, "dashed bad", f"objective, {slo_ms:g} ms")


def _common_percentile(rows: Sequence[Result]) -> str:
    """The highest percentile up to p99 that most rows have."""
    for name in ("99", "95", "90"):
        if sum(_at(row, name) is not None for row in rows) * 2 > len(rows):
            return name
    return "50"


def _at(row: Result, name: str) -> float | None:
    found: dict[str, Percentile] = {one.name: one for one in row.summary.percentiles}
    return found[name].latency_ms
