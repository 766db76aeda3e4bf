"""Shares the work of a run out over its generator processes.

Knows the cores that this process may use, what one generator can send and what each must be told, and keeps the memory
that they share as long as the run lasts. More processes than the load needs are not harmless: on a machine shared with
the server each takes time from it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convoy.loadtest.arrivals import Offsets, Schedule
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.generator.job import GeneratorJob
from convoy.loadtest.options import MAX_PROCESSES, MAX_REQUESTS, LoadTestOptions
from convoy.loadtest.request_pool import Protocol, RequestPool
from convoy.loadtest.rows import size_bytes
from convoy.loadtest.shared import anonymous, write_blobs

OPEN_LOOP_FIRST_CONNECTIONS = 64
# Well below half of what one process can send (docs/loadtest.md): a process at its limit is a late one.
RATE_PER_PROCESS: dict[Protocol, float] = {"http": 10_000, "grpc": 1000}
CLIENTS_PER_PROCESS = 128


@contextlib.contextmanager
def jobs_for(
    options: LoadTestOptions, request_pool: RequestPool, endpoint: Endpoint, schedule: Schedule | None
) -> Iterator[list[GeneratorJob]]:
    """Each process's share of the work, in memory that lasts until the end of the run."""
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
    """One process's share. `offsets_ns` are the due times of an open loop; `clients` is None there."""

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
    """An even share; the shares of all add up to the total."""
    return total // count + (index < total % count)


def process_count(options: LoadTestOptions, protocol: Protocol, budget: int) -> int:
    """At least 1; what is asked for, if it is; else as few as the load needs, leaving the server a core."""
    most = options.clients or MAX_PROCESSES
    if options.processes is not None:
        return min(options.processes, most)
    rate = options.peak_rate
    needed = (options.clients or 1) / CLIENTS_PER_PROCESS if rate is None else rate / RATE_PER_PROCESS[protocol]
    return max(1, min(math.ceil(needed), budget - 1, most))


def core_budget(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many threads may run at once: the affinity mask, or the container's quota if that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return allowed
