"""What calls took and how they ended, gathered for one turn of the event loop and counted together.

A call has three such figures of its own, and finding a histogram costs more than adding to it. In a turn that
answers a whole batch, each series is then found once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from convoy.app.outcomes import ANSWERED, CallEnd, CallOutcome
from convoy.app.scheduling.request import ModelKey, Spent
from convoy.app.telemetry.metrics import Metrics
from convoy.app.telemetry.observed import Observed
from convoy.app.tracing.spans import Exemplar

_ANSWERED = ANSWERED.outcome.value


class CallRecorder:
    """Belongs to one event loop. `live` finds a version by its key, also one that leaves."""

    def __init__(self, metrics: Metrics, live: Callable[[ModelKey], Observed]) -> None:
        self._metrics = metrics
        self._live = live
        self._stages: defaultdict[tuple[ModelKey, str], list[int]] = defaultdict(list)
        self._calls: defaultdict[tuple[ModelKey | None, str, CallEnd], list[int]] = defaultdict(list)
        self._answered: defaultdict[tuple[ModelKey, str], list[Spent]] = defaultdict(list)
        self._exemplars: list[Exemplar] = []
        self._is_due = False

    def stage(self, key: ModelKey, stage: str, ns: int) -> None:
        """A stage of one request has ended: `decode_wait`, `decode` or `encode`."""
        self._stages[key, stage].append(ns)
        if not self._is_due:
            self._count_soon()

    def call(self, key: ModelKey | None, protocol: str, ending: CallEnd, ns: int) -> None:
        """A call has its answer, or nobody waits for one. `key` is None where no model was found."""
        self._calls[key, protocol, ending].append(ns)
        if not self._is_due:
            self._count_soon()

    def answered(self, key: ModelKey, protocol: str, spent: Spent) -> None:
        """A call has ended well: both at once."""
        self._answered[key, protocol].append(spent)
        if not self._is_due:
            self._count_soon()

    def exemplify(self, exemplar: Exemplar) -> None:
        """A call that has come here has a span."""
        self._exemplars.append(exemplar)
        if not self._is_due:
            self._count_soon()

    def count(self) -> None:
        """Count all that has come. Comes before a version's series end, while it can be found."""
        self._is_due = False
        answered, self._answered = self._answered, defaultdict(list)
        for (key, protocol), spent in answered.items():
            served = self._live(key)
            took_ns = {
                "decode_wait": [one.decode_wait_ns for one in spent],
                "decode": [one.decode_ns for one in spent],
                "encode": [one.encode_ns for one in spent],
                "total": [one.total_ns for one in spent],
            }
            self._metrics.of(served).calls_answered(protocol, took_ns)
            served.statistics.last_minute.record_stages(took_ns)
            served.statistics.calls.add(_ANSWERED, len(spent))
        stages, self._stages = self._stages, defaultdict(list)
        for (key, stage), values in stages.items():
            served = self._live(key)
            self._metrics.of(served).stage_took(stage, values)
            served.statistics.last_minute.record_stages({stage: values})
        calls, self._calls = self._calls, defaultdict(list)
        for (called, protocol, ending), values in calls.items():
            if ending.reason:
                self._metrics.rejected(ending.reason, len(values))
            if called is None:
                self._metrics.strangers_ended(protocol, ending, values)
                continue
            served = self._live(called)
            self._metrics.of(served).calls_ended(protocol, ending, values)
            served.statistics.calls.add(ending.outcome.value, len(values))
            if ending.reason:
                served.statistics.refusals.add(str(ending.reason), len(values))
            if ending.outcome is CallOutcome.ANSWERED:
                served.statistics.last_minute.record_stages({"total": values})
        exemplars, self._exemplars = self._exemplars, []
        for exemplar in exemplars:
            self._metrics.exemplify(self._live(exemplar.key), exemplar)

    def _count_soon(self) -> None:
        # After this turn and before any later one's: nobody can read what has not been counted.
        self._is_due = True
        asyncio.get_running_loop().call_soon(self.count)
