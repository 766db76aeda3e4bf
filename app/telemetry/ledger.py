"""One record of each ended call and each finished batch, counted when they are read.

The statistics, the metrics and the last minute are all counted here, from these records, so they cannot disagree.
Counting a record by itself costs ten times as much as counting it with hundreds. So records wait for a reader, for the
first record of another second, or until there are many.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from convoy.app.scheduling.request import SECOND_NS, ModelKey
from convoy.app.telemetry.metrics import Metrics
from convoy.app.telemetry.outcomes import CallEnd, CallOutcome
from convoy.app.telemetry.statistics import BATCH_STAGES, BatchRecord, Observed, stages_of
from convoy.app.telemetry.tracing import RequestSpan

_log = logging.getLogger("convoy")
_NO_STAGES: Mapping[str, int] = {}


class Ledger:
    """Used on one event loop. `live` finds a version by its key, also one that is leaving.

    The metrics and a version's statistics call `count` before they are read. `now_ns` is monotonic.
    """

    def __init__(
        self, metrics: Metrics, live: Callable[[ModelKey], Observed], now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._metrics, self._live, self._now_ns = metrics, live, now_ns
        metrics.before_looking = self.count
        # Uncounted records of one second: the function that counts them, their subject, and the records.
        self._waiting: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)
        self._number = self._second = 0

    def stage(self, key: ModelKey, stage: str, ns: int) -> None:
        """A stage of one more request of a call has ended: `decode_wait` or `decode`."""
        self._keep((self._count_stage, key, stage), ns)

    def call(
        self, key: ModelKey | None, protocol: str, ending: CallEnd, ns: int, stages_ns: Mapping[str, int] = _NO_STAGES
    ) -> None:
        """Record an ended call. `key` is None if no model was found.

        `stages_ns` are the call's own stages and not a batch's: `decode_wait`, `decode` and `encode`.
        """
        self._keep((self._count_calls, key, protocol, ending), (ns, stages_ns))

    def batch(self, key: ModelKey, record: BatchRecord) -> None:
        """Record a batch and its answered requests, in one iteration of the loop, so readers see both or neither."""
        self._keep((self._count_batches, key), record)

    def failed(self, key: ModelKey, reason: str, ns: int) -> None:
        """Record a request without an answer after this time; `reason` is one of the statistics' failures."""
        self._keep((self._count_failures, key, reason), ns)

    def turned_away(self, reason: str) -> None:
        """Record a refusal of something that is not a whole call, such as a connection or a file."""
        self._keep((self._count_turned_away, reason), reason)

    def exemplify(self, key: ModelKey, protocol: str, ending: CallEnd, ns: int, span: RequestSpan) -> None:
        """Record a call's span as an exemplar of its duration. Not counted, so it does not wait."""
        self._safely(self._metrics.exemplify, key, protocol, ending, ns, span)

    def count(self) -> None:
        """Count all records. Called before a version's series end, while it can be found."""
        waiting, self._waiting, self._number = self._waiting, defaultdict(list), 0
        for (count, *about), records in waiting.items():
            self._safely(count, *about, records)

    def _keep(self, group: tuple[Any, ...], record: Any) -> None:
        """Count records of an earlier second as that second's, and many together."""
        second = self._now_ns() // SECOND_NS
        # Counting 128 records of one version occupies the event loop for a tenth of a millisecond.
        if second != self._second or self._number >= 128:
            self.count()
            self._second = second
        self._number += 1
        self._waiting[group].append(record)

    def _safely(self, count: Callable[..., None], *about: Any) -> None:
        # A bug must not cost a reader, or the next record, more than its own subject.
        try:
            count(*about)
        except Exception:
            _log.exception("cannot count what happened; this is a bug")

    def _count_batches(self, key: ModelKey, batches: list[BatchRecord]) -> None:
        served = self._live(key)
        served.statistics.record_batches(batches, self._second)
        self._metrics.batches_ran(served, batches, self._second)
        self._count_stages(served, stages_of(batches), [len(one.queued_ns) for one in batches])

    def _count_stage(self, key: ModelKey, stage: str, each_ns: list[int]) -> None:
        self._count_stages(self._live(key), {stage: each_ns})

    def _count_stages(
        self, served: Observed, stages_ns: Mapping[str, Sequence[int]], requests: Sequence[int] | None = None
    ) -> None:
        """`requests` is how many each batch answered."""
        last_minute = served.statistics.last_minute
        for stage, each_ns in stages_ns.items():
            self._metrics.stage_took(served, stage, each_ns)
            last_minute.record(stage, each_ns, self._second, requests if stage in BATCH_STAGES else None)

    def _count_calls(
        self, key: ModelKey | None, protocol: str, ending: CallEnd, calls: list[tuple[int, Mapping[str, int]]]
    ) -> None:
        totals_ns = [ns for ns, _ in calls]
        if ending.reason:
            self._metrics.rejected(ending.reason, len(calls), self._second)
        served = None if key is None else self._live(key)
        self._metrics.calls_ended(served, protocol, ending, totals_ns, self._second)
        if served is None:
            return
        statistics = served.statistics
        statistics.calls.add(ending.outcome.value, len(calls), self._second)
        if ending.reason:
            statistics.refusals.add(str(ending.reason), len(calls), self._second)
        if ending.outcome is CallOutcome.ANSWERED:
            statistics.last_minute.record("total", totals_ns, self._second)
        took_ns: defaultdict[str, list[int]] = defaultdict(list)
        for _, stages_ns in calls:
            for stage, ns in stages_ns.items():
                took_ns[stage].append(ns)
        self._count_stages(served, took_ns)

    def _count_failures(self, key: ModelKey, reason: str, each_ns: list[int]) -> None:
        self._live(key).statistics.record_failures(reason, each_ns)

    def _count_turned_away(self, reason: str, records: list[str]) -> None:
        self._metrics.rejected(reason, len(records), self._second)
