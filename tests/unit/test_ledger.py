"""Records that wait to be counted: whoever looks finds what they would if each had been counted as it came."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.app.engines.batch import StageTimes
from convoy.app.scheduling.request import SECOND_NS, ModelKey
from convoy.app.telemetry.ledger import Ledger
from convoy.app.telemetry.metrics import Metrics
from convoy.app.telemetry.outcomes import ANSWERED, CANCELLED, FAILED, CallEnd, CallOutcome, Refusal
from convoy.app.telemetry.statistics import BatchRecord, LastMinute, MinuteCounts, ModelStatistics, Observed, PeriodSpan

KEYS = [ModelKey("one", 1, 1), ModelKey("two", 3, 2)]
GONE = ModelKey("gone", 1, 9)
ENDINGS = [ANSWERED, CANCELLED, FAILED, CallEnd(CallOutcome.REFUSED, Refusal.QUEUE_FULL)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def ns(self) -> int:
        return int(self.now_s * SECOND_NS)


class Version:
    """What a ledger knows of a version."""

    def __init__(self, key: ModelKey, clock: Clock, before_looking: Callable[[], None]) -> None:
        self.key, self._before_looking = key, before_looking
        self._statistics = ModelStatistics()
        self._statistics.last_minute = LastMinute(clock)
        self._statistics.calls, self._statistics.refusals = MinuteCounts(clock), MinuteCounts(clock)

    @property
    def statistics(self) -> ModelStatistics:
        self._before_looking()
        return self._statistics


class Server:
    """A ledger, and all that is made of it; counted after each record, if it `is_eager`."""

    def __init__(self, *, is_eager: bool) -> None:
        self.clock, self.metrics, self.is_eager = Clock(), Metrics("1.0"), is_eager
        for name in ("_refusals", "_strangers", "_computed_ns"):
            setattr(self.metrics, name, MinuteCounts(self.clock))
        self.ledger = Ledger(self.metrics, lambda key: cast(Observed, self.versions[key]), self.clock.ns)
        self.versions = {key: Version(key, self.clock, lambda: self.metrics.before_looking()) for key in KEYS}

    def record(self, what: str, *args: Any) -> None:
        getattr(self.ledger, what)(*args)
        if self.is_eager:
            self.ledger.count()

    def seen(self) -> list[Any]:
        """By every reader; the first of them counts."""
        # Sums of seconds depend a little on the order in which they are added.
        exported = {
            series: pytest.approx(float(value), rel=1e-12)
            for series, value in re.findall(r"^([^#\n].*) (\S+)$", self.metrics.render().decode(), re.MULTILINE)
            if "_created" not in series
        }
        of_all = [self.metrics.refusals(), self.metrics.strangers(), self.metrics.computed_ns()]
        return [exported, [one.per_second() for one in of_all], *map(self.of, KEYS)]

    def of(self, key: ModelKey) -> list[Any]:
        own = self.versions[key].statistics
        minute, span = own.last_minute, PeriodSpan.of(1000.0, self.clock.now_s)
        return [
            [own.success, own.fail, own.queue, own.compute],
            [own.inference_count, own.execution_count, own.failures_by_reason, own.by_batch_size],
            [minute.per_second(), minute.stages(), minute.means_ms(), minute.batch_sizes(), minute.history(span)],
            [one.per_second() for one in (own.calls, own.refusals)],
            [one.history(span) for one in (own.calls, own.refusals)],
        ]


ns = st.integers(0, 5 * SECOND_NS)
stages = st.dictionaries(st.sampled_from(["decode", "decode_wait", "encode"]), ns)
keys = st.sampled_from(KEYS)
records = st.one_of(
    st.tuples(st.just("call"), st.one_of(st.none(), keys), st.just("v2"), st.sampled_from(ENDINGS), ns, stages),
    st.tuples(st.just("stage"), keys, st.sampled_from(["decode", "decode_wait", "encode"]), ns),
    st.tuples(st.just("turned_away"), st.sampled_from(["connections", "calls"])),
    st.tuples(st.just("failed"), keys, st.sampled_from(["REJECTED", "CANCELED", "BACKEND"]), ns),
    st.tuples(
        st.just("batch"),
        keys,
        st.builds(
            BatchRecord,
            *(st.sampled_from(["cpu", "cuda:0"]), st.integers(1, 8), st.integers(8, 16)),
            *(st.builds(StageTimes, ns, ns, ns), st.lists(ns, min_size=1, max_size=8), ns, st.just(0)),
        ),
    ),
)
apart_s = st.one_of(st.just(0.0), st.floats(0, 2), st.floats(0, 100))


@settings(max_examples=50)
@given(st.lists(st.tuples(apart_s, records), max_size=60), apart_s)
def test_whoever_looks_finds_what_was_recorded_in_the_second_in_which_it_was(
    events: list[tuple[float, tuple[Any, ...]]], later_s: float
) -> None:
    at_once, when_looked_at = Server(is_eager=True), Server(is_eager=False)
    for apart_s, record in events:
        for server in (at_once, when_looked_at):
            server.clock.now_s += apart_s
            server.record(*record)
    for server in (at_once, when_looked_at):
        server.clock.now_s += later_s
    assert when_looked_at.seen() == at_once.seen()


def test_what_is_recorded_counts_in_its_second() -> None:
    server = Server(is_eager=False)
    for second in (0, 1, 7):
        server.clock.now_s = 1000.5 + second
        server.record("call", KEYS[0], "v2", ANSWERED, (second + 1) * SECOND_NS, {"decode": 0})
        server.record("batch", KEYS[0], BatchRecord("cpu", 2, 2, StageTimes(1, 2, 3), [4], 5, 0))
        server.record("call", KEYS[0], "v2", ENDINGS[3], 5)
    server.clock.now_s = 1060.9  # the first is older than a minute
    minute, span = server.versions[KEYS[0]].statistics.last_minute, PeriodSpan.of(1000.5, server.clock.now_s)
    assert minute.batch_sizes() == {2: 2}
    assert minute.percentiles("total").p50_ms == pytest.approx(2000, rel=0.01)
    by_period = [period.batches for period in minute.history(span)]
    assert by_period[:3] == [{2: 2}, {2: 1}, {}]
    assert server.versions[KEYS[0]].statistics.refusals.history(span)["queue_full"][:3] == pytest.approx(
        [2 / 4.5, 0.2, 0]
    )


READERS: list[Callable[[Server], object]] = [
    lambda server: b'convoy_batch_size_count{model="one",version="1"} 1.0' in server.metrics.render(),
    lambda server: server.versions[KEYS[0]].statistics.execution_count == 1,
    lambda server: server.metrics.strangers().per_second() == {"cancelled": 1},
    lambda server: server.metrics.computed_ns().per_second() == {"cpu": 2},
    lambda server: server.metrics.refusals().per_second() == {"queue_full": 1},
]


@pytest.mark.parametrize("sees_all", READERS)
def test_every_reader_sees_all(sees_all: Callable[[Server], object]) -> None:
    server = Server(is_eager=False)
    server.record("call", KEYS[0], "v2", ENDINGS[3], 5)
    server.record("call", None, "v2", CANCELLED, 5)
    server.record("batch", KEYS[0], BatchRecord("cpu", 1, 1, StageTimes(1, 2, 3), [4], 5, 0))
    assert sees_all(server)


@pytest.mark.parametrize(
    "wrong",
    [
        ("batch", GONE, BatchRecord("cpu", 1, 1, StageTimes(1, 2, 3), [4], 5, 0)),
        ("stage", GONE, "decode", 5),
        ("call", GONE, "v2", CANCELLED, 5),
        ("failed", KEYS[0], "no such reason", 5),
    ],
    ids=lambda wrong: wrong[0],
)
def test_what_cannot_be_counted_costs_nothing_but_itself(
    wrong: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(is_eager=False)
    server.record(*wrong)
    server.record("batch", KEYS[0], BatchRecord("cpu", 1, 1, StageTimes(1, 2, 3), [4], 5, 0))
    server.record("call", KEYS[0], "v2", ANSWERED, 4, {"decode": 2})
    server.record("failed", KEYS[0], "REJECTED", 5)
    own = server.versions[KEYS[0]].statistics
    assert (own.execution_count, own.failures_by_reason["REJECTED"]) == (1, 1)
    assert own.calls.per_second() == {"answered": 1}
    assert "cannot count" in caplog.text


def test_what_waits_is_bounded() -> None:
    server = Server(is_eager=False)
    for _ in range(5000):
        server.record("call", KEYS[0], "v2", ANSWERED, 4, {"decode": 2})
    assert sum(map(len, server.ledger._waiting.values())) < 1000
