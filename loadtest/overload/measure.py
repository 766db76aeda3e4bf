"""Rounds of open loops: around the capacity, at three times of it, and of small pictures alone and beside large ones.

The generator sends on a schedule and runs on the server's own cores; a request is good that was answered within the
objective, which goes along as its deadline. Where the generator itself was late (`verdict`), others had the cores: that
says nothing of the server, and it is sent again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from convoy.loadtest import runner
from convoy.loadtest.answers import AnswerCheck
from convoy.loadtest.bodies import Payload, predictions_path, request_bytes
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.overload.mix import icons
from convoy.loadtest.peers.server import RunningServer
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.results import Result, whole
from convoy.models.errors import JobError

# Of what a closed loop gets through: the highest goodput lies near it.
AROUND = (0.8, 1.0, 1.25, 1.5)
TIMES_OVER = 3.0
TRIES = 3  # of a rate at which the generator was late
_CLIENTS = 32
_SMALL_RATE = 100.0
_LARGE_CLIENTS = 2
_WARM_UP_S = 1.0
_PASSED_MS = 0.001  # a deadline that nobody can keep


@dataclass(frozen=True, slots=True)
class Offered:
    """One rate for some seconds. `good_rps` were answered within the objective; `refused` of the others were told so,

    `lost` are failures of any other kind, `cpu_us` is the server's CPU time by good answer. `sent_late_ms`: the 99th
    percentile of how late the generator was.
    """

    rate: float
    good_rps: float
    offered: int
    refused: int
    lost: int
    cpu_us: float
    sent_late_ms: float


def best_of(around: Sequence[Offered]) -> Offered:
    """The one with the highest goodput."""
    return max(around, key=lambda one: one.good_rps)


@dataclass(frozen=True, slots=True)
class Overload:
    """One round: rates near the capacity, and three times the best of them, one after the other.

    `refusal_us`: the server's CPU time for each of the same pictures, where all come after their deadline.
    """

    around: tuple[Offered, ...]
    over: Offered
    refusal_us: float

    @property
    def peak(self) -> Offered:
        return best_of(self.around)

    @property
    def share(self) -> float:
        """How much of the highest goodput is left."""
        return self.over.good_rps / self.peak.good_rps


@dataclass(frozen=True, slots=True)
class Company:
    """One round: latencies of small pictures alone, and beside a stream of large ones, milliseconds.

    `sent_late` as for `Offered`: so much of the latencies, at most, is the generator's.
    """

    alone_p50_ms: float
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    large_rps: float
    alone_sent_late_ms: float
    beside_sent_late_ms: float

    @property
    def times(self) -> float:
        return self.beside_p99_ms / self.alone_p99_ms


@dataclass(frozen=True, slots=True)
class OverloadStand:
    """A server, the model in it, and for how long each rate is sent. `slo_ms`: within it an answer is good.

    `mix` are the pictures of `mixed`, `large` those of `largest`, which take seconds to draw.
    """

    server: RunningServer
    endpoint: Endpoint
    model: str
    slo_ms: float
    seconds: float
    mix: Sequence[bytes]
    large: Sequence[bytes]

    def warm_up(self) -> float:
        """Requests a second in a closed loop: where to look for the capacity."""
        return self._closed(self._pool(self.mix, None), _CLIENTS, self.seconds).summary.throughput_rps

    def overload(self, closed_rps: float) -> Overload:
        pool = self._pool(self.mix, self.slo_ms)
        around = tuple(self._offer(pool, times * closed_rps) for times in AROUND)
        over = self._offer(pool, TIMES_OVER * best_of(around).rate)
        return Overload(around, over, self._refusal_us(over.rate))

    def _refusal_us(self, rate: float) -> float:
        """Raises JobError where one is answered."""
        result, used_s = on_time(partial(self._metered, self._pool(self.mix, _PASSED_MS), rate))
        refused = _refused(result)
        if result.summary.good or not refused:
            raise JobError(f"{result.summary.good} were answered after their deadline, {refused} were refused")
        return 1e6 * used_s * result.summary.window_s / self.seconds / refused

    def company(self, beside_first: bool) -> Company:
        """The two in turn, in either order."""
        pool = self._pool(icons(16), None)
        found: dict[bool, tuple[Result, float]] = {}
        for is_beside in (beside_first, not beside_first):
            found[is_beside] = on_time(partial(self._beside if is_beside else self._alone, pool))
        (alone, _), (beside, large_rps) = found[False], found[True]
        late_ms = [_sent_late_ms(one) for one in (alone, beside)]
        return Company(*_latencies(alone), *_latencies(beside), large_rps, *late_ms)

    def _alone(self, pool: RequestPool) -> tuple[Result, float]:
        return self._open(pool, _SMALL_RATE), 0.0

    def _beside(self, pool: RequestPool) -> tuple[Result, float]:
        """And how many large ones were answered a second."""
        with self._large_ones() as told:
            small = self._open(pool, _SMALL_RATE)
        return small, told()

    @contextmanager
    def _large_ones(self) -> Iterator[Callable[[], float]]:
        """Clients of large pictures, for longer than the block takes; gives their answers a second, afterwards."""
        done: list[Result] = []
        pool = self._pool(self.large, None)
        seconds = self.seconds + 4.0
        thread = threading.Thread(target=lambda: done.append(self._closed(pool, _LARGE_CLIENTS, seconds)))
        thread.start()
        # Their generator starts, and the first of them is being decoded.
        thread.join(2.0)

        def told() -> float:
            thread.join()
            return done[0].summary.throughput_rps

        try:
            yield told
        finally:
            thread.join()

    def _offer(self, pool: RequestPool, rate: float) -> Offered:
        result, used_s = on_time(partial(self._metered, pool, rate))
        summary = result.summary
        good = round((summary.goodput or 0.0) * summary.offered)
        refused = _refused(result)
        lost = summary.failed - refused
        # Good are those of the window, and the server's time is of all that was sent.
        cpu_us = 1e6 * used_s * summary.window_s / self.seconds / max(1, good)
        return Offered(
            rate=rate,
            good_rps=good / summary.window_s,
            offered=summary.offered,
            refused=refused,
            lost=lost,
            cpu_us=cpu_us,
            sent_late_ms=_sent_late_ms(result),
        )

    def _metered(self, pool: RequestPool, rate: float) -> tuple[Result, float]:
        """And the server's CPU seconds meanwhile."""
        before_s = self.server.family.cpu_s()
        return self._open(pool, rate), self.server.family.cpu_s() - before_s

    def _open(self, pool: RequestPool, rate: float) -> Result:
        return self._run(replace(self._lasting(self.seconds), rate=rate), pool)

    def _closed(self, pool: RequestPool, clients: int, seconds: float) -> Result:
        return self._run(replace(self._lasting(seconds), concurrency=clients), pool)

    def _lasting(self, seconds: float) -> LoadTestOptions:
        return LoadTestOptions(duration_s=seconds, warm_up_s=_WARM_UP_S, slo_ms=self.slo_ms)

    def _run(self, options: LoadTestOptions, pool: RequestPool) -> Result:
        return whole(options, runner.run(options, pool, self.endpoint))

    def _pool(self, pictures: Sequence[bytes], deadline_ms: float | None) -> RequestPool:
        path = predictions_path(self.model) + ("" if deadline_ms is None else f"?timeout_ms={deadline_ms:g}")
        payloads = [Payload(picture, (("Content-Type", "application/octet-stream"),)) for picture in pictures]
        return RequestPool(
            [request_bytes(self.endpoint, path, one, None) for one in payloads], AnswerCheck("predictions")
        )


def on_time(send: Callable[[], tuple[Result, float]]) -> tuple[Result, float]:
    """The first try whose generator was on time, or the last of them; with whatever was measured beside it."""
    for _ in range(TRIES):
        found = send()
        if found[0].verdict.void is None:
            break
    return found


def _refused(result: Result) -> int:
    return sum(error.count for error in result.summary.errors if error.problem.status in (429, 503, 504))


def _sent_late_ms(result: Result) -> float:
    """Raises JobError where nothing was sent."""
    lateness = result.verdict.lateness
    if lateness is None:
        raise JobError(f"an open loop gave nothing: {result.verdict.void}")
    return lateness.p99_ms


def _latencies(result: Result) -> tuple[float, float]:
    by_name = {one.name: one.latency_ms for one in result.summary.percentiles}
    p50, p99 = by_name["50"], by_name["99"]
    assert p50 is not None
    assert p99 is not None, "a hundred a second for ten seconds are enough for it"
    return p50, p99
