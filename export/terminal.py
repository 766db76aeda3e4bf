"""The console output of an export: progress bars while it runs, and a sentence and a table at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from convoy.export.progress import Progress, Step
from convoy.export.report.verdict import fastest, verdict_of
from convoy.models.bundle import BUSY_MARK, ON_CPU, LatencyPoint, Manifest, Variant

_REPORT_EVERY_S = 10.0
_MOST_LINES = 10


class _BarStep(Step):
    def __init__(self, bars: Bars, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def advance(self, count: int = 1) -> None:
        self._bars.advance(self._task, count)

    def expect(self, total: int) -> None:
        self._bars.update(self._task, total=total)


class RichProgress(Progress):
    """One line per step with a bar and its time; a context manager.

    Without a terminal, a line on stderr every ten seconds names the running step.
    """

    def __init__(self, console: Console) -> None:
        self._ended = threading.Event()
        self._reporter = threading.Thread(target=self._report, daemon=True)
        self._bars = Bars(
            SpinnerColumn(finished_text="[green]✓[/]"),
            # As wide as the longest name, so that the bars line up in 80 columns.
            TextColumn("{task.description:<44}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> RichProgress:
        if self._bars.disable:
            self._reporter.start()
        return self

    def _report(self) -> None:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        while not self._ended.wait(_REPORT_EVERY_S):
            for task in self._bars.tasks[-1:]:
                done = f"{task.completed:.0f} of {task.total:.0f}, " if task.total else ""
                console.print(f"{task.description}: {done}{task.elapsed or 0:.0f} s", markup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bars.live.is_started:
            self._bars.stop()

    def say(self, line: str) -> None:
        self._bars.console.print(line, soft_wrap=True, highlight=False, markup=False)

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Step]:
        # Started by the first step, so that an earlier refusal stays one line.
        self._bars.start()
        task = self._bars.add_task(name, total=total)
        yield _BarStep(self._bars, task)
        # A step that was shorter, or of unknown length, is complete when it ends.
        whole = next(one.total for one in self._bars.tasks if one.id == task) or 1
        self._bars.update(task, total=whole, completed=whole)


def summary(manifest: Manifest, *, is_verbose: bool = False) -> Group:
    """The verdict; one row per variant: its cost, its gain, whether it serves; the reasons. Fits 80 columns.

    Below the table are at most ten lines, objections and files that do not serve first; all of them with `is_verbose`.
    """
    # For a slow network, the largest batches are not measured.
    reference = manifest.variants[0].latency
    largest = reference.points[-1].batch_size if reference else manifest.spec.max_batch_size
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    # Our names stay whole, even beside long figures.
    table.add_column("variant", no_wrap=True, min_width=max(len(variant.file) for variant in manifest.variants))
    sizes = ["ms b=1", f"ms b={largest}"] if largest > 1 else ["ms b=1"]
    for heading in ("size", _score_heading(manifest), "agreement", *sizes, "speed", "served"):
        table.add_column(heading, justify="right", no_wrap=True)
    for variant in manifest.variants:
        nbytes = manifest.files[variant.file].bytes
        table.add_row(
            variant.file,
            f"{nbytes / 1024:.0f} KiB" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.1f} MiB",
            *_accuracy(variant),
            *_latency(variant)[: len(sizes)],
            _speed(variant),
            _served(manifest, variant),
        )
    by_need = sorted(manifest.variants, key=lambda variant: variant.serve)
    reasons = [Text(f"{variant.file}: {variant.reason}") for variant in by_need]
    # A refusal is already its reason for not serving.
    built = [
        Text(f"{variant.file}: {said.in_words}")
        for variant in manifest.variants
        if (said := variant.builder) is not None and said.in_words not in variant.reason
    ]
    verdict = verdict_of(manifest)
    sentence = Text(verdict.sentence, style="bold red" if verdict.tone == "alarm" else "bold")
    eight = [
        Text(f"{variant.file}: {'; '.join(filter(None, (variant.audit.share_in_words, variant.search)))}")
        for variant in manifest.variants
        if variant.audit and (variant.audit.share_in_words or variant.search)
    ]
    objections = [Text(f"published despite: {one}", style="bold red") for one in manifest.objections]
    lines = [*objections, *map(Text, manifest.set_lines), *reasons, *eight, *built, *_told(manifest)]
    if not is_verbose and len(lines) > _MOST_LINES:
        left = len(lines) - (_MOST_LINES - 1)
        lines = [*lines[: _MOST_LINES - 1], Text(f"{left} more lines with --verbose, and in report.html", style="dim")]
    return Group(Text(), sentence, Text(), table, Text(), *lines)


def _told(manifest: Manifest) -> list[Text]:
    """Further findings, a line each."""
    entry, said = manifest.provenance.weights_entry, manifest.provenance.preprocessing
    return [
        *([Text(f"scores: {manifest.scores}")] if manifest.scores else []),
        *([Text(f"weights: {entry}")] if entry else []),
        *([Text(f"preprocessing: {said}")] if said else []),
        *(Text(f"checked: {finding}") for finding in manifest.findings),
    ]


def _served(manifest: Manifest, variant: Variant) -> str:
    if not variant.serve:
        return "no"
    where = "yes" if variant.target in ON_CPU else "on GPU"
    return f"[bold red]{where}![/]" if manifest.objections else "[green]yes[/]" if variant.target in ON_CPU else where


def _score_heading(manifest: Manifest) -> str:
    """The metric; a name that would widen the table becomes "score", and the reasons below name it."""
    return manifest.heading if len(manifest.heading) <= 8 else "score"


def _accuracy(variant: Variant) -> tuple[str, str]:
    if variant.accuracy is None:
        return "-", "-" if variant.agreement is None else f"{100 * variant.agreement:.2f} %"
    return variant.accuracy.headline[1], f"{100 * variant.accuracy.agreement:.2f} %"


def _latency(variant: Variant) -> tuple[str, str]:
    table = fastest(variant)
    return ("-", "-") if table is None else (_ms(table.points[0]), _ms(table.points[-1]))


def _ms(point: LatencyPoint) -> str:
    """In about seven characters, for every network."""
    milliseconds = point.median_ms
    figure = f"{milliseconds:.{3 if milliseconds < 100 else 1 if milliseconds < 1e4 else 0}f}"
    return f"{figure}{BUSY_MARK}" if point.is_of_busy_machine else figure


def _speed(variant: Variant) -> str:
    table = fastest(variant)
    if table is None or table.speedup is None:
        return "-"
    return f"{table.speedup.median:.2f}x{BUSY_MARK * table.is_of_busy_machine}"
