"""Workers that label parts: several local processes, or actors on a Ray cluster.

Assigns parts to workers and reassigns those of a worker that dies; `worker` processes a part. On Ray a part is a row of
Ray Data. Actors read images and write results themselves, so only names pass through Ray's memory; inputs and --out
must be accessible on every node.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from typing import Any

import numpy as np
from msgspec.json import decode, encode
from msgspec.structs import replace

from convoy.app.batch.job import share_of_cpus
from convoy.app.batch.records import BatchJob, BatchPart, Fatal, Labelled, PartDone, Ready, Report
from convoy.app.batch.worker import PartsWorker, open_model
from convoy.app.engines.table import may_use_gpus
from convoy.models.checkout import IMPORT_ROOT, pip_install
from convoy.models.errors import ConvoyError, JobError, UsageError


class _Worker:
    """A process. `parts` are those that are not done; `images` and `errors` are what it has reported for them."""

    def __init__(self, job: BatchJob, number: int) -> None:
        self.number = number
        self.parts: dict[int, BatchPart] = {}
        self.images = self.errors = 0
        self.connection, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "convoy.app.batch.worker", str(theirs.fileno())]
        # A session of its own, so that Ctrl-C only reaches this process.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=_environment(), start_new_session=True
        )
        theirs.close()  # close ours, so that the worker's end closes the connection
        self._send(job)

    def give(self, part: BatchPart) -> None:
        self.parts[part.number] = part
        self._send(part)

    def _send(self, what: BatchJob | BatchPart) -> None:
        with suppress(OSError):  # it has died, as the closed connection shows
            self.connection.send(what)

    def kill(self) -> None:
        self._process.kill()
        self.exit_code()

    def exit_code(self) -> int:
        """The exit code of a worker that has ended or is about to."""
        self.connection.close()
        return self._process.wait()


class LocalWorkers:
    """Labels parts with several processes. With `shares_gpus` each has its own GPU."""

    def __init__(self, job: BatchJob, parts: Sequence[BatchPart], workers: int, *, shares_gpus: bool) -> None:
        self._job = replace(job, threads=share_of_cpus(workers))
        self._todo, self._most = deque(parts), workers
        self._shares_gpus = shares_gpus
        self._workers: dict[Connection, _Worker] = {}
        self._deaths = 0

    def run(self) -> Iterator[Ready | Labelled | None]:
        """Yield reports until every part is done, and None several times a second. Raises JobError."""
        try:
            # The first worker finds out which engine labels; the others use the same.
            self._start(0)
            while self._todo or any(one.parts for one in self._workers.values()):
                for connection in wait([*self._workers], 0.25):
                    yield self._heard(connection)  # type: ignore[arg-type]
                yield None
        finally:
            for one in self._workers.values():
                one.kill()

    def _start(self, number: int) -> None:
        gpu = number if self._shares_gpus else None
        started = _Worker(replace(self._job, gpu=gpu), number)
        self._workers[started.connection] = started
        self._supply(started)

    def _supply(self, one: _Worker) -> None:
        while self._todo and len(one.parts) < 2:  # so that it never waits for the next part
            one.give(self._todo.popleft())

    def _heard(self, connection: Connection) -> Ready | Labelled | None:
        one = self._workers[connection]
        try:
            report: Report = connection.recv()
        except (EOFError, OSError):
            return self._died(one)
        match report:
            case Ready():
                self._job = replace(self._job, run=self._job.run.labelled_by(report.runner))
                started = {other.number for other in self._workers.values()}
                for number in range(self._most):
                    if number not in started and self._todo:
                        self._start(number)
                return report
            case Labelled():
                one.images += report.images
                one.errors += report.errors
                return report
            case PartDone():
                self._deaths = 0
                del one.parts[report.number]
                one.images -= report.images
                one.errors -= report.errors
                self._supply(one)
                return None
            case Fatal():
                raise JobError(report.message)

    def _died(self, one: _Worker) -> Labelled:
        del self._workers[one.connection]
        code = one.exit_code()
        self._todo.extendleft(reversed(one.parts.values()))
        self._deaths += 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        # A machine short of memory may kill each worker once; more deaths without a finished part end the run.
        if self._deaths > 2 * self._most:
            raise JobError(
                f"workers keep dying, the last one {how}; if memory is short, lower --workers "
                "or --batch-size, and run the command again to resume"
            )
        self._start(one.number)
        # Its reports on parts that are not on disk are undone.
        return Labelled(-one.images, -one.errors)


def _environment() -> dict[str, str]:
    """This process's environment, with the location of our modules."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{IMPORT_ROOT}{os.pathsep}{known}" if known else str(IMPORT_ROOT)}


class RayLabeller:
    """An actor: opened once, then one part per call."""

    def __init__(self, job: BatchJob) -> None:
        self._job, self._fatal = job, ""
        try:
            self._opened = open_model(job)
        except ConvoyError as error:
            self._fatal = str(error)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """`rows["part"]` are parts in JSON; the results are the reports of a local worker."""
        return {"done": np.array([encode(self._label(decode(one, type=BatchPart))) for one in rows["part"]], object)}

    def _label(self, part: BatchPart) -> PartDone | Fatal:
        if self._fatal:
            return Fatal(self._fatal)
        reports: list[Report] = []
        parts: SimpleQueue[BatchPart | None] = SimpleQueue()
        parts.put(part)
        parts.put(None)
        try:
            PartsWorker(self._job, self._opened, reports.append).label(parts)
        except ConvoyError as error:
            return Fatal(str(error))
        return next(one for one in reports if isinstance(one, PartDone))


def run_on_ray(address: str, job: BatchJob, parts: Sequence[BatchPart], workers: int) -> Iterator[Ready | Labelled]:
    """Yield reports until every part is done. Raises JobError or UsageError."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError(f"--ray needs Ray ({error}); {pip_install('ray')}") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address or None, logging_level=logging.WARNING, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(f"--ray: there is no cluster at {address or 'the default address'} ({error})") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    cluster = ray.cluster_resources()
    gpus = int(cluster.get("GPU", 0)) if may_use_gpus(job.run.identity.engine) else 0
    cpus = max(1, int(cluster.get("CPU", 1)))
    # With more than four CPUs, a worker's threads would wait for each other within one network.
    cpus_each = max(1, min(4, cpus // (workers or gpus or 1)))
    workers = min(workers or gpus or max(1, cpus // cpus_each), len(parts))
    resources: dict[str, Any] = {"num_cpus": cpus_each} | ({"num_gpus": 1} if gpus else {})
    job = replace(job, threads=cpus_each)
    if job.run.runner is None:
        found: Ready | Fatal = ray.get(ray.remote(**resources)(_prove).remote(job))
        if isinstance(found, Fatal):
            raise JobError(found.message)
        yield found
        job = replace(job, run=job.run.labelled_by(found.runner))
    rows = [{"part": encode(part)} for part in parts]
    done = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        RayLabeller,
        fn_constructor_args=(job,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
        **resources,
    )
    for row in done.iter_rows():
        one = decode(row["done"], type=PartDone | Fatal)
        if isinstance(one, Fatal):
            raise JobError(one.message)
        yield Labelled(one.images, one.errors)


def _prove(job: BatchJob) -> Ready | Fatal:
    """Find out which engine labels, on a node that will label."""
    try:
        return open_model(job).ready
    except ConvoyError as error:
        return Fatal(str(error))
