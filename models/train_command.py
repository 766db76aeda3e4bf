"""The console output of `convoy train`: a progress bar, and the result."""

from __future__ import annotations

import statistics

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from convoy.models.checkpoint import CheckpointHeader
from convoy.models.errors import JobError
from convoy.models.page.axis import number
from convoy.models.train import Compared, Report, TrainProgress, TrainResult, compare, train
from convoy.models.train_options import TrainOptions
from convoy.models.training import words
from convoy.models.training.epochs import EpochRecord
from convoy.models.training.variants import TrainingVariant


def run(options: TrainOptions, variants: tuple[str, ...] | None, console: Console) -> None:
    """Train once, or each of `variants` once. Raises UsageError, and JobError if the job fails or is interrupted; the
    best epoch so far is kept.
    """
    try:
        with _bars(console) as bars:
            if variants is None:
                result = train(options, _reporter(bars))
                comparison = None
            else:
                comparison = compare(options, variants, _reporter(bars))
    except KeyboardInterrupt:
        raise JobError(f"interrupted; nothing was written to {options.out}; run the command again") from None
    if comparison is not None:
        console.print(comparison_table(comparison))
        return
    if result.skipped:
        _say(console, f"{len(result.skipped)} broken images were left out; the first: {result.skipped[0]}")
    if result.is_interrupted:
        raise JobError(_what_is_kept(result))
    _say(
        console,
        f"{_quality(result.header.test_accuracy, 'test', result.header)}, after {result.total_s:.0f} s on "
        f"{result.device} in {result.precision}; written to {result.out}",
    )
    _say(console, _cost(result))
    if result.page is not None:
        _say(console, f"how it learned: {result.page}")
    if result.kept.validation_accuracy is not None:
        _say(
            console,
            f"the weights are those of epoch {result.kept.epoch} of {len(result.epochs)}, the best: "
            f"{_quality(result.kept.validation_accuracy, 'validation', result.header)}",
        )


def _quality(share: float, part: str, header: CheckpointHeader) -> str:
    """How good the network is on a part."""
    if header.task == "classify":
        return f"{100 * share:.2f} % of the {part} images are right"
    return f"{header.measure} {share:.3f} on the {part} images"


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _cost(result: TrainResult) -> str:
    epochs = result.epochs
    speed = statistics.median(one.images_per_s for one in epochs)
    return (
        f"an epoch took {number(result.epoch_s)} s, {number(speed)} images/s; peak memory "
        f"{words.memory(words.peak_memory_bytes(epochs))}; energy {words.energy(words.total_energy_j(epochs))}"
    )


def _what_is_kept(result: TrainResult) -> str:
    assert result.header.training is not None
    kept, accuracy = result.kept, result.kept.validation_accuracy
    best = f"its weights ({_quality(result.header.test_accuracy, 'test', result.header)}) are"
    if accuracy is not None:
        best = f"the best, epoch {kept.epoch} ({_quality(accuracy, 'validation', result.header)}), is"
    return (
        f"interrupted after epoch {len(result.epochs)} of {result.header.training.epochs}; {best} kept in "
        f"{result.out}; run the same command with --resume to continue"
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
        if progress.says:
            _say(bars.console, progress.says)
            return
        bars.update(
            task, description=progress.stage, completed=progress.done, total=progress.total, loss=_seen(progress.last)
        )

    return report


def _seen(last: EpochRecord | None) -> str:
    if last is None:
        return ""
    right = "" if last.validation_accuracy is None else f", {100 * last.validation_accuracy:.2f} % right"
    return f"loss {last.loss:.4f}{right}"


def comparison_table(rows: tuple[Compared, ...]) -> Table:
    """A row per variant, at most 80 columns wide, and below it why one could not be trained."""
    # Headings are broken to leave room for the figures.
    table = Table(*_HEADINGS, box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for column in table.columns:
        column.no_wrap = True
    trained = [row.result for row in rows if row.result is not None]
    for row in rows:
        table.add_row(*(_unavailable(row.variant) if row.result is None else _figures(row.result, trained[0])))
    reasons = [f"{row.variant}: {row.unavailable}" for row in rows if row.result is None]
    if reasons:
        table.caption = Text("\n".join(reasons))
        table.caption_justify = "left"
    return table


_HEADINGS = (
    *("device", "preci-\nsion", "layout", "com-\npiled", "test\naccuracy", "s /\nepoch", "images\n/ s"),
    *("peak\nMiB", "energy,\nJ", "speed"),
)


def _unavailable(variant: TrainingVariant) -> tuple[str, ...]:
    run = {"compiled": "yes", "eager": "no", None: "-"}[variant.run]
    return (variant.device, variant.precision or "-", variant.layout or "-", run, *["-"] * 6)


def _figures(result: TrainResult, first: TrainResult) -> tuple[str, ...]:
    epochs = result.epochs
    peak_bytes, energy_j = words.peak_memory_bytes(epochs), words.total_energy_j(epochs)
    return (
        result.device,
        result.precision,
        result.layout,
        "yes" if result.is_compiled else "no",
        f"{100 * result.header.test_accuracy:.2f} %",
        number(result.epoch_s),
        number(statistics.median(one.images_per_s for one in epochs)),
        words.NOT_KNOWN if peak_bytes is None else number(peak_bytes / 2**20),
        words.NOT_KNOWN if energy_j is None else number(energy_j),
        f"{number(first.epoch_s / result.epoch_s)}x",
    )
