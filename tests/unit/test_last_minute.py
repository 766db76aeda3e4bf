"""The last minute in virtual time: what is in it, how exact it is, and what it costs to keep."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from convoy.app.telemetry.statistics import (
    PERIOD_S,
    PERIODS,
    STAGES,
    WINDOW_S,
    LastMinute,
    MinuteCounts,
    PeriodSpan,
    StagePercentiles,
)

MS = 1_000_000
NOTHING = StagePercentiles(None, None, None)


class Clock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def batch(minute: LastMinute, clock: Clock, samples: int, took_ms: int, requests: int = 1) -> None:
    second = int(clock())
    minute.batches.add(samples, 1, second)
    minute.record("queue", [MS] * requests, second)
    for stage, each_ns in (("copy_in", MS), ("compute", took_ms * MS), ("copy_out", MS)):
        minute.record(stage, [each_ns], second, [requests])


def near(wanted_ns: float) -> object:
    rounded_ms = 0.00005  # what is told has four digits
    return pytest.approx(wanted_ns / MS, abs=max(0.0001, wanted_ns / MS * 0.5 / 64 * 1.001 + rounded_ms))


@given(st.floats(0, 10), st.floats(0, 0.999))
def test_of_59_seconds_ago_all_is_in_it_and_of_61_nothing(since_start_s: float, part_s: float) -> None:
    clock = Clock(1000 + part_s)
    minute = LastMinute(clock)
    clock.now_s += since_start_s
    batch(minute, clock, 3, 20)
    minute.record("total", [30 * MS], int(clock()))
    clock.now_s += 59
    assert minute.percentiles("compute").p99_ms == near(20 * MS)
    assert minute.percentiles("total").p50_ms == near(30 * MS)
    assert minute.batch_sizes() == {3: 1}
    assert minute.per_second()[0] > 0
    clock.now_s += 2
    assert minute.stages() == dict.fromkeys(STAGES, NOTHING)
    assert minute.batch_sizes() == {}
    assert minute.per_second() == (0, 0)


times_ns = st.one_of(st.integers(0, 300), st.integers(0, 10 * MS), st.integers(0, 1 << 41))


@given(st.lists(st.lists(times_ns, max_size=40), min_size=1, max_size=40), st.floats(0, 1.4))
@example([[5] * 3000, [7 * MS] * 1000], 0.0)
@example([[1 << 41]], 0.0)
@example([[17134]], 0.0)
def test_a_percentile_is_within_its_bound_of_the_value_of_that_rank(groups: list[list[int]], apart_s: float) -> None:
    clock = Clock()
    minute = LastMinute(clock)
    for values in groups:
        minute.record("total", values, int(clock()))
        minute.percentiles("total")  # looking changes nothing
        clock.now_s += apart_s
    everything = sorted(value for values in groups for value in values)
    seen = minute.percentiles("total")
    if not everything:
        assert seen == NOTHING
        return
    for percent, got in ((50, seen.p50_ms), (95, seen.p95_ms), (99, seen.p99_ms)):
        assert got == near(everything[max(0, math.ceil(len(everything) * percent / 100) - 1)])


def test_a_server_that_has_just_begun_has_its_rate_over_that_time() -> None:
    clock = Clock(1000.7)
    minute = LastMinute(clock)
    batch(minute, clock, 5, 1)
    assert minute.per_second() == (1, 5)
    clock.now_s += 10
    assert minute.per_second() == (pytest.approx(0.1), pytest.approx(0.5))
    for _ in range(2000):
        clock.now_s += 0.1
        batch(minute, clock, 6, 1, requests=2)
    assert minute.per_second() == (pytest.approx(20, rel=0.02), pytest.approx(60, rel=0.02))


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["late", "answered"]), st.integers(1, 9)), max_size=30))
def test_counts_are_those_of_the_last_minute_by_name(events: list[tuple[float, str, int]]) -> None:
    clock = Clock()
    counts = MinuteCounts(clock)
    began_s = clock.now_s
    seen: list[tuple[float, str, int]] = []
    for apart_s, name, amount in events:
        clock.now_s += apart_s
        counts.add(name, amount, int(clock.now_s))
        seen.append((clock.now_s, name, amount))
        oldest = int(clock.now_s) - WINDOW_S
        span_s = max(1, clock.now_s - max(began_s, oldest + 1))
        wanted: dict[str, float] = {}
        for at_s, one, many in seen:
            if int(at_s) > oldest:
                wanted[one] = wanted.get(one, 0) + many / span_s
        assert counts.per_second() == pytest.approx(wanted)
        assert list(counts.per_second()) == sorted(wanted)
    clock.now_s += WINDOW_S + 1
    assert counts.per_second() == {}


events = st.lists(
    st.tuples(st.one_of(st.floats(0, 3), st.floats(0, 700)), st.integers(1, 8), times_ns, st.booleans()), max_size=30
)


@given(st.floats(0, 5), events, st.floats(0, 20))
def test_each_period_of_five_minutes_has_what_there_was_in_it(
    start_s: float, events: list[tuple[float, int, int, bool]], later_s: float
) -> None:
    clock = Clock(1000 + start_s)
    minute, counts = LastMinute(clock), MinuteCounts(clock)
    began = int(clock.now_s) // PERIOD_S
    seen: list[tuple[int, int, int]] = []
    for apart_s, samples, took_ns, is_looked_at in events:
        clock.now_s += apart_s
        batch(minute, clock, samples, 1)
        minute.record("total", [took_ns], int(clock()))
        counts.add("answered", 1, int(clock.now_s))
        seen.append((int(clock.now_s) // PERIOD_S, samples, took_ns))
        if is_looked_at:
            minute.history(minute.span())
    clock.now_s += later_s
    now = int(clock.now_s) // PERIOD_S
    span = minute.span()
    assert list(span.numbers) == list(range(max(began, now - PERIODS), now))
    assert 0 <= span.until_s_ago < PERIOD_S + 1e-6
    rates = counts.history(span).get("answered", [0.0] * len(span.numbers))
    for number, seconds, period, per_second in zip(
        span.numbers, span.seconds, minute.history(span), rates, strict=True
    ):
        own = [(samples, took_ns) for at, samples, took_ns in seen if at == number]
        assert per_second * seconds == pytest.approx(len(own))
        assert sum(size * times for size, times in period.batches.items()) == sum(samples for samples, _ in own)
        if own:
            assert period.total.p99_ms == near(max(took_ns for _, took_ns in own))
        else:
            assert period.total == NOTHING


def test_what_is_kept_of_five_minutes_does_not_grow() -> None:
    clock = Clock()
    minute, counts = LastMinute(clock), MinuteCounts(clock)
    for second in range(5 * PERIOD_S * PERIODS):
        clock.now_s = 1000 + second
        batch(minute, clock, 1, 1)
        minute.record("total", [MS], 1000 + second)
        counts.add("answered", 1, 1000 + second)
    history_s = PERIOD_S * (PERIODS + 1)
    assert len(counts._seconds) == len(minute.batches._seconds) == len(minute._times["total"]._seconds) == history_s
    assert len(minute._requests._seconds) == len(minute._times["compute"]._seconds) == WINDOW_S


def test_a_version_that_began_within_a_period_has_its_rate_over_the_rest_of_it() -> None:
    assert PeriodSpan.of(1003.0, 1011.0) == PeriodSpan(range(200, 202), [2.0, 5.0], 1.0)
    assert PeriodSpan.of(1004.9, 1005.0).seconds == [1.0]
    assert len(PeriodSpan.of(0.0, 1e6).numbers) == PERIODS


def test_means_count_a_batch_for_each_of_its_requests_and_forget_what_is_older_than_a_minute() -> None:
    clock = Clock()
    minute = LastMinute(clock)
    assert minute.means_ms() == dict.fromkeys(STAGES)
    batch(minute, clock, 8, 30, requests=8)
    batch(minute, clock, 1, 3, requests=1)
    minute.record("total", [40 * MS] * 8 + [4 * MS], int(clock()))
    clock.now_s += 1.5
    means = minute.means_ms()
    assert means["compute"] == pytest.approx((8 * 30 + 3) / 9, abs=1e-4)
    assert means["total"] == pytest.approx((8 * 40 + 4) / 9, abs=1e-4)
    assert (means["queue"], means["copy_in"], means["decode"]) == (1, 1, None)
    clock.now_s += WINDOW_S
    assert minute.means_ms() == dict.fromkeys(STAGES)
