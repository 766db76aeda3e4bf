"""A run with the server's own figures for the same time.

Counters are read before and after the run, CPU time and memory during it. `server_side` interprets them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from convoy.loadtest.capacity import CapacityProbe
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.runner import Measurement, RunProgress, run
from convoy.loadtest.server_side import ServerClient, ServerSide, ServerUse, UseReading, difference, server_use
from convoy.loadtest.target import LoadTarget

# A reading costs the server about a millisecond of CPU, so readings take at most 1/500 of a core.
LEAST_BETWEEN_S, MOST_BETWEEN_S = 0.5, 5.0
READINGS = 40  # in a run, between those bounds


class Audience(Protocol):
    """Receives the progress."""

    def begin(self, options: LoadTestOptions) -> Callable[[RunProgress], None]:
        """A run begins. The returned function is called with its progress from time to time."""

    def probed(self, probe: CapacityProbe) -> None:
        """A probe has ended."""


@dataclass(frozen=True, slots=True)
class Observation:
    """`server` and `use` are None if the server does not provide them."""

    measurement: Measurement
    server: ServerSide | None
    use: ServerUse | None


class TargetObserver:
    """Runs loads against one target."""

    def __init__(self, target: LoadTarget, client: ServerClient, audience: Audience) -> None:
        self._target = target
        self._client = client
        self.audience = audience

    def observe(self, options: LoadTestOptions) -> Observation:
        before = self._client.snapshot(self._target.model)
        show = self.audience.begin(options)
        with _UseWatch(self._client, options.total_s) as watch:
            measurement = run(options, self._target.requests, self._target.endpoint, show)
        # None if the server has died; the measurement is kept.
        after = self._client.snapshot(self._target.model) if before is not None else None
        return Observation(
            measurement,
            difference(before, after) if before and after else None,
            server_use(watch.readings, measurement.records, measurement.window),
        )


class _UseWatch:
    """A thread that reads the CPU time and memory of the server's processes, if the server provides them."""

    def __init__(self, client: ServerClient, total_s: float) -> None:
        self.readings: list[UseReading] = []
        self._client = client
        self._between_s = min(max(total_s / READINGS, LEAST_BETWEEN_S), MOST_BETWEEN_S)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="server use", daemon=True)

    def __enter__(self) -> _UseWatch:
        if self._client.processes():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._between_s):
            asked_ns = time.monotonic_ns()
            processes = self._client.processes()
            if processes:
                self.readings.append(UseReading((asked_ns + time.monotonic_ns()) // 2, processes))
