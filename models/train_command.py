"""What the user sees of `convoy train`: a bar while it runs, and what came out.

Knows rich and the recipe's reports. Trains nothing itself.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from convoy.models.errors import JobError
from convoy.models.train import DeviceComparison, Report, TrainProgress, TrainResult, compare, train
from convoy.models.train_options import TrainOptions


def run(options: TrainOptions, devices: tuple[str, ...] | None, console: Console) -> None:
    """Train once, or once on each of `devices`. Raises UsageError and JobError, the latter for an interrupt, too."""
    try:
        with _bars(console) as bars:
            if devices is None:
                result = train(options, _reporter(bars))
                comparison = None
            else:
                comparison = compare(options, devices, _reporter(bars))
    except KeyboardInterrupt:
        raise JobError(f"interrupted; nothing was written to {options.out}; run the command again") from None
    if comparison is not None:
        console.print(_comparison_table(comparison))
        return
    if result.skipped:
        console.print(f"{len(result.skipped)} broken images were left out; the first: {result.skipped[0]}")
    accuracy = 100 * result.header.test_accuracy
    console.print(
        f"{accuracy:.2f} % of the test images are right, after {result.total_s:.0f} s on {result.device} "
        f"in {result.precision}; written to {result.out}",
        soft_wrap=True,
        highlight=False,
    )


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
        disable=not console.is_terminal,
    )


def _reporter(bars: Progress) -> Report:
    task = bars.add_task("starting", total=None, loss="")

    def report(progress: TrainProgress) -> None:
        loss = "" if progress.loss is None else f"loss {progress.loss:.4f}"
        bars.update(task, description=progress.stage, completed=progress.done, total=progress.total, loss=loss)

    return report


def _comparison_table(rows: tuple[DeviceComparison, ...]) -> Table:
    table = Table("device", "precision", "test accuracy", "s / epoch", "total s", "speed")
    trained = [row.result for row in rows if row.result is not None]
    for row in rows:
        if row.result is None:
            table.add_row(row.device, "-", str(row.unavailable), "-", "-", "-")
        else:
            table.add_row(row.device, *_figures(row.result, trained[0]))
    return table


def _figures(result: TrainResult, first: TrainResult) -> tuple[str, ...]:
    return (
        result.precision,
        f"{100 * result.header.test_accuracy:.2f} %",
        f"{result.epoch_s:.3f}",
        f"{result.total_s:.1f}",
        f"{first.epoch_s / result.epoch_s:.2f}x",
    )
