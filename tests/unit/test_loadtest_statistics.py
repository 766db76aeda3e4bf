from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.records import GOOD, MAX_PROBLEMS, PENDING, Fault, Problem, Recorder
from loadtest.statistics import NS_PER_MS, NS_PER_S, PERCENTILES, Window, nearest_rank, percentile, summarise

START_NS = 5_000_000_000
REFUSED = Problem(Fault.REFUSED, "nobody listens")
SHED = Problem(Fault.HTTP, "the queue is full", 429)

latencies_ns = st.lists(st.integers(0, 10**10), min_size=1, max_size=300)
# (due after ms, took ms, ended how)
rows = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 3000), st.sampled_from(["good", "failed", "pending"])))


def window(start_s: float = 0, end_s: float = 10) -> Window:
    return Window(START_NS, START_NS + int(start_s * NS_PER_S), START_NS + int(end_s * NS_PER_S))


def recorded(rows: list[tuple[int, int, str]]) -> Recorder:
    recorder = Recorder()
    for due_ms, took_ms, end in rows:
        intended_ns = START_NS + due_ms * NS_PER_MS
        ticket = recorder.begin(intended_ns, intended_ns)
        if end == "good":
            recorder.succeed(ticket, intended_ns + took_ms * NS_PER_MS)
        elif end == "failed":
            recorder.fail(ticket, intended_ns + took_ms * NS_PER_MS, SHED)
    return recorder


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


def test_percentiles_of_known_latencies():
    latency_ns = np.arange(1, 10_001) * NS_PER_MS
    found = [percentile(latency_ns, name).latency_ms for name in PERCENTILES]
    assert found == [5000, 9000, 9500, 9900, 9990]


@given(latencies_ns)
def test_percentiles_never_fall(values):
    values = np.array(sorted(values))
    ranks = [nearest_rank(values, Fraction(name) / 100) for name in PERCENTILES]
    assert ranks == sorted(ranks)


@given(rows, st.floats(0, 2), st.floats(2, 5))
def test_every_request_of_the_window_is_counted_once(rows, start_s, end_s):
    measured = window(start_s, end_s)
    summary = summarise(recorded(rows).freeze(), measured, slo_ms=100)
    due = [row for row in rows if measured.start_ns <= START_NS + row[0] * NS_PER_MS < measured.end_ns]
    assert summary.offered + summary.unfinished == len(due)
    assert summary.good + summary.failed == summary.offered
    assert sum(error.count for error in summary.errors) == summary.failed
    assert sum(summary.good_per_second) == sum(row[2] == "good" for row in rows)


@given(rows, st.integers(0, 3000))
def test_goodput_is_a_share_of_all_that_was_offered(rows, slo_ms):
    summary = summarise(recorded(rows).freeze(), window(), slo_ms=slo_ms)
    ended = [row for row in rows if row[2] != "pending"]
    if not ended:
        assert summary.goodput is None
    else:
        assert summary.goodput == sum(row[2] == "good" and row[1] <= slo_ms for row in ended) / len(ended)


def test_latency_counts_from_the_intended_time():
    recorder = Recorder()
    ticket = recorder.begin(intended_ns=START_NS, taken_ns=START_NS + 3 * NS_PER_MS)
    recorder.succeed(ticket, START_NS + 10 * NS_PER_MS)
    summary = summarise(recorder.freeze(), window(), None)
    assert summary.median_ms == summary.max_ms == 10
    assert summary.lateness_ns.tolist() == [3 * NS_PER_MS]


def test_failures_are_in_no_latency_and_the_warm_up_in_no_figure_but_its_own():
    rows = [(0, 5000, "failed"), (1000, 10, "good"), (1500, 9999, "failed")]
    summary = summarise(recorded(rows).freeze(), window(start_s=1), None)
    assert (summary.offered, summary.good, summary.failed, summary.failed_in_warm_up) == (2, 1, 1, 1)
    assert summary.max_ms == 10


def test_throughput_counts_answers_that_came_within_the_window():
    rows = [(100, 2000, "good"), (1500, 100, "good"), (1900, 500, "good")]
    summary = summarise(recorded(rows).freeze(), window(1, 2), None)
    assert summary.throughput_rps == 1  # the second; the first was due before, and came after


def test_an_empty_run_has_no_figures_and_no_failure():
    summary = summarise(Recorder().freeze(), window(), 10)
    assert (summary.offered, summary.good, summary.failed, summary.goodput) == (0, 0, 0, None)
    assert all(found.latency_ms is None for found in summary.percentiles)


def test_errors_come_most_frequent_first():
    recorder = Recorder()
    for problem in (REFUSED, SHED, SHED):
        recorder.fail(recorder.begin(START_NS, START_NS), START_NS, problem)
    errors = summarise(recorder.freeze(), window(), None).errors
    assert [(error.problem.title, error.count) for error in errors] == [("HTTP 429", 2), ("connection refused", 1)]


def test_texts_without_end_are_folded_together():
    recorder = Recorder()
    for number in range(10 * MAX_PROBLEMS):
        recorder.fail(recorder.begin(0, 0), 0, Problem(Fault.HTTP, f"request {number} failed", 500))
    records = recorder.freeze()
    assert len(records.problems) == MAX_PROBLEMS + 1
    assert np.bincount(records.outcome)[-1] == 9 * MAX_PROBLEMS


def test_what_is_pending_at_the_end_is_failed_and_the_rest_left_alone():
    recorder = recorded([(0, 1, "good"), (0, 1, "failed"), (0, 1, "pending")])
    recorder.fail_pending(START_NS, REFUSED)
    outcome = recorder.freeze().outcome.tolist()
    assert PENDING not in outcome
    assert outcome[0] == GOOD
    assert (recorder.good, recorder.failed) == (1, 2)
