"""The generator processes as the parent sees them: started, listened to, stopped, and never left behind.

Knows pipes, exit codes and shared memory. What the processes send is their own affair (`convoy.loadtest.generator`).
Fresh interpreters and no forks: whatever threads and locks the caller has stay with the caller. Each is a
process group of its own, so that Ctrl-C reaches only the parent, which then tells the others to stop.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile

import msgspec

from convoy import IMPORT_ROOT
from convoy.loadtest.generator.job import READY, Finished, GeneratorJob, line_of
from convoy.loadtest.problems import one_line
from convoy.loadtest.records import ProcessRecords
from convoy.loadtest.rows import Rows

COMMAND = (sys.executable, "-m", "convoy.loadtest.generator")
END_S = 5.0  # for a process that has been told to stop; then it is killed


class GeneratorProcess:
    """One process and what it has said so far. A context manager; leaving it ends the process."""

    def __init__(self, number: int, job: GeneratorJob) -> None:
        self.number = number
        self._memory = mmap.mmap(job.rows_descriptor, 0)
        self.rows = Rows.over(memoryview(self._memory), job.capacity)  # as they stand; the process may be writing
        path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            pass_fds=(job.requests_descriptor, job.schedule_descriptor, job.rows_descriptor),
            process_group=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(IMPORT_ROOT), *path])},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._ears = self._process.stdout
        self._voice = self._process.stdin
        self._heard = b""
        self.ready = False
        self.finished: Finished | None = None
        self.death: str | None = None
        self._say(line_of(job))

    def __enter__(self) -> GeneratorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._ears.close()
        self._complaints.close()
        self.rows.release()
        self._memory.close()

    def fileno(self) -> int:
        """Becomes readable when there is something to `hear`."""
        return self._ears.fileno()

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.death is not None

    def start(self, start_ns: int) -> None:
        self._say(b"%d\n" % start_ns)

    def stop(self) -> None:
        """Tells it to send no more. May be called again."""
        with contextlib.suppress(OSError):
            self._voice.close()

    def kill(self, why: str) -> None:
        """Ends it now, because it hangs."""
        self._process.kill()
        self.death = why

    def hear(self) -> None:
        """Takes in what it has said; to be called when `fileno` is readable."""
        said = os.read(self._ears.fileno(), 65536)
        self._heard += said
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            if line == READY:
                self.ready = True
            else:
                self.finished = msgspec.json.decode(line, type=Finished)
        if not said and not self.is_over:
            self.death = self._last_words(self._process.wait())

    def part(self) -> ProcessRecords:
        """Its rows and its problems. Only once it is over."""
        return ProcessRecords(self.rows, self.finished.problems if self.finished else ())

    def _say(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: its end of the other pipe tells
            self._voice.write(line)
            self._voice.flush()

    def _last_words(self, exit_code: int) -> str:
        self._complaints.seek(0)
        complaints = self._complaints.read().decode(errors="replace").strip().splitlines()
        how = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with code {exit_code}"
        return f"{how} ({one_line(complaints[-1])})" if complaints else how
