"""The load test as a function, for programs with their own requests.

    endpoint = find_endpoint("http://127.0.0.1:8000")
    request_pool = RequestPool([request_bytes(endpoint, "/inference", payload, None)], AnswerCheck("plain", b"score"))
    options = LoadTestOptions(rate=500, duration_s=10, slo_ms=20)
    result = whole(options, run(options, request_pool, endpoint))  # convoy.loadtest.results
    result.verdict.void, result.summary.goodput

It sends nothing but these requests and prints nothing. A run waits until all generator processes are connected, starts
them at the same time, watches them, and collects their records. `statistics` and `verdict` interpret the records. The
progress is read from the last rows only, because the generators need the CPU time.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.loadtest.arrivals import RateStep, schedule_of
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.processes import GeneratorProcess, jobs_for
from convoy.loadtest.records import Records, Times, merged
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.rows import GOOD, Rows
from convoy.loadtest.statistics import Window
from convoy.loadtest.units import NS_PER_MS, NS_PER_S

LOOK_S = 0.5
RECENT_S = 1.0
MOST_ROWS = 50_000  # of each process


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Counts since the start, and rate and percentiles of the successful responses of the last second, if any."""

    elapsed_s: float
    begun: int
    good: int
    failed: int
    recent_per_s: float
    p50_ms: float | None
    p99_ms: float | None

    @property
    def in_flight(self) -> int:
        return self.begun - self.good - self.failed


class Watcher:
    """Shows the progress from time to time, after `start_ns` is set."""

    def __init__(self, rows: Sequence[Rows], show: Callable[[RunProgress], None]) -> None:
        self._rows = rows
        self._show = show
        self._next_ns = 0
        self.start_ns = 0

    def look(self) -> None:
        now_ns = time.monotonic_ns()
        if not self.start_ns or now_ns < self._next_ns:
            return
        self._next_ns = now_ns + int(LOOK_S * NS_PER_S)
        self._show(progress_of(self._rows, self.start_ns, now_ns))


def progress_of(parts: Sequence[Rows], start_ns: int, now_ns: int) -> RunProgress:
    """The progress at `now_ns`, from rows that the generators are still writing."""
    recent_s = min(RECENT_S, max((now_ns - start_ns) / NS_PER_S, 1e-3))
    latencies_ns = np.concatenate([np.empty(0, np.int64), *(_recent(rows, now_ns, recent_s) for rows in parts)])
    p50_ms, p99_ms = np.percentile(latencies_ns, [50, 99]) / NS_PER_MS if len(latencies_ns) else (None, None)
    return RunProgress(
        elapsed_s=max(0, now_ns - start_ns) / NS_PER_S,
        begun=sum(rows.begun for rows in parts),
        good=sum(int(rows.header[1]) for rows in parts),
        failed=sum(int(rows.header[2]) for rows in parts),
        recent_per_s=len(latencies_ns) / recent_s,
        p50_ms=None if p50_ms is None else float(p50_ms),
        p99_ms=None if p99_ms is None else float(p99_ms),
    )


def _recent(rows: Rows, now_ns: int, recent_s: float) -> Times:
    """Latencies of the successful responses of the last `recent_s`, from the rows begun last."""
    end = rows.begun
    part = slice(max(0, end - MOST_ROWS), end)
    finished_ns = np.array(rows.finished_ns[part], dtype=np.int64)
    good = np.array(rows.outcome[part], dtype=np.int16) == GOOD
    chosen = good & (finished_ns > now_ns - int(recent_s * NS_PER_S))
    latencies_ns: Times = (finished_ns - np.array(rows.intended_ns[part], dtype=np.int64))[chosen]
    return latencies_ns


START_S = 0.03  # time for the message to reach all processes before the start that it names
READY_S = 30.0  # after the timeout of connections, for interpreters to start on a busy machine
OVERDUE_S = 10.0  # after the latest time at which a process should have ended
LISTEN_S = 0.1


@dataclass(frozen=True, slots=True)
class GeneratorUse:
    """CPU time and event loop of one generator process. `death` says how it died; None if it did not."""

    cpu_s: float
    event_loop: str
    timer: str
    death: str | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """`waited` counts requests that found no free connection. `window` begins after the warm-up. `steps` are those of
    the schedule.
    """

    records: Records
    window: Window
    steps: tuple[RateStep, ...]
    interrupted: bool
    waited: int
    generators: tuple[GeneratorUse, ...]
    wall_s: float

    @property
    def generator_cpu_s(self) -> float:
        """CPU time of all generator processes."""
        return sum(generator.cpu_s for generator in self.generators)

    @property
    def busiest_cpu_share(self) -> float:
        """The share of one core that the busiest generator process used."""
        most_s = max((generator.cpu_s for generator in self.generators), default=0.0)
        return most_s / max(self.wall_s, 1e-9)

    @property
    def deaths(self) -> tuple[str, ...]:
        return tuple(generator.death for generator in self.generators if generator.death is not None)


class CrewRun:
    """Runs the generator processes from the start to the end."""

    def __init__(
        self,
        options: LoadTestOptions,
        crew: Sequence[GeneratorProcess],
        show: Callable[[RunProgress], None],
        steps: tuple[RateStep, ...],
    ) -> None:
        self._options = options
        self._crew = crew
        self._steps = steps
        self._interrupted = False
        self._start_ns = time.monotonic_ns()
        self._watcher = Watcher([process.rows for process in crew], show)
        self._selector = selectors.DefaultSelector()
        for process in crew:
            self._selector.register(process, selectors.EVENT_READ)

    def measure(self) -> Measurement:
        """Run to the end. Ctrl-C ends the run early and sets `interrupted`; it raises nothing."""
        try:
            self._await(lambda process: process.ready or process.is_over, self._options.timeout_s + READY_S)
            self._start()
            longest_s = self._options.total_s + self._options.timeout_s + OVERDUE_S
            self._await(lambda process: process.is_over, longest_s)
        except KeyboardInterrupt:
            self._interrupted = True
            self._stop()
            self._await(lambda process: process.is_over, OVERDUE_S)
        finally:
            self._selector.close()
        return self._measurement()

    def _start(self) -> None:
        self._start_ns = time.monotonic_ns() + int(START_S * NS_PER_S)
        self._watcher.start_ns = self._start_ns
        for process in self._crew:
            process.start(self._start_ns)

    def _stop(self) -> None:
        for process in self._crew:
            process.stop()

    def _await(self, condition: Callable[[GeneratorProcess], bool], timeout_s: float) -> None:
        """Wait until the condition holds for each process. If one dies, all stop, because its load is missing."""
        deadline_s = time.monotonic() + timeout_s
        while not all(condition(process) for process in self._crew):
            for key, _ in self._selector.select(LISTEN_S):
                self._hear(key.fileobj)
            self._watcher.look()
            if time.monotonic() > deadline_s:
                for process in self._crew:
                    if not process.is_over:
                        process.kill(f"did not respond for {timeout_s:.0f} s and was killed")

    def _hear(self, process: object) -> None:
        assert isinstance(process, GeneratorProcess)
        process.hear()
        if process.is_over:
            self._selector.unregister(process)
        if process.death is not None:
            self._stop()

    def _measurement(self) -> Measurement:
        now_ns = time.monotonic_ns()
        start_ns = self._start_ns
        end_ns = start_ns + int(self._options.total_s * NS_PER_S)
        cut_short = self._interrupted or any(process.death is not None for process in self._crew)
        finished = [process.finished for process in self._crew]
        return Measurement(
            records=merged([process.part() for process in self._crew]),
            window=Window(
                run_start_ns=start_ns,
                start_ns=start_ns + int(self._options.warm_up_cut_s * NS_PER_S),
                end_ns=min(end_ns, now_ns) if cut_short else end_ns,
            ),
            steps=self._steps,
            interrupted=self._interrupted,
            waited=sum(one.waited for one in finished if one),
            generators=tuple(_use(process) for process in self._crew),
            wall_s=(now_ns - start_ns) / NS_PER_S,
        )


def _use(process: GeneratorProcess) -> GeneratorUse:
    finished = process.finished
    if finished is None:
        return GeneratorUse(0.0, "", "", f"generator process {process.number} {process.death}")
    return GeneratorUse(finished.cpu_s, finished.event_loop, finished.timer, None)


def run(
    options: LoadTestOptions,
    request_pool: RequestPool,
    endpoint: Endpoint,
    show: Callable[[RunProgress], None] = lambda progress: None,
) -> Measurement:
    """Send `request_pool.requests` in turn to `endpoint`. `show` receives the progress from time to time.

    Only the options of the load are used (rate, steps or concurrency, duration, warm-up, timeout, connections,
    processes, arrivals, seed), not URL, model or body. A server that fails raises nothing: the records say how each
    request ended. `results.whole` and `results.by_step` compute the figures and the verdict.
    """
    schedule = schedule_of(options) if options.rates else None
    with contextlib.ExitStack() as stack:
        jobs = stack.enter_context(jobs_for(options, request_pool, endpoint, schedule))
        crew = [stack.enter_context(GeneratorProcess(number, job)) for number, job in enumerate(jobs, start=1)]
        return CrewRun(options, crew, show, schedule.steps if schedule else ()).measure()
