"""Several workers on this machine: who has which part, and what becomes of the parts of one that dies.

Knows processes and lines; what a worker does with a part is known to `worker`.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from msgspec.json import decode, encode

from convoy import IMPORT_ROOT
from convoy.app.batch.records import BatchJob, BatchPart, Fatal, Labelled, PartDone, Ready, Said
from convoy.app.batch.worker import END
from convoy.models.errors import JobError

# One to work on, and one to decode ahead.
_AHEAD = 2
_LOOK_EVERY_S = 0.25
_MOST_READ = 1 << 16
# A machine short of memory may kill each worker once; more without a part in between will not end by itself.
_DEATHS_FOR_EACH = 2


class _Process:
    """A worker's process. `parts` are those that it has not said to be done, `unfinished` the images it has done."""

    def __init__(self, job: BatchJob, number: int) -> None:
        command = [sys.executable, "-P", "-m", "convoy.app.batch.worker"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=_environment(), start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self.stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.number, self._rest = number, b""
        self.parts: dict[int, BatchPart] = {}
        self.told_images = self.told_errors = 0
        self.is_ready = self.is_told_to_end = False
        self._send(encode(job) + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    def give(self, part: BatchPart) -> None:
        self.parts[part.number] = part
        self._send(encode(part) + b"\n")

    def end(self) -> None:
        """No part more will come."""
        if not self.is_told_to_end:
            self.is_told_to_end = True
            self._send(END)

    def hear(self) -> list[Said] | None:
        """What it has said; None once it can say no more."""
        try:
            data = os.read(self.stdout.fileno(), _MOST_READ)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [decode(line, type=Said) for line in lines]

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> int:
        """The exit code."""
        with suppress(OSError):
            self._stdin.close()
        self.stdout.close()
        return self._process.wait()

    def _send(self, line: bytes) -> None:
        with suppress(OSError):  # it has died, and will be seen to have
            self._stdin.write(line)
            self._stdin.flush()


class LocalWorkers:
    """Labels parts with so many processes. `on_ready` hears of the first engine, `tell` of what is done."""

    def __init__(
        self,
        job: BatchJob,
        parts: Sequence[BatchPart],
        workers: int,
        *,
        shares_gpus: bool,
        on_ready: Callable[[Ready], None],
        tell: Callable[[Labelled | PartDone], None],
        tick: Callable[[], None],
    ) -> None:
        self._job, self._todo, self._most = job, deque(parts), min(workers, len(parts))
        self._shares_gpus, self._on_ready, self._tell, self._tick = shares_gpus, on_ready, tell, tick
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, _Process] = {}
        self._deaths = 0

    def run(self) -> None:
        """Until every part is done. Raises JobError where the run cannot go on."""
        try:
            # The first one finds out which engine labels; the others are to take the same.
            self._start(0)
            while self._todo or self._processes:
                for key, _ in self._selector.select(_LOOK_EVERY_S):
                    self._hear(key.data)
                self._tick()
        finally:
            for process in self._processes.values():
                process.kill()
            self._selector.close()

    def _start(self, number: int) -> None:
        gpu = number if self._shares_gpus else None
        process = _Process(msgspec.structs.replace(self._job, gpu=gpu), number)
        self._processes[number] = process
        self._selector.register(process.stdout, selectors.EVENT_READ, process)
        self._supply(process)

    def _supply(self, process: _Process) -> None:
        while self._todo and len(process.parts) < _AHEAD and not process.is_told_to_end:
            process.give(self._todo.popleft())
        if not self._todo:
            process.end()

    def _hear(self, process: _Process) -> None:
        said = process.hear()
        if said is None:
            self._ended(process)
            return
        for one in said:
            match one:
                case Ready():
                    self._is_ready(process, one)
                case Labelled():
                    process.told_images += one.images
                    process.told_errors += one.errors
                    self._tell(one)
                case PartDone():
                    self._deaths = 0
                    del process.parts[one.number]
                    process.told_images -= one.images
                    process.told_errors -= one.errors
                    self._tell(one)
                    self._supply(process)
                case Fatal():
                    raise JobError(one.message)

    def _is_ready(self, process: _Process, ready: Ready) -> None:
        process.is_ready = True
        if self._job.runner is None:
            self._job = msgspec.structs.replace(self._job, runner=ready.runner)
        self._on_ready(ready)
        for number in range(self._most):
            if number not in self._processes and self._todo:
                self._start(number)

    def _ended(self, process: _Process) -> None:
        self._selector.unregister(process.stdout)
        del self._processes[process.number]
        code = process.close()
        if code == 0 and not process.parts:
            return
        # What it had done of parts that are not on disk is done again.
        self._tell(Labelled(-process.told_images, -process.told_errors))
        self._todo.extendleft(reversed(process.parts.values()))
        self._deaths += 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if self._deaths > _DEATHS_FOR_EACH * self._most:
            raise JobError(
                f"workers die again and again, the last one {how}; if the machine is short of memory, lower --workers "
                "or --batch-size, and run the command again: what is done stays"
            )
        self._start(process.number)


def _environment() -> dict[str, str]:
    """Ours, with the place where our modules are."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{IMPORT_ROOT}{os.pathsep}{known}" if known else str(IMPORT_ROOT)}
