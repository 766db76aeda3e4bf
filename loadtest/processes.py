"""Starts, reads and stops the generator processes, and divides the load between them.

They are new interpreters instead of forks, which would copy the threads and locks of the caller. Each has its own
process group, so that Ctrl-C reaches only the parent, which then stops the others.

The number of processes follows from the cores and from what one generator can send. Unneeded processes would take CPU
time from a server on the same machine. The shared memory lasts as long as the run.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from convoy.loadtest.arrivals import Offsets, Schedule
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.generator.job import READY, Finished, GeneratorJob, anonymous, line_of, write_blobs
from convoy.loadtest.options import MAX_PROCESSES, MAX_REQUESTS, LoadTestOptions
from convoy.loadtest.problems import one_line
from convoy.loadtest.records import ProcessRecords
from convoy.loadtest.request_pool import Protocol, RequestPool
from convoy.loadtest.rows import Rows, size_bytes
from convoy.models.checkout import IMPORT_ROOT

OPEN_LOOP_FIRST_CONNECTIONS = 64
# Well below half of what one process can send (docs/loadtest.md), because a process at its limit is late.
RATE_PER_PROCESS: dict[Protocol, float] = {"http": 10_000, "grpc": 1000}
CLIENTS_PER_PROCESS = 128


@contextlib.contextmanager
def jobs_for(
    options: LoadTestOptions, request_pool: RequestPool, endpoint: Endpoint, schedule: Schedule | None
) -> Iterator[list[GeneratorJob]]:
    """The job of each process, in memory that lasts until the end of the run."""
    count = process_count(options, request_pool.protocol, core_budget())
    with contextlib.ExitStack() as stack:

        def kept(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            return descriptor

        requests = kept(write_blobs(request_pool.requests))
        yield [
            _job(options, request_pool, endpoint, _Work.of(options, schedule, index, count), requests, kept)
            for index in range(count)
        ]


@dataclass(frozen=True, slots=True)
class _Work:
    """The share of one process. In an open loop `offsets_ns` are the due times and `clients` is None."""

    offsets_ns: Offsets
    clients: int | None
    connections: int
    capacity: int

    @classmethod
    def of(cls, options: LoadTestOptions, schedule: Schedule | None, index: int, count: int) -> _Work:
        if schedule is not None:
            offsets_ns = schedule.share(index, count)
            return cls(offsets_ns, None, max(1, _share(options.connections, index, count)), max(1, len(offsets_ns)))
        clients = _share(options.clients or count, index, count)
        return cls(np.empty(0, np.int64), clients, clients, MAX_REQUESTS // count)


def _job(
    options: LoadTestOptions,
    request_pool: RequestPool,
    endpoint: Endpoint,
    work: _Work,
    requests: int,
    kept: Callable[[int], int],
) -> GeneratorJob:
    return GeneratorJob(
        endpoint=endpoint,
        protocol=request_pool.protocol,
        form=request_pool.check.form,
        word=request_pool.check.word.decode("latin-1"),
        metadata=request_pool.metadata,
        requests=len(request_pool.requests),
        requests_descriptor=requests,
        clients=work.clients,
        schedule_descriptor=kept(write_blobs([work.offsets_ns.tobytes()])),
        capacity=work.capacity,
        rows_descriptor=kept(anonymous(size_bytes(work.capacity))),
        connections=work.connections,
        first_connections=work.clients or min(work.connections, OPEN_LOOP_FIRST_CONNECTIONS),
        duration_s=options.total_s,
        timeout_s=options.timeout_s,
    )


def _share(total: int, index: int, count: int) -> int:
    """An even share. All shares add up to the total."""
    return total // count + (index < total % count)


def process_count(options: LoadTestOptions, protocol: Protocol, budget: int) -> int:
    """The number of the options, else as few as the load needs, leaving one core to the server; at least 1."""
    most = options.clients or MAX_PROCESSES
    if options.processes is not None:
        return min(options.processes, most)
    rate = options.peak_rate
    needed = (options.clients or 1) / CLIENTS_PER_PROCESS if rate is None else rate / RATE_PER_PROCESS[protocol]
    return max(1, min(math.ceil(needed), budget - 1, most))


def core_budget(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The number of usable cores: the affinity mask, or the quota of the container if that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return allowed


COMMAND = (sys.executable, "-m", "convoy.loadtest.generator")
END_S = 5.0  # for a process to stop before it is killed


class GeneratorProcess:
    """One generator process and its messages so far. Leaving the context ends the process."""

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
        """Make it stop sending. May be called again."""
        with contextlib.suppress(OSError):
            self._voice.close()

    def kill(self, why: str) -> None:
        """Kill the process because it hangs."""
        self._process.kill()
        self.death = why

    def hear(self) -> None:
        """Read its messages. Call it when `fileno` is readable."""
        said = os.read(self._ears.fileno(), 65536)
        self._heard += said
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            if line == READY:
                self.ready = True
            else:
                self.finished = msgspec.json.decode(line, type=Finished)
        if not said and not self.is_over:
            self.death = self._final_error(self._process.wait())

    def part(self) -> ProcessRecords:
        """Its records. Call it only after the process has ended."""
        return ProcessRecords(self.rows, self.finished.problems if self.finished else ())

    def _say(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died, which the other pipe shows
            self._voice.write(line)
            self._voice.flush()

    def _final_error(self, exit_code: int) -> str:
        self._complaints.seek(0)
        complaints = self._complaints.read().decode(errors="replace").strip().splitlines()
        how = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with code {exit_code}"
        return f"{how} ({one_line(complaints[-1])})" if complaints else how
