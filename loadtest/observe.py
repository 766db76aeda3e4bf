"""A run as seen from both sides: the measurement, and what the server's own counters say of the same time.

Knows that the counters are read before and after, and CPU time and memory meanwhile. What they mean is `server_side`'s
and `server_use`'s.
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

# A reading costs a server about a millisecond of CPU: one in 500 at most.
LEAST_BETWEEN_S, MOST_BETWEEN_S = 0.5, 5.0
READINGS = 40  # in a run, between those bounds


class Audience(Protocol):
    """Who watches while it goes on."""

    def begin(self, options: LoadTestOptions) -> Callable[[RunProgress], None]:
        """A run begins; the function is told of it now and then."""

    def probed(self, probe: CapacityProbe) -> None:
        """A rate was tried."""


@dataclass(frozen=True, slots=True)
class Observation:
    """`server` and `use` are None where the server tells nothing."""

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
        # A server that has just died answers nothing more; what was measured stays.
        after = self._client.snapshot(self._target.model) if before is not None else None
        return Observation(
            measurement,
            difference(before, after) if before and after else None,
            server_use(watch.readings, measurement.records, measurement.window),
        )


class _UseWatch:
    """A thread that reads what the server's processes have used, now and then, where the server tells it at all."""

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
