"""What calls took and how they ended, gathered for one turn of the event loop and counted together.

A call has three such figures of its own, and finding a histogram costs more than adding to it. In a turn that
answers a whole batch, each series is then found once.
"""

from __future__ import annotations

import asyncio

from app.catalog import Served
from app.metrics import Metrics


class Tally:
    """Belongs to one event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._stages: dict[tuple[Served, str], list[int]] = {}
        self._calls: dict[tuple[Served | None, str, str], list[int]] = {}
        self._is_due = False

    def stage(self, served: Served, stage: str, ns: int) -> None:
        """A stage of one request has ended: `decode` or `encode`."""
        self._stages.setdefault((served, stage), []).append(ns)
        self._count_soon()

    def call(self, served: Served | None, protocol: str, outcome: str, ns: int) -> None:
        """A call has its answer, or nobody waits for one. `served` is None where no model was found."""
        self._calls.setdefault((served, protocol, outcome), []).append(ns)
        self._count_soon()

    def count(self) -> None:
        """Count all that has come. Comes before a version's series end."""
        self._is_due = False
        stages, self._stages = self._stages, {}
        for (served, stage), values in stages.items():
            self._metrics.of(served).stage_took(stage, values)
            served.statistics.rolling.record_stage(stage, values)
        calls, self._calls = self._calls, {}
        for (called, protocol, outcome), values in calls.items():
            if called is None:
                self._metrics.strangers_ended(protocol, outcome, len(values))
                continue
            self._metrics.of(called).calls_ended(protocol, outcome, values)
            if outcome == "success":
                called.statistics.rolling.record_stage("total", values)

    def _count_soon(self) -> None:
        # After this turn and before any later one's: nobody can read what has not been counted.
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.count)
