"""What the scheduler reports of batches and requests, written down: in statistics, in metrics, and at the lane."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from convoy.app.engines.batch import BatchResult, FailureScope
from convoy.app.lifecycle.catalog import Catalog
from convoy.app.scheduling.policy import Dispatch
from convoy.app.scheduling.queues import Lane
from convoy.app.scheduling.request import Done, ModelKey, Outcome
from convoy.app.telemetry.ledger import Ledger
from convoy.app.telemetry.ran_batches import BatchRecord

_log = logging.getLogger("convoy")
# Of the statistics' failures; what is not here is the model's or its engine's.
_FAILURES = {Outcome.EXPIRED: "REJECTED", Outcome.HOPELESS: "REJECTED", Outcome.STOPPED: "CANCELED"}


class Reports:
    """An `Observer` of the scheduler. `on_lane_lost` hears of lost lanes, which is more than is written down."""

    def __init__(
        self, catalog: Catalog, ledger: Ledger, on_lane_lost: Callable[[ModelKey, Lane, str, FailureScope], None]
    ) -> None:
        self._catalog, self._ledger, self.lane_lost = catalog, ledger, on_lane_lost

    def batch_ran(self, dispatch: Dispatch, answers: BatchResult, done: list[Done], now_ns: int) -> None:
        key, lane, samples = dispatch.key, dispatch.lane, dispatch.samples
        if (at_work := self._catalog.live(key).lane_of(lane)) is not None:
            at_work.last_success_ns = now_ns
        queued_ns = [one.queue_ns for one in done]
        total_ns = len(done) * now_ns - sum([one.request.arrival_ns for one in done])
        padded = lane.padded(samples)
        self._ledger.batch(key, BatchRecord(lane.device, samples, padded, answers.times, queued_ns, total_ns, now_ns))

    def batch_failed(self, dispatch: Dispatch, reason: str) -> None:
        key = dispatch.key
        if (lane := self._catalog.live(key).lane_of(dispatch.lane)) is not None:
            lane.last_failure_ns = time.monotonic_ns()
        _log.warning("a batch of %d for %s version %d failed: %s", dispatch.samples, key.model, key.version, reason)

    def request_failed(self, done: Done) -> None:
        failure = _FAILURES.get(done.outcome, "BACKEND")
        self._ledger.failed(done.request.key, failure, time.monotonic_ns() - done.request.arrival_ns)
