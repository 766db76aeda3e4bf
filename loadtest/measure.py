"""One run, from the first connection to the last answer, over all generator processes.

Knows the order of things: wait until all are connected, give one start to all, watch, gather. Gives back rows
and leaves their meaning to statistics and verdict.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convoy.loadtest.arrivals import RateStep
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.processes import GeneratorProcess
from convoy.loadtest.progress import RunProgress, Watcher
from convoy.loadtest.records import Records, merged
from convoy.loadtest.statistics import Window
from convoy.loadtest.units import NS_PER_S

START_S = 0.03  # for the word to reach all processes before the time it names
READY_S = 30.0  # beyond the time-out of connections, for interpreters to start on a busy machine
OVERDUE_S = 10.0  # beyond the last moment at which a process should have ended
LISTEN_S = 0.1


@dataclass(frozen=True, slots=True)
class GeneratorUse:
    """What one generator process spent. `death` says how it died, if it did."""

    cpu_s: float
    event_loop: str
    timer: str
    death: str | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """`waited` requests found no free connection; `window` begins after the warm-up; `steps` are the schedule's."""

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
    """Listens to the crew from the first word to the last."""

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
        """Ctrl-C ends it early and is not an error: the measurement says `interrupted`."""
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
        """Until the condition holds for each. One that dies stops all: a run without it means nothing."""
        deadline_s = time.monotonic() + timeout_s
        while not all(condition(process) for process in self._crew):
            for key, _ in self._selector.select(LISTEN_S):
                self._hear(key.fileobj)
            self._watcher.look()
            if time.monotonic() > deadline_s:
                for process in self._crew:
                    if not process.is_over:
                        process.kill(f"said nothing for {timeout_s:.0f} s and was killed")

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
