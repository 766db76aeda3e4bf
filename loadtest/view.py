"""What a person sees: a bar while it runs, one table at the end.

Knows rich and the words. Computes nothing but roundings.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from loadtest.measure import Progress
from loadtest.options import LoadOptions
from loadtest.statistics import Percentile, Summary
from loadtest.target import Target
from loadtest.verdict import Verdict

ERRORS_SHOWN = 8


class LiveView:
    """A progress bar without a thread of its own, which would fight the generator for the interpreter."""

    def __init__(self, console: Console, duration_s: float) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
        self._bar = Bar(*columns, console=console, auto_refresh=False, transient=True)
        self._on = console.is_terminal
        self._task = self._bar.add_task("load test", total=duration_s, status="")

    def __enter__(self) -> LiveView:
        if self._on:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._on:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        if not self._on:
            return
        failed = f", {progress.failed} failed" if progress.failed else ""
        status = f"{progress.elapsed_s:.0f} s, {progress.good} answered{failed}, {progress.in_flight} under way"
        self._bar.update(self._task, completed=progress.elapsed_s, status=status)
        self._bar.refresh()


def print_summary(
    console: Console, target: Target, options: LoadOptions, summary: Summary, verdict: Verdict, *, interrupted: bool
) -> None:
    console.print(_title(target, options), style="bold", markup=False, highlight=False, soft_wrap=True)
    table = Table(show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    _add_rows(table, options, summary)
    if verdict.lateness_p99_ms is not None and verdict.lateness_limit_ms is not None:
        lateness = f"{verdict.lateness_p99_ms:.3f} ms (limit {verdict.lateness_limit_ms:.2f} ms)"
        table.add_row("generator's own lateness, p99", lateness)
    for error in summary.errors[:ERRORS_SHOWN]:
        title = f"{error.problem.title}: {error.problem.text}"
        table.add_row(f"[red]{escape(title)}[/red]", f"[red]{error.count}[/red]")
    if len(summary.errors) > ERRORS_SHOWN:
        rest = sum(error.count for error in summary.errors[ERRORS_SHOWN:])
        table.add_row("[red]other errors[/red]", f"[red]{rest}[/red]")
    console.print(table)
    _print_words(console, verdict, interrupted)


def _title(target: Target, options: LoadOptions) -> str:
    if options.rate is not None:
        load = f"{options.arrivals} {options.rate:g} requests/s"
    else:
        load = f"{options.clients} clients"
    return f"{target.model} at {target.endpoint.url}, {target.body} bodies, {load}"


def _add_rows(table: Table, options: LoadOptions, summary: Summary) -> None:
    table.add_row("measured", f"{summary.window_s:.1f} s after {options.warm_up_cut_s:.1f} s of warm-up")
    table.add_row("requests", f"{summary.offered} ({summary.offered_rps:.1f}/s)")
    table.add_row("good answers", f"{summary.good} ({summary.throughput_rps:.1f}/s)")
    table.add_row("failed", str(summary.failed))
    if summary.goodput is not None and options.slo_ms is not None:
        table.add_row(f"goodput: answered within {options.slo_ms:g} ms", f"{100 * summary.goodput:.2f} %")
    since = "when it was due" if options.rate is not None else "when it was sent"
    for percentile in summary.percentiles:
        table.add_row(f"latency p{percentile.name}, from {since}", _percentile(percentile, summary.good))
        if percentile.latency_ms is None:
            break  # the rest needs still more answers
    if summary.max_ms is not None:
        table.add_row("latency, longest", f"{summary.max_ms:.2f} ms")


def _percentile(percentile: Percentile, good: int) -> str:
    if percentile.latency_ms is None:
        return f"needs {percentile.needs} answers, has {good}"
    return f"{percentile.latency_ms:.2f} ms"


def _print_words(console: Console, verdict: Verdict, interrupted: bool) -> None:
    for note in verdict.notes:
        console.print(f"Note: {escape(note)}.", soft_wrap=True, highlight=False)
    if interrupted:
        console.print("Stopped early: the figures are of what was measured so far.", soft_wrap=True, highlight=False)
    if verdict.void is not None:
        console.print(f"[bold red]VOID[/bold red]: {escape(verdict.void)}.", soft_wrap=True, highlight=False)
