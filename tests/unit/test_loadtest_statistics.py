from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.problems import Fault, Problem
from convoy.loadtest.records import ProcessRecords, Records, merged
from convoy.loadtest.rows import MAX_PROBLEMS, Recorder, Rows, size_bytes
from convoy.loadtest.statistics import Window, nearest_rank, percentile, summarise
from convoy.loadtest.units import NS_PER_MS, NS_PER_S

START_NS = 5_000_000_000
REFUSED = Problem(Fault.REFUSED, "nobody listens")
SHED = Problem(Fault.HTTP, "the queue is full", 429)

latencies_ns = st.lists(st.integers(0, 10**10), min_size=1, max_size=300)
# (due after ms, took ms, ended how)
rows = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 3000), st.sampled_from(["good", "failed", "pending"])))


def window(start_s: float = 0, end_s: float = 10) -> Window:
    return Window(START_NS, START_NS + int(start_s * NS_PER_S), START_NS + int(end_s * NS_PER_S))


def private_rows(capacity: int) -> Rows:
    """Rows that no other process sees."""
    return Rows.over(memoryview(bytearray(size_bytes(capacity))), capacity)


class Book:
    """A recorder and what it has written down."""

    def __init__(self, capacity: int = 1000) -> None:
        self.rows = private_rows(capacity)
        self.recorder = Recorder(self.rows)

    def read(self) -> Records:
        self.recorder.publish()
        return merged([ProcessRecords(self.rows, self.recorder.problems)])


def recorded(rows: list[tuple[int, int, str]]) -> Book:
    book = Book()
    recorder = book.recorder
    for due_ms, took_ms, end in rows:
        intended_ns = START_NS + due_ms * NS_PER_MS
        ticket = recorder.begin(intended_ns, intended_ns)
        if end == "good":
            recorder.finish(ticket, intended_ns + took_ms * NS_PER_MS, None)
        elif end == "failed":
            recorder.finish(ticket, intended_ns + took_ms * NS_PER_MS, SHED)
    return book


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
    summary = summarise(recorded(rows).read(), measured, slo_ms=100)
    due = [row for row in rows if measured.start_ns <= START_NS + row[0] * NS_PER_MS < measured.end_ns]
    assert summary.offered + summary.unfinished == len(due)
    assert summary.good + summary.failed == summary.offered
    assert sum(error.count for error in summary.errors) == summary.failed
    before_end = [row for row in rows if START_NS + row[0] * NS_PER_MS < measured.end_ns]
    assert sum(summary.good_per_second) == sum(row[2] == "good" for row in before_end)


@given(rows, st.integers(0, 3000))
def test_goodput_is_a_share_of_all_that_was_offered(rows, slo_ms):
    summary = summarise(recorded(rows).read(), window(), slo_ms=slo_ms)
    ended = [row for row in rows if row[2] != "pending"]
    if not ended:
        assert summary.goodput is None
    else:
        assert summary.goodput == sum(row[2] == "good" and row[1] <= slo_ms for row in ended) / len(ended)


def test_latency_counts_from_the_intended_time():
    book = Book()
    recorder = book.recorder
    ticket = recorder.begin(intended_ns=START_NS, taken_ns=START_NS + 3 * NS_PER_MS)
    recorder.finish(ticket, START_NS + 10 * NS_PER_MS, None)
    summary = summarise(book.read(), window(), None)
    assert summary.median_ms == summary.max_ms == 10
    assert summary.lateness_ns.tolist() == [3 * NS_PER_MS]


def test_failures_are_in_no_latency_and_the_warm_up_in_no_figure_but_its_own():
    rows = [(0, 5000, "failed"), (1000, 10, "good"), (1500, 9999, "failed")]
    summary = summarise(recorded(rows).read(), window(start_s=1), None)
    assert (summary.offered, summary.good, summary.failed, summary.failed_in_warm_up) == (2, 1, 1, 1)
    assert summary.max_ms == 10


def test_texts_without_end_are_folded_together():
    book = Book()
    recorder = book.recorder
    for number in range(10 * MAX_PROBLEMS):
        recorder.finish(recorder.begin(0, 0), 0, Problem(Fault.HTTP, f"request {number} failed", 500))
    records = book.read()
    assert len(records.problems) == MAX_PROBLEMS + 1
    assert np.bincount(records.outcome)[-1] == 9 * MAX_PROBLEMS


def test_rows_of_several_processes_are_merged_in_the_order_in_which_they_were_due():
    first, second = Book(), Book()
    for book, dues_ms, problem in ((first, (0, 20), SHED), (second, (10, 30), REFUSED)):
        for due_ms in dues_ms:
            ticket = book.recorder.begin(START_NS + due_ms * NS_PER_MS, START_NS + due_ms * NS_PER_MS)
            book.recorder.finish(ticket, START_NS + 99 * NS_PER_MS, problem)
        book.recorder.publish()
    records = merged([ProcessRecords(book.rows, book.recorder.problems) for book in (first, second)])
    assert ((records.intended_ns - START_NS) // NS_PER_MS).tolist() == [0, 10, 20, 30]
    assert [records.problems[code - 1] for code in records.outcome] == [SHED, REFUSED, SHED, REFUSED]


def test_a_window_that_belongs_to_a_step_counts_only_that_step():
    rows = [(0, 10, "failed"), (1100, 10, "failed"), (1500, 10, "good"), (2500, 10, "good")]
    step = Window(START_NS + NS_PER_S, START_NS + int(1.2 * NS_PER_S), START_NS + 2 * NS_PER_S)
    summary = summarise(recorded(rows).read(), step, None)
    assert (summary.offered, summary.good, summary.failed_in_warm_up) == (1, 1, 1)
    assert sum(summary.good_per_second) == 1
