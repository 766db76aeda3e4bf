"""`convoy batch`: from the options to the last part, with progress.

Exit codes: 0 done, although some images may be unreadable; 1 the job failed, or no image could be read; 2 wrong usage.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn

from convoy.app.batch.inputs import BatchInputs
from convoy.app.batch.job import BatchModel, BatchOptions, find_model, workers_for
from convoy.app.batch.records import BatchJob, BatchPart, Labelled, Ready, RunFile, RunIdentity
from convoy.app.batch.results import (
    ERRORS,
    begin_or_go_on,
    own_folder,
    parts_done,
    remove_leftovers,
    write_errors,
    write_run_file,
)
from convoy.app.batch.workers import LocalWorkers, run_on_ray
from convoy.app.config.settings import Settings
from convoy.models.errors import JobError
from convoy.models.spec import ModelSpec
from convoy.models.store import DEMO_STORE

_CLASSES = 5  # per image, by default


def run(options: BatchOptions, console: Console) -> int:
    """Run the command. Returns the exit code. Raises ConvoyError, whose message says what to do."""
    settings = options.checked()
    model = find_model(options)
    for sentence in (*model.passed_over, *model.bundle.manifest.objections):
        _print(console, f"{options.name}: {sentence}")
    base = str(Path.cwd())
    inputs = BatchInputs(options.inputs, options.column)
    with own_folder(options.out):
        remove_leftovers(options.out)
        part_images = inputs.part_images(max(1, model.bundle.manifest.spec.max_batch_size))
        run_file = begin_or_go_on(options.out, _identity(options, model, inputs, base), part_images)
        return _label(options, settings, run_file, inputs.parts(run_file.part_images, base), console)


def _label(
    options: BatchOptions, settings: Settings, run_file: RunFile, parts: list[BatchPart], console: Console
) -> int:
    """Label the remaining images, in a folder that this process has locked. Returns the exit code."""
    done = parts_done(options.out, run_file, parts)
    todo = [part for part in parts if part.number not in done]
    total = sum(part.images for part in parts)
    images = sum(record.images for record in done.values())
    errors = sum(len(record.errors) for record in done.values())
    if done:
        _print(console, f"resuming: {images:,} of {total:,} images are done")
    with BatchProgress(console, total, images, errors) as progress:
        try:
            if todo:
                with _sigterm_as_ctrl_c(), closing(_events(options, settings, run_file, todo)) as events:
                    _follow(events, progress, options.out, run_file, console)
        except KeyboardInterrupt:
            raise JobError(
                f"stopped with {progress.images:,} of {total:,} images labelled; run the same command to resume"
            ) from None
        finally:
            remove_leftovers(options.out)
            unreadable = write_errors(options.out, parts_done(options.out, run_file, parts).values())
    labelled = total - unreadable
    _print(console, f"{progress.summary()}; {labelled:,} labelled, in {options.out}/part-*.parquet")
    if unreadable:
        _print(console, f"{unreadable:,} could not be read; {options.out}/{ERRORS} has the reasons")
    return 0 if labelled else 1


def _events(
    options: BatchOptions, settings: Settings, run_file: RunFile, todo: list[BatchPart]
) -> Generator[Ready | Labelled | None]:
    """The reports of workers, here or on Ray."""
    store, out = (options.store or DEMO_STORE).absolute(), options.out.absolute()
    job = BatchJob(str(store), str(out), run_file, options.batch_size)
    if options.ray is not None:
        yield from run_on_ray(options.ray, job, todo, options.workers)
        return
    gpus = len(settings.core_options().load.machine.gpus)
    workers = min(options.workers or workers_for(gpus), len(todo))
    yield from LocalWorkers(job, todo, workers, shares_gpus=gpus > 0).run()


def _follow(
    events: Iterator[Ready | Labelled | None], progress: BatchProgress, out: Path, run_file: RunFile, console: Console
) -> None:
    """Show progress. The first worker decides which engine labels, for this run and its continuations."""
    for event in events:
        if isinstance(event, Labelled):
            progress.add(event.images, event.errors)
        elif event is not None:
            progress.begin()
            if run_file.runner is None:
                runner, model = event.runner, run_file.identity
                run_file = run_file.labelled_by(runner)
                write_run_file(out, run_file)
                _print(
                    console,
                    f"{model.model} version {model.version} on {runner.engine} {runner.precision}, "
                    f"{runner.device}, in batches of {event.batch_size} ({event.reason})",
                )
        progress.tick()


def _identity(options: BatchOptions, model: BatchModel, inputs: BatchInputs, base: str) -> RunIdentity:
    return RunIdentity(
        model=options.name,
        version=model.version,
        bundle=model.sha256,
        engine=options.engine,
        precision=options.precision,
        top_k=options.top_k or _default_top_k(model.bundle.manifest.spec),
        threshold=options.threshold,
        embeddings=options.embeddings,
        max_pixels=options.max_pixels,
        inputs=inputs.digest(base),
        images=inputs.images,
    )


def _default_top_k(spec: ModelSpec) -> int:
    return _CLASSES if spec.detection is None else spec.detection.max_boxes


def _print(console: Console, line: str) -> None:
    """Print text unchanged and in one line, even if the output is redirected to a file: it contains users' names."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class BatchProgress:
    """Progress of `total` images, `done` of them in an earlier run. Use it as a context manager and call `tick`
    regularly.
    """

    def __init__(self, console: Console, total: int, done: int, errors: int) -> None:
        self._console, self._total, self._before = console, total, done
        self.images, self.errors = done, errors
        self._began_s, self._has_begun = time.monotonic(), False
        self._next_line_s = self._began_s + 10.0
        columns = TextColumn("{task.description}"), BarColumn(bar_width=30)
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar.add_task("", total=total, completed=done)
        self.tick()

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self) -> None:
        """Start the clock: an engine is ready."""
        if not self._has_begun:
            self._has_begun, self._began_s = True, time.monotonic()

    def add(self, images: int, errors: int) -> None:
        """Count more images; negative if some must be repeated."""
        self.images += images
        self.errors += errors

    def tick(self) -> None:
        (task,) = self._bar.tasks
        self._bar.update(task.id, description=self._words(task), completed=self.images)
        now_s = time.monotonic()
        if self._bar.disable and now_s >= self._next_line_s:
            self._next_line_s = now_s + 10.0
            self._console.print(self._words(task), highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """What this run has done, and how fast."""
        seconds = time.monotonic() - self._began_s
        labelled = self.images - self._before
        rate = labelled / max(seconds, 1e-9)
        return f"{labelled:,} images in {duration(seconds)} ({rate:,.{0 if rate >= 100 else 1}f}/s)"

    def _words(self, task: Task) -> str:
        errors = f", {self.errors:,} unreadable" if self.errors else ""
        # The rate of the last 30 s, because the first images wait for an engine and the disk cache.
        rate, left_s = task.speed, task.time_remaining
        pace = f"{rate:,.0f}/s, {duration(left_s)} left" if rate and left_s is not None else "loading"
        return f"{self.images:,} of {self._total:,} images{errors}, {pace}"


def duration(seconds: float) -> str:
    """Format a duration in two units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
