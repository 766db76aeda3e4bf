"""One record of each call that ended and of each batch that ran, counted when they are read.

The statistics, the metrics and the last minute are all counted here, from these records, so that they cannot disagree.
Counting a record by itself costs ten times as much as counting it with hundreds, which is why records wait: for a
reader, for the first record of another second, or until there are many.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from convoy.app.scheduling.request import SECOND_NS, ModelKey
from convoy.app.telemetry.metrics import Metrics
from convoy.app.telemetry.outcomes import CallEnd, CallOutcome
from convoy.app.telemetry.ran_batches import BatchRecord, RanBatches
from convoy.app.telemetry.statistics import Observed
from convoy.app.telemetry.tracing import Exemplar

_log = logging.getLogger("convoy")
_NO_STAGES: Mapping[str, int] = {}
# Of one call: nanoseconds in all, and by stage.
_Took = tuple[int, Mapping[str, int]]


@dataclass(slots=True, eq=False)
class _Records:
    """What has come in one second and is not counted yet; `number` of records in all."""

    number: int = 0
    stages: defaultdict[tuple[ModelKey, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    calls: defaultdict[tuple[ModelKey | None, str, CallEnd], list[_Took]] = field(
        default_factory=lambda: defaultdict(list)
    )
    batches: defaultdict[ModelKey, list[BatchRecord]] = field(default_factory=lambda: defaultdict(list))
    failed: list[tuple[ModelKey, str, int]] = field(default_factory=list)
    turned_away: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class Ledger:
    """Belongs to one event loop. `live` finds a version by its key, also one that leaves.

    The metrics and a version's statistics call `count` before they are read. `now_ns` never goes back.
    """

    def __init__(
        self, metrics: Metrics, live: Callable[[ModelKey], Observed], now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._metrics, self._live, self._now_ns = metrics, live, now_ns
        metrics.before_looking = self.count
        self._records, self._second = _Records(), 0

    def stage(self, key: ModelKey, stage: str, ns: int) -> None:
        """A stage of one more request of a call has ended: `decode_wait` or `decode`."""
        self._one_more().stages[key, stage].append(ns)

    def call(
        self, key: ModelKey | None, protocol: str, ending: CallEnd, ns: int, stages_ns: Mapping[str, int] = _NO_STAGES
    ) -> None:
        """Record a call that has ended. `key` is None if no model was found.

        `stages_ns` are those of the call that are not a batch's: `decode_wait`, `decode` and `encode`.
        """
        self._one_more().calls[key, protocol, ending].append((ns, stages_ns))

    def batch(self, key: ModelKey, record: BatchRecord) -> None:
        """A batch ran, and its requests have their answers, in the same turn of the loop: no reader sees one alone."""
        self._one_more().batches[key].append(record)

    def failed(self, key: ModelKey, reason: str, ns: int) -> None:
        """A request was not answered, after so long; `reason` is one of the statistics' failures."""
        self._one_more().failed.append((key, reason, ns))

    def turned_away(self, reason: str) -> None:
        """Something was refused that is no call, or part of one: a connection, a file among others."""
        self._one_more().turned_away[reason] += 1

    def exemplify(self, exemplar: Exemplar) -> None:
        """A call has a span, which is an example of what took so long. Not counted, so it does not wait."""
        self._safely(partial(self._exemplify, exemplar))

    def count(self) -> None:
        """Count all that has come. Comes before a version's series end, while it can be found."""
        if not self._records.number:
            return
        records, self._records, second = self._records, _Records(), self._second
        for key, batches in records.batches.items():
            self._safely(partial(self._count_batches, key, RanBatches(batches), second))
        for (key, stage), values in records.stages.items():
            self._safely(partial(self._count_stage, key, stage, values, second))
        for (called, protocol, ending), calls in records.calls.items():
            self._safely(partial(self._count_calls, called, protocol, ending, calls, second))
        for version, why, ns in records.failed:
            self._safely(partial(self._count_failure, version, why, ns))
        for reason, count in records.turned_away.items():
            self._safely(partial(self._metrics.rejected, reason, count, second))

    def _one_more(self) -> _Records:
        """For a record that comes: those of an earlier second are counted as that second's, and many together."""
        second = self._now_ns() // SECOND_NS
        # Counting 128 records of one version holds up the event loop for a tenth of a millisecond.
        if second != self._second or self._records.number >= 128:
            self.count()
            self._second = second
        self._records.number += 1
        return self._records

    def _safely(self, count: Callable[[], None]) -> None:
        # A bug must cost a reader, or the next record, no more than what it is about.
        try:
            count()
        except Exception:
            _log.exception("what has happened could not be counted; this is a bug")

    def _count_batches(self, key: ModelKey, ran: RanBatches, second: int) -> None:
        served = self._live(key)
        served.statistics.record_batches(ran, second)
        self._metrics.batches_ran(served, ran, second)

    def _count_stage(self, key: ModelKey, stage: str, values: list[int], second: int) -> None:
        served = self._live(key)
        self._metrics.of(served).stage_took(stage, values)
        served.statistics.last_minute.record_stages({stage: values}, second)

    def _count_calls(
        self, key: ModelKey | None, protocol: str, ending: CallEnd, calls: list[_Took], second: int
    ) -> None:
        totals_ns = [ns for ns, _ in calls]
        if ending.reason:
            self._metrics.rejected(ending.reason, len(calls), second)
        if key is None:
            self._metrics.strangers_ended(protocol, ending, totals_ns, second)
            return
        served = self._live(key)
        own, minute = self._metrics.of(served), served.statistics.last_minute
        own.calls_ended(protocol, ending, totals_ns)
        took_ns: defaultdict[str, list[int]] = defaultdict(list)
        for _, stages_ns in calls:
            for stage, ns in stages_ns.items():
                took_ns[stage].append(ns)
        for stage, each_ns in took_ns.items():
            own.stage_took(stage, each_ns)
        if ending.outcome is CallOutcome.ANSWERED:
            took_ns["total"] = totals_ns
        minute.record_stages(took_ns, second)
        served.statistics.calls.add(ending.outcome.value, len(calls), second)
        if ending.reason:
            served.statistics.refusals.add(str(ending.reason), len(calls), second)

    def _count_failure(self, key: ModelKey, reason: str, ns: int) -> None:
        self._live(key).statistics.record_failure(reason, ns)

    def _exemplify(self, exemplar: Exemplar) -> None:
        self._metrics.exemplify(self._live(exemplar.key), exemplar)
