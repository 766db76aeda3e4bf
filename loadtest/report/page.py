"""The report of a load test as one HTML file without scripts, fonts or anything from the network.

`charts` draws the charts. All figures of the report are in the JSON file, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element

from convoy.loadtest import words
from convoy.loadtest.document import environment
from convoy.loadtest.report import charts
from convoy.loadtest.results import LoadTestOutcome, Result
from convoy.loadtest.server_side import ServerUse
from convoy.loadtest.statistics import ConfidenceInterval
from convoy.models.page.axis import number
from convoy.models.page.markup import Content, card, element, page, section, table

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
USE_NOT_OFFERED = "Not available. It is read over HTTP from process_* in /metrics, at least twice during the run."
NOT_OFFERED = "Not available. The server has neither the statistics of the protocol nor Convoy's metrics."


def render(outcome: LoadTestOutcome) -> str:
    """The whole page."""
    body = element(
        "main",
        _head(outcome),
        _verdict(outcome),
        element("div", *_cards(outcome), class_="cards"),
        *section("Steps" if outcome.capacity is None else "Probes", *_rows(outcome)),
        *section(_latency_title(outcome), *_latency(outcome)),
        *section("Where the time went", *_server(outcome)),
        *section("What the server used", *_used(outcome.use)),
        *section("Errors", _errors(outcome.shown)),
        *section("Is this run valid?", *_validity(outcome)),
        *section("How it was measured", _settings(outcome)),
    )
    return page(f"{outcome.target.model}: load test", body, STYLE)


def _head(outcome: LoadTestOutcome) -> Element:
    target = outcome.target
    server = " ".join(str(target.server[key]) for key in ("name", "version") if target.server.get(key))
    by = f" ({server})" if server else ""
    wire = "gRPC" if target.requests.protocol == "grpc" else "HTTP"
    what = f"{target.endpoint.url}{by}; {target.body} bodies over {wire}; {words.load(outcome.options)}"
    return element("header", element("h1", f"{target.model}: load test"), element("p", what, class_="lead"))


def _verdict(outcome: LoadTestOutcome) -> Element:
    verdict = words.verdict(outcome)
    return element("p", element("b", verdict.word.capitalize()), verdict.why, class_=f"verdict is-{verdict.level}")


def _cards(outcome: LoadTestOutcome) -> Iterator[Element]:
    result, slo_ms = outcome.shown, outcome.options.slo_ms
    summary = result.summary
    if result.name:
        yield card("results of", result.name, f"{number(result.rate)} requests/s" if result.rate else "")
    elif len(outcome.rows) > 1:
        yield card("results of", "all steps", "together")
    answered = f"{number(summary.throughput_rps)}/s"
    yield card("successful", answered, _interval(summary.throughput_interval_rps, "/s"))
    for percentile in summary.percentiles:
        if percentile.name in ("50", "99") and percentile.latency_ms is not None:
            latency = f"{number(percentile.latency_ms)} ms"
            yield card(f"latency, p{percentile.name}", latency, _interval(percentile.interval_ms, " ms"))
    if summary.goodput is not None:
        yield card(f"successful within {slo_ms:g} ms", words.share(summary.goodput), "of all requests")
    yield card("failed", f"{summary.failed:,}", f"of {summary.offered:,} requests")


def _interval(interval: ConfidenceInterval | None, unit: str) -> str:
    return f"95 %: {number(interval.low)} to {number(interval.high)}{unit}" if interval else ""


def _rows(outcome: LoadTestOutcome) -> list[Element | None]:
    if len(outcome.rows) < 2:
        return []
    both = element(
        "div", charts.throughput_against_latency(outcome), charts.goodput_against_rate(outcome), class_="charts"
    )
    headings = (
        "",
        "offered / s",
        "successful / s",
        "failed",
        "p50, ms",
        "p90, ms",
        "p99, ms",
        "in time",
        words.standing_title(outcome),
    )
    return [both, table(headings, [_row(outcome, row) for row in outcome.rows])]


def _row(outcome: LoadTestOutcome, row: Result) -> list[Content]:
    summary = row.summary
    by_name = {one.name: one.latency_ms for one in summary.percentiles}
    latencies = [number(ms) if (ms := by_name[name]) is not None else "–" for name in ("50", "90", "99")]
    rates = [number(row.rate) if row.rate else "–", number(summary.throughput_rps)]
    last = [words.share(summary.goodput), words.standing(outcome, row)]
    return [row.name, *rates, f"{summary.failed:,}", *latencies, *last]


def _latency_title(outcome: LoadTestOutcome) -> str:
    if outcome.shown.name:
        return f"Latency ({outcome.shown.name})"
    return "Latency (all steps together)" if len(outcome.rows) > 1 else "Latency"


def _latency(outcome: LoadTestOutcome) -> list[Element | None]:
    since = "a request was scheduled" if outcome.shown.rate is not None else "a request was sent"
    about = (
        f"Latency is the time from when {since} until its whole response arrived, for successful requests only. "
        "Intervals are 95 % confidence intervals by block bootstrap (Carlstein, Annals of Statistics 14(3), 1986). It "
        "resamples blocks of time, because neighbouring requests share a queue and are not independent."
    )
    drawn = element(
        "div",
        charts.latency_over_time(outcome),
        charts.latency_distribution(outcome),
        charts.answers_over_time(outcome),
        _percentiles(outcome.shown),
        class_="charts",
    )
    return [element("p", about, class_="note"), drawn]


def _percentiles(result: Result) -> Element:
    rows: list[list[Content]] = []
    for one in result.summary.percentiles:
        interval = f"{one.interval_ms.low:.3f} to {one.interval_ms.high:.3f}" if one.interval_ms else "–"
        known = one.latency_ms is not None
        rows.append([f"p{one.name}", f"{one.latency_ms:.3f}" if known else f"needs {one.needs:,} responses", interval])
    for name, value in (("mean", result.summary.mean_ms), ("maximum", result.summary.max_ms)):
        rows.append([name, "–" if value is None else f"{value:.3f}", ""])
    return element("div", table(("latency", "ms", "95 % interval"), rows))


def _server(outcome: LoadTestOutcome) -> list[Element | None]:
    server = outcome.server
    if server is None or not (server.stages or server.batches):
        return [element("p", NOT_OFFERED, class_="note")]
    about = (
        "Means over all requests of the run, including the warm-up, from the counters of the server before and after "
        "the run. Other is the difference to the mean latency that the client measured: network, parsing, and waiting "
        "that the server does not count."
    )
    drawn = element("div", charts.stages(outcome), charts.batches(server), class_="charts")
    return [element("p", about, class_="note"), drawn]


def _used(use: ServerUse | None) -> list[Element | None]:
    if use is None:
        return [element("p", USE_NOT_OFFERED, class_="note")]
    about = (
        "Over the measured time, read from the metrics of the server at intervals. Confidence intervals are by "
        "bootstrap over the readings. CPU includes the cost of the readings, about a millisecond each."
    )
    rows: list[list[Content]] = [[what, figure] for what, figure in words.server_use(use)]
    processes: list[list[Content]] = [[one.name, f"{one.cpu_s:.2f}", f"{one.peak_mib:,.0f}"] for one in use.processes]
    figures = element("div", table(("all processes", ""), rows))
    by_process = element("div", table(("process", "CPU, s", "peak memory, MiB"), processes))
    drawn = element("div", charts.server_cpu(use), charts.server_memory(use), figures, by_process, class_="charts")
    return [element("p", about, class_="note"), drawn]


def _errors(result: Result) -> Element | None:
    if not result.summary.errors:
        return None
    rows: list[list[Content]] = [[e.problem.title, e.problem.text, f"{e.count:,}"] for e in result.summary.errors]
    return table(("kind", "message", "requests"), rows, class_="words")


def _validity(outcome: LoadTestOutcome) -> list[Element | None]:
    said = words.notes(outcome)
    notes = element("ul", *(element("li", f"{note}.") for note in said)) if said else None
    return [notes, _lateness(outcome), _stability(outcome.shown)]


def _lateness(outcome: LoadTestOutcome) -> Element:
    """The delay of the load generator, and its CPU use."""
    figures = ("p50, ms", "p99, ms", "max, ms", "p99 limit", "processes", "busiest core", "waited for a connection")
    return table(("load generator delay", *figures), [_late_row(row) for row in outcome.rows])


def _late_row(row: Result) -> list[Content]:
    late, used = row.verdict.lateness, row.measurement
    times = ["–"] * 4
    if late is not None:
        times = [f"{ms:.3f}" for ms in (late.p50_ms, late.p99_ms, late.max_ms, late.limit_ms)]
    cpu = f"{100 * used.busiest_cpu_share:.0f} %"
    return [row.name or "run", *times, str(len(used.generators)), cpu, f"{used.waited:,}"]


def _stability(result: Result) -> Element | None:
    windows = result.stability.windows
    if not windows:
        return None
    rows: list[list[Content]] = [
        [
            f"{one.start_s:.1f} to {one.end_s:.1f} s",
            number(one.throughput_rps),
            "–" if one.latency_ms is None else number(one.latency_ms),
        ]
        for one in windows
    ]
    word = "Stable" if result.stability.why_not is None else "Not stable"
    about = f"{word}: throughput and mean latency may vary by 10 % over the last three windows"
    figures = table(("window", "successful / s", "mean latency, ms"), rows)
    return element("details", element("summary", about), figures)


def _settings(outcome: LoadTestOutcome) -> Element:
    options, measurement = outcome.options, outcome.shown.measurement
    part = "each step" if options.steps else "each probe" if options.find_capacity else "the run"
    processes = len(measurement.generators)
    rows: list[list[Content]] = [
        ["load", words.load(options)],
        ["time", f"{options.duration_s:g} s for {part}, without the first {options.warm_up_cut_s:g} s (warm-up)"],
        ["seed", str(options.seed)],
        ["connections", f"at most {options.clients or options.connections}; timeout {options.timeout_s:g} s"],
        ["generator", f"processes: {processes}; CPU: {measurement.generator_cpu_s:.1f} s"],
    ]
    rows += [[name.replace("_", " "), str(value)] for name, value in environment(measurement).items()]
    return table(("", ""), rows, class_="words")
