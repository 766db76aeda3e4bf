"""`convoy batch`: from the options to the last part, and what is printed on the way.

Exit codes: 0 done, some images may be unreadable; 1 it could not be done, or not one image could be read; 2 wrong call.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from convoy.app.batch.inputs import BatchInputs
from convoy.app.batch.job import BatchModel, BatchOptions, find_model, share_of_cpus, workers_for
from convoy.app.batch.local import LocalWorkers
from convoy.app.batch.on_ray import run_on_ray
from convoy.app.batch.records import BatchJob, BatchPart, Labelled, Ready, RunFile, RunIdentity
from convoy.app.batch.results import (
    ERRORS,
    PartFileRecord,
    begin_or_go_on,
    name_of,
    own_folder,
    read_record,
    remove_leftovers,
    write_errors,
    write_run_file,
)
from convoy.app.config.settings import Settings
from convoy.models.errors import JobError
from convoy.models.store import DEMO_STORE


class _Terminated(Exception):
    """SIGTERM has come."""


def run(options: BatchOptions, console: Console) -> int:
    """The exit code. Raises ConvoyError, whose message says what to do."""
    settings = options.checked()
    model = find_model(options)
    for sentence in (*model.passed_over, *model.bundle.manifest.objections):
        _print(console, f"{options.name}: {sentence}")
    base = str(Path.cwd())
    inputs = BatchInputs(options.inputs, options.column)
    with own_folder(options.out):
        remove_leftovers(options.out)
        part_images = inputs.part_images(max(1, model.spec.max_batch_size))
        run_file = begin_or_go_on(options.out, _identity(options, model, inputs, base), part_images)
        return _Batch(options, settings, run_file, inputs.parts(run_file.part_images, base), console).to_end()


class _Batch:
    """One run of the command on a folder that is its own."""

    def __init__(
        self, options: BatchOptions, settings: Settings, run_file: RunFile, parts: list[BatchPart], console: Console
    ) -> None:
        self._options, self._settings = options, settings
        self._run, self._parts, self._console = run_file, parts, console

    def to_end(self) -> int:
        options, console = self._options, self._console
        done = self._records_on_disk()
        todo = [part for part in self._parts if part.number not in done]
        total = sum(part.images for part in self._parts)
        images = sum(record.images for record in done.values())
        errors = sum(len(record.errors) for record in done.values())
        if done:
            _print(console, f"going on: {images:,} of {total:,} images are done")
        with BatchProgress(console, total, images, errors) as progress:
            try:
                if todo:
                    with _sigterm_raises(), closing(self._label(todo)) as events:
                        self._show(events, progress)
            except (KeyboardInterrupt, _Terminated):
                raise JobError(
                    f"stopped with {progress.images:,} of {total:,} images labelled; the same command goes on"
                ) from None
            finally:
                unreadable = write_errors(options.out, self._records_on_disk().values())
        labelled = total - unreadable
        _print(console, f"{progress.summary()}; {labelled:,} labelled, in {options.out}/part-*.parquet")
        if unreadable:
            _print(console, f"{unreadable:,} could not be read; why stands in {options.out}/{ERRORS}")
        return 0 if labelled else 1

    def _label(self, todo: list[BatchPart]) -> Generator[Ready | Labelled | None]:
        options = self._options
        if options.ray is not None:
            yield from run_on_ray(options.ray, self._job(1), todo, options.workers)
            return
        gpus = len(self._settings.core_options().load.machine.gpus)
        workers = min(options.workers or workers_for(gpus), len(todo))
        yield from LocalWorkers(self._job(workers), todo, workers, shares_gpus=gpus > 0).run()

    def _job(self, workers: int) -> BatchJob:
        options = self._options
        store = str((options.store or DEMO_STORE).absolute())
        out = str(options.out.absolute())
        return BatchJob(store, out, self._run, options.batch_size, share_of_cpus(workers))

    def _show(self, events: Iterator[Ready | Labelled | None], progress: BatchProgress) -> None:
        for event in events:
            if isinstance(event, Ready):
                progress.begin()
                self._keep_runner(event)
            elif isinstance(event, Labelled):
                progress.add(event.images, event.errors)
            progress.tick()

    def _keep_runner(self, ready: Ready) -> None:
        """The first worker settles which engine labels, for this run and those that go on with it."""
        if self._run.runner is None:
            runner, model = ready.runner, self._run.identity
            self._run = self._run.labelled_by(runner)
            write_run_file(self._options.out, self._run)
            _print(
                self._console,
                f"{model.model} version {model.version} on {runner.engine} {runner.precision}, "
                f"{runner.device}, in batches of {ready.batch_size} ({ready.reason})",
            )

    def _records_on_disk(self) -> dict[int, PartFileRecord]:
        """The parts that are done. Raises JobError for one of another run."""
        found: dict[int, PartFileRecord] = {}
        for part in self._parts:
            path = self._options.out / name_of(part.number)
            if not path.exists():
                continue
            record = read_record(path)
            own = self._run.digest, part.number, part.images
            if record is None or (record.run, record.number, record.images) != own:
                raise JobError(f"{path} is not of this run; remove it, or choose another --out")
            found[part.number] = record
        return found


def _identity(options: BatchOptions, model: BatchModel, inputs: BatchInputs, base: str) -> RunIdentity:
    return RunIdentity(
        model=options.name,
        version=model.version,
        bundle=model.sha256,
        engine=options.engine,
        precision=options.precision,
        top_k=options.top_k,
        embeddings=options.embeddings,
        max_pixels=options.max_pixels,
        inputs=inputs.digest(base),
        images=inputs.images,
    )


def _print(console: Console, line: str) -> None:
    """As it is, and in one line also where the output goes into a file: it has names of others."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends a run in good order, as Ctrl-C does."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class BatchProgress:
    """Of `total` images, `done` before this began. Use it as a context; `tick` now and then."""

    def __init__(self, console: Console, total: int, done: int, errors: int) -> None:
        self._console, self._total, self._before = console, total, done
        self.images, self.errors = done, errors
        self._began_s, self._has_begun = time.monotonic(), False
        self._lately: deque[tuple[float, int]] = deque([(self._began_s, done)])
        self._next_line_s = self._began_s + 10.0
        self._bar = (
            Progress(TextColumn("{task.description}"), BarColumn(bar_width=30), console=console, transient=True)
            if console.is_terminal
            else None
        )
        self._task = self._bar.add_task(self._words(), total=total, completed=done) if self._bar else None

    def __enter__(self) -> BatchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self) -> None:
        """The clock runs from here: an engine is ready."""
        if not self._has_begun:
            self._has_begun, self._began_s = True, time.monotonic()

    def add(self, images: int, errors: int) -> None:
        """More images are done; negative where some have to be done again."""
        self.images += images
        self.errors += errors

    def tick(self) -> None:
        now_s = time.monotonic()
        self._lately.append((now_s, self.images))
        # The rate of the last 30 s: the first images wait for an engine and the disk's cache.
        while now_s - self._lately[0][0] > 30.0 and len(self._lately) > 2:
            self._lately.popleft()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=self._words(), completed=self.images)
        elif now_s >= self._next_line_s:
            self._next_line_s = now_s + 10.0
            self._console.print(self._words(), highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """What this run has done, and how fast."""
        seconds = time.monotonic() - self._began_s
        labelled = self.images - self._before
        rate = labelled / max(seconds, 1e-9)
        return f"{labelled:,} images in {duration(seconds)} ({rate:,.{0 if rate >= 100 else 1}f}/s)"

    def _words(self) -> str:
        errors = f", {self.errors:,} unreadable" if self.errors else ""
        return f"{self.images:,} of {self._total:,} images{errors}, {self._pace()}"

    def _pace(self) -> str:
        (then_s, then), (now_s, now) = self._lately[0], self._lately[-1]
        if now <= then or now_s <= then_s:
            return "loading"
        rate = (now - then) / (now_s - then_s)
        return f"{rate:,.0f}/s, {duration((self._total - now) / rate)} left"


def duration(seconds: float) -> str:
    """Two units of it."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
