"""Several workers on this machine: which of them has which part, and what becomes of the parts of one that dies.

Knows processes and lines; what a worker does with a part is known to `worker`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

import msgspec
from msgspec.json import decode, encode

from convoy import IMPORT_ROOT
from convoy.app.batch.records import BatchJob, BatchPart, Fatal, Labelled, PartDone, Ready, Report
from convoy.app.batch.worker import END
from convoy.models.errors import JobError


class _Process:
    """A worker's process. `parts` are those that are not done, `images` and `errors` what it has reported of them."""

    def __init__(self, job: BatchJob, number: int, reports: SimpleQueue[tuple[_Process, Report | None]]) -> None:
        command = [sys.executable, "-P", "-m", "convoy.app.batch.worker"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=_environment(), start_new_session=True)
        self.number, self._reports = number, reports
        self.parts: dict[int, BatchPart] = {}
        self.images = self.errors = 0
        self.is_told_to_end = False
        self._send(encode(job) + b"\n")
        Thread(target=self._listen, daemon=True).start()

    def give(self, part: BatchPart) -> None:
        self.parts[part.number] = part
        self._send(encode(part) + b"\n")

    def end(self) -> None:
        """No more parts will come."""
        self.is_told_to_end = True
        self._send(END)

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        """The exit code."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        return self._process.wait()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has died; `_listen` says so
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _listen(self) -> None:
        """Pass on its reports, and None when there can be no more."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # else it died while it wrote
                    self._reports.put((self, decode(line, type=Report)))
        self._reports.put((self, None))


class LocalWorkers:
    """Labels parts with several processes. With `shares_gpus` each has a GPU of its own."""

    def __init__(self, job: BatchJob, parts: Sequence[BatchPart], workers: int, *, shares_gpus: bool) -> None:
        self._job, self._todo, self._most = job, deque(parts), workers
        self._shares_gpus = shares_gpus
        self._reports: SimpleQueue[tuple[_Process, Report | None]] = SimpleQueue()
        self._processes: dict[int, _Process] = {}
        self._deaths = 0

    def run(self) -> Iterator[Ready | Labelled | None]:
        """What happens until every part is done; None a few times a second. Raises JobError where it cannot go on."""
        try:
            # The first one finds out which engine labels; the others take the same.
            self._start(0)
            while self._todo or self._processes:
                try:
                    process, report = self._reports.get(timeout=0.25)
                except Empty:
                    yield None
                else:
                    yield self._ended(process) if report is None else self._heard(process, report)
        finally:
            for process in self._processes.values():
                process.kill()

    def _start(self, number: int) -> None:
        gpu = number if self._shares_gpus else None
        process = _Process(msgspec.structs.replace(self._job, gpu=gpu), number, self._reports)
        self._processes[number] = process
        self._supply(process)

    def _supply(self, process: _Process) -> None:
        if process.is_told_to_end:
            return
        while self._todo and len(process.parts) < 2:  # so that it never waits for the next
            process.give(self._todo.popleft())
        if not self._todo:
            process.end()

    def _heard(self, process: _Process, report: Report) -> Ready | Labelled | None:
        match report:
            case Ready():
                self._job = msgspec.structs.replace(self._job, run=self._job.run.labelled_by(report.runner))
                for number in range(self._most):
                    if number not in self._processes and self._todo:
                        self._start(number)
                return report
            case Labelled():
                process.images += report.images
                process.errors += report.errors
                return report
            case PartDone():
                self._deaths = 0
                del process.parts[report.number]
                process.images -= report.images
                process.errors -= report.errors
                self._supply(process)
                return None
            case Fatal():
                raise JobError(report.message)

    def _ended(self, process: _Process) -> Labelled | None:
        del self._processes[process.number]
        code = process.wait()
        if code == 0 and not process.parts:
            return None
        self._todo.extendleft(reversed(process.parts.values()))
        self._deaths += 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        # A machine short of memory may kill each worker once; with more deaths and no part done it does not end.
        if self._deaths > 2 * self._most:
            raise JobError(
                f"workers die again and again, the last one {how}; if the machine is short of memory, lower --workers "
                "or --batch-size, and run the command again: what is done stays"
            )
        self._start(process.number)
        # What it had reported of parts that are not on disk is done again.
        return Labelled(-process.images, -process.errors)


def _environment() -> dict[str, str]:
    """Ours, with the place where our modules are."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{IMPORT_ROOT}{os.pathsep}{known}" if known else str(IMPORT_ROOT)}
