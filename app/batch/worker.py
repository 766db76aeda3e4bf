"""One worker: an engine that has proved itself as a server's does, and parts to label until there are no more.

The same for a process of this machine, which is spoken to in lines of JSON (`main`), and for an actor on Ray.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from msgspec.json import decode, encode

from convoy.app.batch.job import output_index
from convoy.app.batch.labeller import LabelledRows, Labeller, LabelWishes, Unreadable
from convoy.app.batch.part_file import PartResults
from convoy.app.batch.reading import BatchImage, images_of
from convoy.app.batch.records import BatchJob, BatchPart, Fatal, Labelled, PartDone, Ready, Runner, Said
from convoy.app.config.settings import read_settings
from convoy.app.loading.load import LoadedModel, LoadOptions, ServedBefore, load
from convoy.app.server import logs
from convoy.models.errors import ConvoyError, JobError
from convoy.models.spec import ModelSpec
from convoy.models.store import Store

_TELL_EVERY_S = 0.25
END = b"end\n"


class OpenedModel(NamedTuple):
    """What a worker labels with."""

    labeller: Labeller
    spec: ModelSpec
    ready: Ready


class _Assigned:
    """The images of the parts that come in, one part after the other. None in the queue: no more will come."""

    def __init__(self, parts: queue.SimpleQueue[BatchPart | None], on_part: Callable[[BatchPart], None]) -> None:
        self._parts, self._on_part = parts, on_part
        self._current: Iterator[BatchImage] = iter(())
        self._has_ended = False

    def next(self, *, wait: bool) -> BatchImage | None:
        while (image := next(self._current, None)) is None:
            if self._has_ended:
                return None
            try:
                part = self._parts.get(block=wait)
            except queue.Empty:
                return None
            if part is None:
                self._has_ended = True
            else:
                self._on_part(part)
                self._current = images_of(part)
        return image


class PartsWorker:
    """Labels parts and writes them. `tell` hears how far it is."""

    def __init__(self, job: BatchJob, opened: OpenedModel, tell: Callable[[Said], None]) -> None:
        self._job, self._opened, self._tell = job, opened, tell
        self._results: dict[int, PartResults] = {}
        self._images = self._errors = 0
        self._told_s = 0.0

    def label(self, parts: queue.SimpleQueue[BatchPart | None]) -> None:
        """Until None comes. Raises JobError where the run cannot go on."""
        self._opened.labeller.run(_Assigned(parts, self._begin), self._take)
        self._tell_progress()

    def _begin(self, part: BatchPart) -> None:
        spec, embeddings = self._opened.spec, self._job.embeddings
        extra = None if embeddings is None else spec.outputs[output_index(spec, embeddings)]
        self._results[part.number] = PartResults(part, spec.labels, extra)

    def _take(self, result: LabelledRows | Unreadable) -> None:
        if isinstance(result, Unreadable):
            own = self._results[result.image.part.number]
            own.add_error(result)
            self._count(own, 1, 1)
            return
        numbers = np.array([image.part.number for image in result.images])
        for number in np.unique(numbers):
            own = self._results[int(number)]
            chosen = np.flatnonzero(numbers == number).tolist()
            self._count(own, len(chosen), own.add(result, chosen))

    def _count(self, results: PartResults, images: int, errors: int) -> None:
        self._images += images
        self._errors += errors
        if results.is_complete:
            part = results.part
            results.write(Path(self._job.out), self._job.run, self._opened.ready.runner)
            del self._results[part.number]
            self._tell_progress()
            self._tell(PartDone(part.number, part.images, results.errors))
        elif time.monotonic() - self._told_s > _TELL_EVERY_S:
            self._tell_progress()

    def _tell_progress(self) -> None:
        if self._images:
            self._tell(Labelled(self._images, self._errors))
        self._images = self._errors = 0
        self._told_s = time.monotonic()


def open_model(job: BatchJob) -> OpenedModel:
    """Load and prove the engine as a server does. Raises ConvoyError."""
    loaded = load(Store.at(Path(job.store)).version(job.model, job.version), _load_options(job))
    first = loaded.engines[0]
    info = first.info
    runner = Runner(info.engine, first.file, info.precision, info.device)
    _check_runner(job, runner, loaded)
    engines = [one.engine for one in loaded.engines if (one.info.engine, one.file) == (runner.engine, runner.file)]
    spec = loaded.spec
    batch_size = min(job.batch_size or spec.max_batch_size or 1, info.batch_sizes[-1])
    embeddings = None if job.embeddings is None else output_index(spec, job.embeddings)
    wishes = LabelWishes(job.top_k, embeddings, job.max_pixels)
    labeller = Labeller(engines, spec, wishes, batch_size=batch_size, decode_threads=job.threads)
    return OpenedModel(labeller, spec, Ready(runner, first.reason, batch_size))


def _load_options(job: BatchJob) -> LoadOptions:
    given = {"engine": job.engine, "precision": job.precision, "threads": job.threads}
    options = read_settings({**given, "max_batch": job.batch_size}).core_options().load
    gpus = options.machine.gpus
    if job.gpu is not None and gpus:
        gpus = (gpus[job.gpu % len(gpus)],)
        options = replace(options, machine=replace(options.machine, gpus=gpus))
    if job.runner is None:
        return options
    before = [ServedBefore(name, job.runner.engine, job.runner.file) for name in (*(gpu.name for gpu in gpus), "cpu")]
    return replace(options, before=tuple(before))


def _check_runner(job: BatchJob, runner: Runner, loaded: LoadedModel) -> None:
    """Rows of two engines in one run would differ by more than the order of images."""
    before = job.runner
    if before is None or (before.engine, before.file) == (runner.engine, runner.file):
        return
    for proved in loaded.engines:
        proved.engine.close()
    why = "; ".join(loaded.skipped) or "it is not chosen here"
    raise JobError(
        f"this run was begun by {before.words}, and here {runner.words} would go on ({why}); "
        f"ask for one of them by --engine and --precision with another --out"
    )


def main() -> int:
    """A process of `local`: a job and then parts come in as lines, what becomes of them goes out as lines."""
    said = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it tells it to end
    logs.configure("warning")
    lines = sys.stdin.buffer
    job = decode(lines.readline(), type=BatchJob)
    parts: queue.SimpleQueue[BatchPart | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines, parts), daemon=True).start()
    lock = threading.Lock()

    def tell(one: Said) -> None:
        with lock:
            said.write(encode(one) + b"\n")

    try:
        opened = open_model(job)
        tell(opened.ready)
        PartsWorker(job, opened, tell).label(parts)
    except ConvoyError as error:
        tell(Fatal(str(error)))
        return error.exit_code
    return 0


def _listen(lines: BinaryIO, parts: queue.SimpleQueue[BatchPart | None]) -> None:
    for line in lines:
        if line == END:
            parts.put(None)
            return
        parts.put(decode(line, type=BatchPart))
    logs.flush()
    os._exit(1)  # whoever started it is gone, and another may be at work in its place


if __name__ == "__main__":
    sys.exit(main())
