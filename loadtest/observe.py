"""A run as seen from both sides: the measurement, and what the server's own counters say of the same time.

Knows that the counters are read before and after. What they mean is `server_side`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from convoy.loadtest.capacity import CapacityProbe
from convoy.loadtest.measure import Measurement
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.progress import RunProgress
from convoy.loadtest.runner import run
from convoy.loadtest.server_client import ServerClient
from convoy.loadtest.server_side import ServerSide, difference
from convoy.loadtest.target import LoadTarget


class Audience(Protocol):
    """Who watches while it goes on."""

    def begin(self, options: LoadTestOptions) -> Callable[[RunProgress], None]:
        """A run begins; the function is told of it now and then."""

    def probed(self, probe: CapacityProbe) -> None:
        """A rate was tried."""


@dataclass(frozen=True, slots=True)
class Observation:
    """`server` is None where the server tells nothing."""

    measurement: Measurement
    server: ServerSide | None


class TargetObserver:
    """Runs loads against one target."""

    def __init__(self, target: LoadTarget, client: ServerClient, audience: Audience) -> None:
        self._target = target
        self._client = client
        self.audience = audience

    def observe(self, options: LoadTestOptions) -> Observation:
        before = self._client.snapshot(self._target.model)
        show = self.audience.begin(options)
        measurement = run(options, self._target.requests, self._target.endpoint, show)
        # A server that has just died answers nothing more; what was measured stays.
        after = self._client.snapshot(self._target.model) if before is not None else None
        return Observation(measurement, difference(before, after) if before and after else None)
