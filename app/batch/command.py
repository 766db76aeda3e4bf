"""`convoy batch`: from the options to the last part, and what is told on the way.

Exit codes: 0 done, some images may be unreadable; 1 it could not be done, or not one image could be read; 2 wrong call.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rich.console import Console

from convoy.app.batch.inputs import BatchInputs
from convoy.app.batch.job import BatchModel, BatchOptions, find_model, share_of_cpus, workers_for
from convoy.app.batch.local import LocalWorkers
from convoy.app.batch.on_ray import run_on_ray
from convoy.app.batch.part_file import ERRORS, PartFileRecord, name_of, read_record, remove_leftovers, write_errors
from convoy.app.batch.progress import BatchProgress
from convoy.app.batch.records import BatchJob, BatchPart, Labelled, PartDone, Ready
from convoy.app.batch.run_file import RunFile, RunIdentity, begin_or_go_on, own_folder, write_run_file
from convoy.app.config.settings import Settings
from convoy.models.errors import JobError
from convoy.models.store import DEMO_STORE

# What is printed are names of others', whole, also where it goes into a file.
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}


class _Told(Exception):
    """A signal asked for the end."""


def run(options: BatchOptions, console: Console) -> int:
    """The exit code. Raises ConvoyError, whose message says what to do."""
    settings = options.checked()
    model = find_model(options)
    for sentence in (*model.passed_over, *model.bundle.manifest.objections):
        console.print(f"{options.name}: {sentence}", **_PLAIN)
    base = str(Path.cwd())
    inputs = BatchInputs(options.inputs, options.column)
    with own_folder(options.out):
        remove_leftovers(options.out)
        batch = max(1, model.spec.max_batch_size)
        run_file = begin_or_go_on(options.out, _identity(options, model, inputs, base), inputs.part_images(batch))
        return _Batch(options, settings, model, run_file, inputs.parts(run_file.part_images, base), console).to_end()


class _Batch:
    """One run of the command on a folder that is its own."""

    def __init__(
        self,
        options: BatchOptions,
        settings: Settings,
        model: BatchModel,
        run_file: RunFile,
        parts: list[BatchPart],
        console: Console,
    ) -> None:
        self._options, self._settings, self._model = options, settings, model
        self._run, self._parts, self._console = run_file, parts, console
        self._done = self._records_on_disk()

    def to_end(self) -> int:
        options, console = self._options, self._console
        todo = [part for part in self._parts if part.number not in self._done]
        total = sum(part.images for part in self._parts)
        images = sum(record.images for record in self._done.values())
        errors = sum(len(record.errors) for record in self._done.values())
        if self._done:
            console.print(f"going on: {images:,} of {total:,} images are done", **_PLAIN)
        with BatchProgress(console, total, images, errors) as progress:
            try:
                with _told_to_end():
                    self._label(todo, progress)
            except (KeyboardInterrupt, _Told):
                raise JobError(
                    f"stopped with {progress.images:,} of {total:,} images labelled; the same command goes on"
                ) from None
            finally:
                unreadable = self._write_errors()
        labelled = total - unreadable
        console.print(f"{progress.summary()}; {labelled:,} labelled, in {options.out}/part-*.parquet", **_PLAIN)
        if unreadable:
            console.print(f"{unreadable:,} could not be read; why stands in {options.out}/{ERRORS}", **_PLAIN)
        return 0 if labelled else 1

    def _label(self, todo: list[BatchPart], progress: BatchProgress) -> None:
        if not todo:
            return

        def tell(said: Labelled | PartDone) -> None:
            if isinstance(said, Labelled):
                progress.add(said.images, said.errors)

        def is_ready(ready: Ready) -> None:
            progress.begin()
            self._is_ready(ready)

        if self._options.ray is not None:
            run_on_ray(
                *(self._options.ray, self._job(1), todo, self._options.workers),
                on_ready=is_ready,
                tell=tell,
                tick=progress.tick,
            )
            return
        gpus = len(self._settings.core_options().load.machine.gpus)
        workers = min(self._options.workers or workers_for(gpus), len(todo))
        LocalWorkers(
            *(self._job(workers), todo, workers),
            shares_gpus=gpus > 0,
            on_ready=is_ready,
            tell=tell,
            tick=progress.tick,
        ).run()

    def _job(self, workers: int) -> BatchJob:
        options = self._options
        return BatchJob(
            store=str((options.store or DEMO_STORE).absolute()),
            model=options.name,
            version=self._model.version,
            engine=options.engine,
            precision=options.precision,
            out=str(options.out.absolute()),
            run=self._run.digest,
            top_k=options.top_k,
            embeddings=options.embeddings,
            batch_size=options.batch_size,
            threads=share_of_cpus(workers),
            max_pixels=options.max_pixels,
            runner=self._run.runner,
        )

    def _is_ready(self, ready: Ready) -> None:
        """Which engine labels is settled by the first one, and kept for those who go on."""
        if self._run.runner is None:
            self._run = msgspec.structs.replace(self._run, runner=ready.runner)
            write_run_file(self._options.out, self._run)
            runner = ready.runner
            self._console.print(
                f"{self._options.name} version {self._model.version} on {runner.engine} {runner.precision}, "
                f"{runner.device}, in batches of {ready.batch_size} ({ready.reason})",
                **_PLAIN,
            )

    def _records_on_disk(self) -> dict[int, PartFileRecord]:
        """The parts that are done. Raises JobError for one of another run."""
        found: dict[int, PartFileRecord] = {}
        for part in self._parts:
            path = self._options.out / name_of(part.number)
            if not path.exists():
                continue
            record = read_record(path)
            if record is None or (record.run, record.number, record.images) != (
                self._run.digest,
                part.number,
                part.images,
            ):
                raise JobError(f"{path} is not of this run; remove it, or choose another --out")
            found[part.number] = record
        return found

    def _write_errors(self) -> int:
        records = self._records_on_disk()
        return write_errors(self._options.out, (records[number] for number in sorted(records)))


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


@contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM ends a run in good order, as Ctrl-C does."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _Told

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
