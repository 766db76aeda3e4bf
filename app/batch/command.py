"""`convoy batch`: from the options to the last part, and what is printed on the way.

Exit codes: 0 done, some images may be unreadable; 1 it could not be done, or not one image could be read; 2 wrong call.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from convoy.app.batch.inputs import BatchInputs
from convoy.app.batch.job import BatchModel, BatchOptions, find_model, share_of_cpus, workers_for
from convoy.app.batch.local import LocalWorkers
from convoy.app.batch.on_ray import run_on_ray
from convoy.app.batch.part_file import ERRORS, PartFileRecord, name_of, read_record, remove_leftovers, write_errors
from convoy.app.batch.progress import BatchProgress
from convoy.app.batch.records import BatchJob, BatchPart, Labelled, Ready, RunFile, RunIdentity
from convoy.app.batch.run_file import begin_or_go_on, own_folder, write_run_file
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
