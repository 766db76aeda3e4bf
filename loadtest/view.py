"""The console: a live line while the test runs, tables and the verdict at the end. Computes no figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from convoy.loadtest import words
from convoy.loadtest.capacity import CapacityProbe
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.results import LoadTestOutcome, Result
from convoy.loadtest.runner import RunProgress

ERRORS_SHOWN = 8
HISTORY = 24
LEVELS = "▁▂▃▄▅▆▇█"
COLOURS = {"good": "green", "warn": "yellow", "bad": "red"}


class LiveView:
    """A progress bar without its own thread, with the latencies of the last seconds."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[status]}"))
        self._console = console
        self._bar = Bar(*columns, console=console, auto_refresh=False, transient=True)
        self._on = console.is_terminal
        self._task = self._bar.add_task("load test", total=1.0, status="connecting")
        self._p99s_ms: deque[float] = deque(maxlen=HISTORY)

    def __enter__(self) -> LiveView:
        if self._on:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._on:
            self._bar.stop()

    def begin(self, options: LoadTestOptions) -> Callable[[RunProgress], None]:
        self._p99s_ms.clear()
        what = words.load(options)
        self._bar.reset(self._task, total=options.total_s, description=escape(what), status="connecting")
        return self._show

    def probed(self, probe: CapacityProbe) -> None:
        self._bar.console.print(escape(words.probe(probe)), highlight=False)

    def _show(self, progress: RunProgress) -> None:
        if not self._on:
            return
        if progress.p99_ms is not None:
            self._p99s_ms.append(progress.p99_ms)
        self._bar.update(self._task, completed=progress.elapsed_s, status=_status(progress, self._p99s_ms))
        self._bar.refresh()


def _status(progress: RunProgress, p99s_ms: deque[float]) -> str:
    parts = [f"{progress.elapsed_s:.0f} s", f"{progress.recent_per_s:,.0f}/s"]
    if progress.p50_ms is not None and progress.p99_ms is not None:
        parts.append(f"p50 {progress.p50_ms:.1f} ms, p99 {progress.p99_ms:.1f} ms {_sparkline(p99s_ms)}")
    if progress.failed:
        parts.append(f"[red]{progress.failed:,} failed[/red]")
    return "  ".join([*parts, f"{progress.in_flight:,} in flight"])


def _sparkline(values: deque[float]) -> str:
    top = max(values)
    return "".join(LEVELS[int(value / top * (len(LEVELS) - 1))] for value in values)


def print_outcome(console: Console, outcome: LoadTestOutcome) -> None:
    """Print the tables, the notes and the verdict."""
    console.print(words.title(outcome), style="bold", markup=False, highlight=False, soft_wrap=True)
    if outcome.capacity is not None or len(outcome.rows) > 1:
        console.print(_rows_table(outcome))
    if outcome.capacity is None:
        console.print(_figures_table(outcome, outcome.shown))
    for note in words.notes(outcome):
        console.print(f"Note: {escape(note)}.", soft_wrap=True, highlight=False)
    verdict = words.verdict(outcome)
    word = f"[bold {COLOURS[verdict.level]}]{verdict.word.capitalize()}.[/]"
    console.print(f"{word} {escape(verdict.why)}", soft_wrap=True, highlight=False)


def _rows_table(outcome: LoadTestOutcome) -> Table:
    """One line per step or probe."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("", "rate/s", "ok/s", "failed", "p50 ms", "p99 ms", "goodput", words.standing_title(outcome)):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in outcome.rows:
        summary = row.summary
        table.add_row(
            row.name,
            "" if row.rate is None else f"{row.rate:,.1f}",
            f"{summary.throughput_rps:,.1f}",
            f"{summary.failed:,}",
            *("–" if ms is None else f"{ms:.2f}" for ms in (summary.percentiles[i].latency_ms for i in (0, 3))),
            words.share(summary.goodput),
            words.standing(outcome, row),
        )
    return table


def _figures_table(outcome: LoadTestOutcome, result: Result) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    _add_figures(table, outcome.options, result)
    lateness = result.verdict.lateness
    if lateness is not None:
        late = f"{lateness.p50_ms:.3f}, {lateness.p99_ms:.3f}, {lateness.max_ms:.3f} ms"
        table.add_row(f"load generator delay p50, p99, max (p99 limit {lateness.limit_ms:.2f} ms)", late)
    for stage in outcome.server.stages if outcome.server else ():
        table.add_row(f"server: mean {stage.name} time", f"{stage.mean_ms:.3f} ms")
    if outcome.server is not None and outcome.server.mean_batch is not None:
        table.add_row("server: mean batch size", f"{outcome.server.mean_batch:.1f}")
    for what, figure in words.server_use(outcome.use) if outcome.use else ():
        table.add_row(f"server: {what}", figure)
    _add_errors(table, result)
    return table


def _add_figures(table: Table, options: LoadTestOptions, result: Result) -> None:
    summary = result.summary
    table.add_row("measured", f"{summary.window_s:.1f} s after {options.warm_up_cut_s:.1f} s of warm-up")
    table.add_row("requests", f"{summary.offered} ({summary.offered_rps:.1f}/s)")
    table.add_row("successful", f"{summary.good} ({summary.throughput_rps:.1f}/s)")
    table.add_row("failed", str(summary.failed))
    if summary.goodput is not None and options.slo_ms is not None:
        table.add_row(f"goodput: successful within {options.slo_ms:g} ms", words.share(summary.goodput))
    since = "scheduled time" if result.rate is not None else "send time"
    for percentile in summary.percentiles:
        table.add_row(f"latency p{percentile.name}, from {since}", words.percentile(percentile, summary.good))
        if percentile.latency_ms is None:
            break  # the higher ones need even more responses
    if summary.max_ms is not None:
        table.add_row("maximum latency", f"{summary.max_ms:.2f} ms")


def _add_errors(table: Table, result: Result) -> None:
    errors = result.summary.errors
    for error in errors[:ERRORS_SHOWN]:
        title = f"{error.problem.title}: {error.problem.text}"
        table.add_row(f"[red]{escape(title)}[/red]", f"[red]{error.count}[/red]")
    if len(errors) > ERRORS_SHOWN:
        rest = sum(error.count for error in errors[ERRORS_SHOWN:])
        table.add_row("[red]other errors[/red]", f"[red]{rest}[/red]")
