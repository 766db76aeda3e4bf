"""Several workers on this machine: which of them has which part, and what becomes of the parts of one that dies.

Knows processes and connections; what a worker does with a part is known to `worker`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import msgspec

from convoy import IMPORT_ROOT
from convoy.app.batch.job import share_of_cpus
from convoy.app.batch.records import BatchJob, BatchPart, Fatal, Labelled, PartDone, Ready, Report
from convoy.models.errors import JobError


class _Worker:
    """A process. `parts` are those that are not done, `images` and `errors` what it has reported of them."""

    def __init__(self, job: BatchJob, number: int) -> None:
        self.number = number
        self.parts: dict[int, BatchPart] = {}
        self.images = self.errors = 0
        self.connection, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "convoy.app.batch.worker", str(theirs.fileno())]
        # A session of its own: Ctrl-C is for this process alone.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=_environment(), start_new_session=True
        )
        theirs.close()  # so that a worker's end is the end of its connection
        self._send(job)

    def give(self, part: BatchPart) -> None:
        self.parts[part.number] = part
        self._send(part)

    def _send(self, what: BatchJob | BatchPart) -> None:
        with suppress(OSError):  # it has died, as the end of its connection says
            self.connection.send(what)

    def kill(self) -> None:
        self._process.kill()
        self.exit_code()

    def exit_code(self) -> int:
        """Of one that has ended, or is about to."""
        self.connection.close()
        return self._process.wait()


class LocalWorkers:
    """Labels parts with several processes. With `shares_gpus` each has a GPU of its own."""

    def __init__(self, job: BatchJob, parts: Sequence[BatchPart], workers: int, *, shares_gpus: bool) -> None:
        self._job = msgspec.structs.replace(job, threads=share_of_cpus(workers))
        self._todo, self._most = deque(parts), workers
        self._shares_gpus = shares_gpus
        self._workers: dict[Connection, _Worker] = {}
        self._deaths = 0

    def run(self) -> Iterator[Ready | Labelled | None]:
        """What happens until every part is done; None a few times a second. Raises JobError where it cannot go on."""
        try:
            # The first one finds out which engine labels; the others take the same.
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
        started = _Worker(msgspec.structs.replace(self._job, gpu=gpu), number)
        self._workers[started.connection] = started
        self._supply(started)

    def _supply(self, one: _Worker) -> None:
        while self._todo and len(one.parts) < 2:  # so that it never waits for the next
            one.give(self._todo.popleft())

    def _heard(self, connection: Connection) -> Ready | Labelled | None:
        one = self._workers[connection]
        try:
            report: Report = connection.recv()
        except (EOFError, OSError):
            return self._died(one)
        match report:
            case Ready():
                self._job = msgspec.structs.replace(self._job, run=self._job.run.labelled_by(report.runner))
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
        # A machine short of memory may kill each worker once; with more deaths and no part done it does not end.
        if self._deaths > 2 * self._most:
            raise JobError(
                f"workers die again and again, the last one {how}; if the machine is short of memory, lower --workers "
                "or --batch-size, and run the command again: what is done stays"
            )
        self._start(one.number)
        # What it had reported of parts that are not on disk is done again.
        return Labelled(-one.images, -one.errors)


def _environment() -> dict[str, str]:
    """Ours, with the place where our modules are."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{IMPORT_ROOT}{os.pathsep}{known}" if known else str(IMPORT_ROOT)}
