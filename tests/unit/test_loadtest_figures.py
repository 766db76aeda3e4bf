"""What a load test makes of its records: percentiles, intervals, stable windows and the verdict."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.problems import Fault, Problem
from convoy.loadtest.records import ProcessRecords, Records, merged
from convoy.loadtest.rows import GOOD, MAX_PROBLEMS, Recorder, Rows, size_bytes
from convoy.loadtest.statistics import Blocks, Summary, Window, nearest_rank, percentile, summarise
from convoy.loadtest.units import NS_PER_MS, NS_PER_S
from convoy.loadtest.verdict import LEAST_ANSWERS, Verdict, judge, lateness_limit_ms, stability_of

START_NS, END_NS = 7 * NS_PER_S, 17 * NS_PER_S
REFUSED = Problem(Fault.REFUSED, "nobody listens")
SHED = Problem(Fault.HTTP, "the queue is full", 429)

latencies_ns = st.lists(st.integers(0, 10**10), min_size=1, max_size=300)
# (due after ms, took ms, ended how)
rows = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 3000), st.sampled_from(["good", "failed", "pending"])))


def window(start_s: float = 0, end_s: float = 10) -> Window:
    return Window(START_NS, START_NS + int(start_s * NS_PER_S), START_NS + int(end_s * NS_PER_S))


class Book:
    """A recorder over rows that no other process sees, and what it has written down."""

    def __init__(self, capacity: int = 1000) -> None:
        self.rows = Rows.over(memoryview(bytearray(size_bytes(capacity))), capacity)
        self.recorder = Recorder(self.rows)

    def write(self, due_ms: float, late_ms: float, took_ms: float | None, problem: Problem | None = None) -> None:
        """One request, `late_ms` after it was due; without an end if it took no time."""
        due_ns = START_NS + int(due_ms * NS_PER_MS)
        ticket = self.recorder.begin(due_ns, due_ns + int(late_ms * NS_PER_MS))
        if took_ms is not None:
            self.recorder.finish(ticket, due_ns + int(took_ms * NS_PER_MS), problem)

    def kept(self) -> ProcessRecords:
        self.recorder.publish()
        return ProcessRecords(self.rows, self.recorder.problems)


def recorded(rows: list[tuple[int, int, str]]) -> Records:
    book = Book()
    for due_ms, took_ms, end in rows:
        book.write(due_ms, 0, None if end == "pending" else took_ms, SHED if end == "failed" else None)
    return merged([book.kept()])


@given(latencies_ns, st.fractions(0, 1))
def test_nearest_rank_is_the_smallest_value_that_covers_the_share(values, share):
    values = sorted(values)
    found = nearest_rank(np.array(values), share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    if found > values[0]:
        assert sum(value < found for value in values) < share * len(values)


@pytest.mark.parametrize(("name", "needs"), [("50", 20), ("90", 100), ("95", 200), ("99", 1000), ("99.9", 10000)])
def test_a_percentile_needs_ten_answers_beyond_it(name, needs):
    assert percentile(np.arange(needs - 1), name).latency_ms is None
    assert percentile(np.arange(needs), name).latency_ms is not None
    assert percentile(np.arange(needs), name).needs == needs


@given(rows, st.floats(0, 2), st.floats(2, 5))
def test_every_request_of_the_window_is_counted_once(rows, start_s, end_s):
    measured = window(start_s, end_s)
    summary = summarise(recorded(rows), measured, slo_ms=100)
    due = [row for row in rows if measured.start_ns <= START_NS + row[0] * NS_PER_MS < measured.end_ns]
    assert summary.offered + summary.unfinished == len(due)
    assert summary.good + summary.failed == summary.offered
    assert sum(error.count for error in summary.errors) == summary.failed
    before_end = [row for row in rows if START_NS + row[0] * NS_PER_MS < measured.end_ns]
    assert sum(summary.good_per_second) == sum(row[2] == "good" for row in before_end)


@given(rows, st.integers(0, 3000))
def test_goodput_is_a_share_of_all_that_was_offered(rows, slo_ms):
    summary = summarise(recorded(rows), window(), slo_ms=slo_ms)
    ended = [row for row in rows if row[2] != "pending"]
    good = sum(row[2] == "good" and row[1] <= slo_ms for row in ended)
    assert summary.goodput == (good / len(ended) if ended else None)


def test_latency_counts_from_the_intended_time():
    book = Book()
    book.write(due_ms=0, late_ms=3, took_ms=10)
    summary = summarise(merged([book.kept()]), window(), None)
    assert summary.median_ms == summary.max_ms == 10
    assert summary.lateness_ns.tolist() == [3 * NS_PER_MS]


def test_failures_are_in_no_latency_and_the_warm_up_in_no_figure_but_its_own():
    rows = [(0, 5000, "failed"), (1000, 10, "good"), (1500, 9999, "failed")]
    summary = summarise(recorded(rows), window(start_s=1), None)
    assert (summary.offered, summary.good, summary.failed, summary.failed_in_warm_up) == (2, 1, 1, 1)
    assert summary.max_ms == 10


def test_texts_without_end_are_folded_together():
    book = Book()
    for number in range(10 * MAX_PROBLEMS):
        book.write(0, 0, 0, Problem(Fault.HTTP, f"request {number} failed", 500))
    records = merged([book.kept()])
    assert len(records.problems) == MAX_PROBLEMS + 1
    assert np.bincount(records.outcome)[-1] == 9 * MAX_PROBLEMS


def test_rows_of_several_processes_are_merged_in_the_order_in_which_they_were_due():
    first, second = Book(), Book()
    for book, dues_ms, problem in ((first, (0, 20), SHED), (second, (10, 30), REFUSED)):
        for due_ms in dues_ms:
            book.write(due_ms, 0, 99, problem)
    records = merged([first.kept(), second.kept()])
    assert ((records.intended_ns - START_NS) // NS_PER_MS).tolist() == [0, 10, 20, 30]
    assert [records.problems[code - 1] for code in records.outcome] == [SHED, REFUSED, SHED, REFUSED]


def test_a_window_that_belongs_to_a_step_counts_only_that_step():
    rows = [(0, 10, "failed"), (1100, 10, "failed"), (1500, 10, "good"), (2500, 10, "good")]
    step = Window(START_NS + NS_PER_S, START_NS + int(1.2 * NS_PER_S), START_NS + 2 * NS_PER_S)
    summary = summarise(recorded(rows), step, None)
    assert (summary.offered, summary.good, summary.failed_in_warm_up) == (1, 1, 1)
    assert sum(summary.good_per_second) == 1


def evenly(count: int) -> np.ndarray:
    return np.linspace(START_NS, END_NS - 1, count).astype(np.int64)


def test_intervals_cover_the_truth_as_often_as_they_promise():
    covered = 0
    for seed in range(60):
        values = (np.random.default_rng(seed).exponential(1.0, 2000) * 1e6).astype(np.int64)
        (interval,) = Blocks(START_NS, END_NS).percentile_intervals(evenly(2000), values, [0.9])
        covered += interval.low <= -np.log(0.1) * 1e6 <= interval.high
    assert covered >= 0.88 * 60


def test_neighbours_that_are_alike_widen_the_interval():
    generator = np.random.default_rng(3)
    alike = np.repeat(generator.exponential(1e6, 100), 20).astype(np.int64)  # twenty requests in the same queue
    shuffled = generator.permutation(alike)
    found = [
        Blocks(START_NS, END_NS).percentile_intervals(evenly(2000), values, [0.5])[0] for values in (alike, shuffled)
    ]
    assert found[0].high - found[0].low > 2 * (found[1].high - found[1].low)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300), st.floats(0, 1))
def test_ends_of_an_interval_are_latencies_that_were_there_in_order(values, share):
    (interval,) = Blocks(START_NS, END_NS).percentile_intervals(evenly(len(values)), np.array(values), [share])
    assert min(values) <= interval.low <= interval.high <= max(values)


@given(st.lists(st.integers(0, 9), max_size=300))
def test_shares_lie_between_none_and_all(seconds):
    times_ns = np.array(seconds, dtype=np.int64) * NS_PER_S + START_NS
    interval = Blocks(START_NS, END_NS).share_interval(times_ns[::2], times_ns)
    assert (interval is None) == (not seconds)
    if interval is not None:
        assert 0 <= interval.low <= interval.high <= 1


def test_too_short_a_run_has_no_intervals():
    blocks = Blocks(START_NS, START_NS + NS_PER_S // 2)
    assert blocks.rate_interval(evenly(10)) is None
    assert blocks.share_interval(evenly(10), evenly(10)) is None
    assert blocks.percentile_intervals(evenly(10), evenly(10), [0.5]) == [None]


def answers(per_window: list[int], latencies_ms: list[float]) -> Records:
    """So many answers in each of the ten windows, each with its window's latency."""
    finished_ns = np.concatenate(
        [np.linspace(second, second + 1, count, endpoint=False) for second, count in enumerate(per_window)]
    )
    finished_ns = (finished_ns * NS_PER_S).astype(np.int64)
    latency_ns = (np.repeat(latencies_ms, per_window) * NS_PER_MS).astype(np.int64)
    outcome = np.full(len(finished_ns), GOOD, dtype=np.int16)
    intended_ns = finished_ns - latency_ns
    return Records(intended_ns, intended_ns, finished_ns, outcome, ())


def why_not(per_window: list[int], latencies_ms: list[float]) -> str | None:
    return stability_of(answers(per_window, latencies_ms), Window(0, 0, 10 * NS_PER_S)).why_not


def test_three_windows_alike_are_stable_whatever_came_before():
    assert why_not([60] * 7 + [100, 105, 109], [50] * 7 + [10, 10, 10.9]) is None


@pytest.mark.parametrize(
    ("last", "latencies_ms", "words"),
    [
        ([100, 100, 112], [10, 10, 10], "throughput varied by 12 %"),
        ([100, 100, 100], [10, 11.5, 10], "mean latency varied by 15 %"),
        ([100, 120, 100], [10, 12, 10], "throughput varied by 20 % and mean latency varied by 20 %"),
        ([100, 100, 0], [10, 10, 10], "no successful response"),
    ],
)
def test_what_differs_among_the_last_three_is_named(last, latencies_ms, words):
    assert words in (why_not([100] * 7 + last, [10] * 7 + latencies_ms) or "")


def test_windows_are_made_only_where_there_are_answers_for_three():
    assert "longer --duration" in (why_not([14] * 10, [1] * 10) or "")
    found = stability_of(answers([16] * 10, [1] * 10), Window(0, 0, 10 * NS_PER_S))
    assert len(found.windows) == 160 // LEAST_ANSWERS == 3
    assert sum(window.throughput_rps * (window.end_s - window.start_s) for window in found.windows) == pytest.approx(
        160
    )


def summary(lateness_ms: list[float]) -> Summary:
    """Of requests that were sent so late and took ten milliseconds."""
    book = Book(len(lateness_ms) + 1)
    for late_ms in lateness_ms:
        book.write(0, late_ms, 10)
    return summarise(merged([book.kept()]), window(0, 1), None)


def judged(found: Summary, **how: Any) -> Verdict:
    """The verdict on a load of 100 requests/s, unless `how` says otherwise."""
    return judge(found, **{"rate": 100, "slo_ms": None, "generator_cpu_share": 0.1, "waited": 0, **how})


@pytest.mark.parametrize(
    ("lateness_ms", "how", "words"),
    [
        (
            [0.1] * 980 + [1.2] * 20,
            {},
            ["could not keep the schedule of 100 requests/s", "other programs slowed it down"],
        ),
        ([50.0] * 100, {"rate": 1e6, "generator_cpu_share": 0.98}, ["lower --rate"]),
        ([4.9] * 100, {"slo_ms": 100}, None),  # five percent of the objective is allowed
        ([5.1] * 100, {"slo_ms": 100}, ["could not keep the schedule"]),
        ([100.0] * 100, {"rate": None}, None),  # a closed loop has no schedule to be late for
        ([], {}, ["nothing was measured"]),
        (
            [0.0] * 100,
            {"rate": None, "deaths": ["process 2 was killed by SIGKILL"]},
            ["process 2 was killed by SIGKILL"],
        ),
    ],
)
def test_a_run_is_void_with_a_reason_or_not_at_all(lateness_ms, how, words):
    void = judged(summary(lateness_ms), **how).void
    assert (void is None) == (words is None)
    assert all(one in void for one in words or ())


@given(st.one_of(st.none(), st.floats(0.01, 1e5)), st.one_of(st.none(), st.floats(0.001, 1e5)))
def test_the_limit_is_never_below_a_millisecond(slo_ms, median_ms):
    limit_ms = lateness_limit_ms(slo_ms, median_ms)
    assert limit_ms >= 1
    assert limit_ms == pytest.approx(max(1, 0.05 * (slo_ms if slo_ms is not None else median_ms or 0)))


@given(st.lists(st.floats(0, 50), min_size=1, max_size=300))
def test_void_exactly_when_the_99th_percentile_is_over_the_limit(lateness_ms):
    found = summary(lateness_ms)
    p99_ns = np.sort(found.lateness_ns)[int(np.ceil(0.99 * len(lateness_ms))) - 1]
    assert (judged(found).void is not None) == (p99_ns > NS_PER_MS)


def test_notes_say_what_qualifies_the_figures():
    base = dataclasses.replace(summary([0.0]), unfinished=3, failed_in_warm_up=2, good=0)
    verdict = judged(base, rate=None, generator_cpu_share=0.97, waited=5)
    text = " / ".join(verdict.notes)
    for words in ("97 % of a core", "3 requests had no response", "2 requests failed during the warm-up"):
        assert words in text
    assert "waited" not in text  # a closed loop's clients wait by design
    assert "5 requests waited" in judged(base, waited=5).notes[0]


def test_lateness_is_told_at_three_points():
    lateness = judged(summary([0.1] * 98 + [0.5, 7])).lateness
    assert (lateness.p50_ms, lateness.p99_ms, lateness.max_ms, lateness.limit_ms) == (0.1, 0.5, 7, 1)
