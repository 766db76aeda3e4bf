"""The run as one HTML page that needs nothing but itself: no script, no font, nothing from the net.

Knows the order of the story: what was done, whether it may be believed, what came out, where the time went.
Draws nothing (`charts`) and computes nothing; the figures all stand in the JSON, too.
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
USE_NOT_OFFERED = "Not told: over HTTP it is read from process_* in /metrics, and the run must last for two readings."
NOT_OFFERED = "Not offered by this server: it has neither the protocol's statistics nor Convoy's metrics."


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
        *section("May it be believed?", *_belief(outcome)),
        *section("How it was measured", _settings(outcome)),
    )
    return page(f"{outcome.target.model}: load test", body, STYLE)


def _head(outcome: LoadTestOutcome) -> Element:
    target = outcome.target
    server = " ".join(str(target.server[key]) for key in ("name", "version") if target.server.get(key))
    by = f", which calls itself {server}" if server else ""
    wire = "gRPC" if target.requests.protocol == "grpc" else "HTTP"
    what = f"{target.endpoint.url}{by}; {target.body} bodies over {wire}; {words.load(outcome.options)}"
    return element("header", element("h1", f"{target.model}: load test"), element("p", what, class_="lead"))


def _verdict(outcome: LoadTestOutcome) -> Element:
    """The one sentence that a reader must not miss."""
    voids = words.voids(outcome)
    failed = sum(row.summary.failed for row in outcome.rows)
    if outcome.capacity is not None:
        good = outcome.capacity.ending == "bracketed"
        return _box("Found" if good else "Not found", words.capacity(outcome), good)
    if voids:
        return _box("VOID", "; ".join(voids), False)
    if outcome.interrupted:
        return _box("Stopped early", "the figures are of what was measured so far", False)
    if failed:
        return _box("Requests failed", f"{failed:,} of the measured requests got no good answer", False)
    on_time = "" if outcome.shown.rate is None else ", and the load generator was on time"
    return _box("Valid", f"every measured request was answered well{on_time}", True)


def _box(title: str, text: str, good: bool) -> Element:
    return element("p", element("b", title), text, class_=f"verdict {'is-good' if good else 'is-bad'}")


def _cards(outcome: LoadTestOutcome) -> Iterator[Element]:
    result, slo_ms = outcome.shown, outcome.options.slo_ms
    summary = result.summary
    if result.name:
        yield card("figures of", result.name, f"{number(result.rate)} requests/s" if result.rate else "")
    elif len(outcome.rows) > 1:
        yield card("figures of", "all steps", "together")
    answered = f"{number(summary.throughput_rps)}/s"
    yield card("good answers", answered, _interval(summary.throughput_interval_rps, "/s"))
    for percentile in summary.percentiles:
        if percentile.name in ("50", "99") and percentile.latency_ms is not None:
            latency = f"{number(percentile.latency_ms)} ms"
            yield card(f"latency, p{percentile.name}", latency, _interval(percentile.interval_ms, " ms"))
    if summary.goodput is not None:
        yield card(f"good within {slo_ms:g} ms", words.share(summary.goodput), "of all that was offered")
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
        "good / s",
        "failed",
        "p50, ms",
        "p90, ms",
        "p99, ms",
        "good in time",
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
    since = "from when a request was due" if outcome.shown.rate is not None else "from when a request was sent"
    about = (
        f"Latency counts {since} to its whole answer, good answers only. Intervals are 95 % confidence intervals by "
        "block bootstrap (Carlstein, Annals of Statistics 14(3), 1986): neighbouring requests share a queue, so whole "
        "blocks of time are drawn anew, not single requests."
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
        rows.append([f"p{one.name}", f"{one.latency_ms:.3f}" if known else f"needs {one.needs:,} answers", interval])
    for name, value in (("mean", result.summary.mean_ms), ("longest", result.summary.max_ms)):
        rows.append([name, "–" if value is None else f"{value:.3f}", ""])
    return element("div", table(("latency", "ms", "95 % interval"), rows))


def _server(outcome: LoadTestOutcome) -> list[Element | None]:
    server = outcome.server
    if server is None or not (server.stages or server.batches):
        return [element("p", NOT_OFFERED, class_="note")]
    about = (
        "Means over all requests of the run, warm-up included, from the server's own counters, read before and after. "
        "All else is the difference to the mean latency as the client measured it: the network, parsing, and waiting "
        "that the server does not count."
    )
    drawn = element("div", charts.stages(outcome), charts.batches(server), class_="charts")
    return [element("p", about, class_="note"), drawn]


def _used(use: ServerUse | None) -> list[Element | None]:
    if use is None:
        return [element("p", USE_NOT_OFFERED, class_="note")]
    about = (
        "Of the measured time, from the server's own metrics, read now and then; intervals are by bootstrap over the "
        "readings. CPU includes what these cost, about a millisecond each."
    )
    rows: list[list[Content]] = [[what, figure] for what, figure in words.server_use(use)]
    processes: list[list[Content]] = [[one.name, f"{one.cpu_s:.2f}", f"{one.peak_mib:,.0f}"] for one in use.processes]
    figures = element("div", table(("all processes", ""), rows))
    by_process = element("div", table(("process", "CPU, s", "memory, most, MiB"), processes))
    drawn = element("div", charts.server_cpu(use), charts.server_memory(use), figures, by_process, class_="charts")
    return [element("p", about, class_="note"), drawn]


def _errors(result: Result) -> Element | None:
    if not result.summary.errors:
        return None
    rows: list[list[Content]] = [[e.problem.title, e.problem.text, f"{e.count:,}"] for e in result.summary.errors]
    return table(("kind", "words", "requests"), rows, class_="words")


def _belief(outcome: LoadTestOutcome) -> list[Element | None]:
    said = words.notes(outcome)
    notes = element("ul", *(element("li", f"{note}.") for note in said)) if said else None
    return [notes, _lateness(outcome), _stability(outcome.shown)]


def _lateness(outcome: LoadTestOutcome) -> Element:
    """How late the generator was, and what it spent."""
    figures = ("p50, ms", "p99, ms", "max, ms", "limit of p99", "processes", "busiest core", "waited for a connection")
    return table(("generator's own lateness", *figures), [_late_row(row) for row in outcome.rows])


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
    word = "reached" if result.stability.why_not is None else "not reached"
    about = f"Stability {word}: the last three windows may differ by 10 % in throughput and in mean latency"
    figures = table(("window", "good answers / s", "mean latency, ms"), rows)
    return element("details", element("summary", about), figures)


def _settings(outcome: LoadTestOutcome) -> Element:
    options, measurement = outcome.options, outcome.shown.measurement
    part = "each step" if options.steps else "each probe" if options.find_capacity else "the run"
    processes = len(measurement.generators)
    rows: list[list[Content]] = [
        ["load", words.load(options)],
        ["time", f"{options.duration_s:g} s for {part}, the first {options.warm_up_cut_s:g} s cut off as warm-up"],
        ["seed", str(options.seed)],
        ["connections", f"at most {options.clients or options.connections}; time-out {options.timeout_s:g} s"],
        ["generator", f"processes: {processes}; CPU: {measurement.generator_cpu_s:.1f} s"],
    ]
    rows += [[name.replace("_", " "), str(value)] for name, value in environment(measurement).items()]
    return table(("", ""), rows, class_="words")
