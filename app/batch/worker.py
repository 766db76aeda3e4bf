"""One worker: an engine that is proved as on a server, and parts to label until there are no more.

The same for a local process (`main`) and for an actor on Ray.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from convoy.app.batch.inputs import BatchImage, images_of
from convoy.app.batch.job import output_index
from convoy.app.batch.labeller import Labeller, Result, Unreadable
from convoy.app.batch.records import BatchJob, BatchPart, Fatal, Labelled, PartDone, Ready, Report, Runner
from convoy.app.batch.results import PartResults
from convoy.app.config.settings import read_settings
from convoy.app.loading.load import LoadedModel, LoadOptions, ServedBefore, load
from convoy.app.server import logs
from convoy.models.errors import ConvoyError, JobError
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.store import Store


class OpenedModel(NamedTuple):
    """The model that a worker labels with. `embeddings` is the output that is kept whole."""

    labeller: Labeller
    spec: ModelSpec
    embeddings: TensorSpec | None
    ready: Ready


class PartsWorker:
    """Labels parts and writes them. `report` is called with progress."""

    def __init__(self, job: BatchJob, opened: OpenedModel, report: Callable[[Report], None]) -> None:
        self._job, self._opened, self._report = job, opened, report
        self._results: dict[int, PartResults] = {}
        self._images = self._errors = 0
        self._reported_s = 0.0

    def label(self, parts: SimpleQueue[BatchPart | None]) -> None:
        """Label parts until None comes. Raises JobError if the run cannot continue."""
        self._opened.labeller.run(self._pieces(parts), self._take)
        self._report_progress()

    def _pieces(self, parts: SimpleQueue[BatchPart | None]) -> Iterator[list[BatchImage]]:
        labeller, spec, embeddings, _ = self._opened
        while True:
            if parts.empty():
                yield []  # the next part may come only after an earlier one is done
            part = parts.get()
            if part is None:
                return
            self._results[part.number] = PartResults(
                part, spec.labels, embeddings, has_boxes=spec.detection is not None
            )
            images = images_of(part)
            while piece := list(islice(images, labeller.piece_images)):
                yield piece

    def _take(self, result: Result) -> None:
        images = [result.image] if isinstance(result, Unreadable) else result.images
        part = images[0].part
        own = self._results[part.number]
        before = own.errors
        own.add(result)
        self._images += len(images)
        self._errors += own.errors - before
        if own.is_complete:
            own.write(Path(self._job.out), self._job.run.digest, self._opened.ready.runner)
            del self._results[part.number]
            self._report_progress()
            self._report(PartDone(part.number, part.images, own.errors))
        elif time.monotonic() - self._reported_s > 0.25:
            self._report_progress()

    def _report_progress(self) -> None:
        if self._images:
            self._report(Labelled(self._images, self._errors))
        self._images = self._errors = 0
        self._reported_s = time.monotonic()


def open_model(job: BatchJob) -> OpenedModel:
    """Load and prove the engine as a server does. Raises ConvoyError."""
    run = job.run.identity
    loaded = load(Store.at(Path(job.store)).version(run.model, run.version), _load_options(job))
    first = loaded.engines[0]
    info = first.info
    runner = Runner(info.engine, first.file, info.precision, info.device)
    _check_runner(job.run.runner, runner, loaded)
    spec = loaded.spec
    batch_size = min(job.batch_size or spec.max_batch_size or 1, info.batch_sizes[-1])
    embeddings = None if run.embeddings is None else output_index(spec, run.embeddings)
    labeller = Labeller(
        [one.engine for one in loaded.engines if (one.info.engine, one.file) == (runner.engine, runner.file)],
        spec,
        top_k=run.top_k,
        threshold=run.threshold,
        embeddings=embeddings,
        max_pixels=run.max_pixels,
        batch_size=batch_size,
        decode_threads=job.threads,
    )
    kept = None if embeddings is None else spec.outputs[embeddings]
    return OpenedModel(labeller, spec, kept, Ready(runner, first.reason, batch_size))


def _load_options(job: BatchJob) -> LoadOptions:
    run, before = job.run.identity, job.run.runner
    given = {"engine": run.engine, "precision": run.precision, "threads": job.threads}
    options = read_settings({**given, "max_batch": job.batch_size}).core_options().load
    gpus = options.machine.gpus
    if job.gpu is not None and gpus:
        gpus = (gpus[job.gpu % len(gpus)],)
        options = replace(options, machine=replace(options.machine, gpus=gpus))
    if before is None:
        return options
    devices = (*(gpu.name for gpu in gpus), "cpu")
    return replace(options, before=tuple(ServedBefore(name, before.engine, before.file) for name in devices))


def _check_runner(before: Runner | None, runner: Runner, loaded: LoadedModel) -> None:
    """Refuse to label one run with two engines, whose scores would differ. Raises JobError."""
    if before is None or (before.engine, before.file) == (runner.engine, runner.file):
        return
    for proved in loaded.engines:
        proved.engine.close()
    why = "; ".join(loaded.skipped) or "not chosen here"
    raise JobError(
        f"this run was started with {before.words}, but here it would continue with {runner.words} ({why}); "
        "select one with --engine and --precision and another --out"
    )


def main() -> None:
    """A process of `workers`: receives a job and then parts over a connection, and sends reports, until the command
    ends it.
    """
    os.dup2(2, 1)  # what libraries print must not mix with results
    logs.configure("warning")
    command = Connection(int(sys.argv[1]))
    job: BatchJob = command.recv()
    parts: SimpleQueue[BatchPart | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(command, parts), daemon=True).start()
    try:
        opened = open_model(job)
        command.send(opened.ready)
        PartsWorker(job, opened, command.send).label(parts)
    except ConvoyError as error:
        command.send(Fatal(str(error)))


def _listen(command: Connection, parts: SimpleQueue[BatchPart | None]) -> None:
    with suppress(EOFError, OSError):
        while True:
            parts.put(command.recv())
    logs.flush()
    os._exit(1)  # the command is gone, and another may already use its folder


if __name__ == "__main__":
    main()
