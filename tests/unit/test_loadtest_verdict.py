from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.records import ProcessRecords, merged
from convoy.loadtest.rows import Recorder, Rows, size_bytes
from convoy.loadtest.statistics import Summary, Window, summarise
from convoy.loadtest.units import NS_PER_MS, NS_PER_S
from convoy.loadtest.verdict import judge, lateness_limit_ms


def summary(lateness_ms: list[float], latency_ms: float = 10) -> Summary:
    rows = Rows.over(memoryview(bytearray(size_bytes(len(lateness_ms) + 1))), len(lateness_ms) + 1)
    recorder = Recorder(rows)
    for late_ms in lateness_ms:
        ticket = recorder.begin(0, int(late_ms * NS_PER_MS))
        recorder.finish(ticket, int(latency_ms * NS_PER_MS), None)
    recorder.publish()
    return summarise(merged([ProcessRecords(rows, [])]), Window(0, 0, NS_PER_S), None)


def void(found: Summary, rate: float | None = 100, slo_ms: float | None = None) -> str | None:
    return judge(found, rate=rate, slo_ms=slo_ms, generator_cpu_share=0.1, waited=0).void


def test_a_late_generator_voids_the_run_in_plain_words():
    words = void(summary([0.1] * 980 + [1.2] * 20))
    assert words is not None
    assert "could not keep the schedule of 100 requests/s" in words
    assert "others kept it from running" in words


def test_a_generator_at_its_own_limit_asks_for_a_lower_rate():
    verdict = judge(summary([50.0] * 100), rate=1e6, slo_ms=None, generator_cpu_share=0.98, waited=0)
    assert "lower --rate" in (verdict.void or "")


def test_five_percent_of_the_objective_is_allowed():
    assert void(summary([4.9] * 100), slo_ms=100) is None
    assert void(summary([5.1] * 100), slo_ms=100) is not None


def test_a_closed_loop_has_no_schedule_to_be_late_for():
    assert void(summary([100.0] * 100), rate=None) is None


def test_nothing_measured_is_void():
    assert "nothing was measured" in (void(summary([])) or "")


@given(st.one_of(st.none(), st.floats(0.01, 1e5)), st.one_of(st.none(), st.floats(0.001, 1e5)))
def test_the_limit_is_never_below_a_millisecond(slo_ms, median_ms):
    limit_ms = lateness_limit_ms(slo_ms, median_ms)
    assert limit_ms >= 1
    assert limit_ms == pytest.approx(max(1, 0.05 * (slo_ms if slo_ms is not None else median_ms or 0)))


@given(st.lists(st.floats(0, 50), min_size=1, max_size=300))
def test_void_exactly_when_the_99th_percentile_is_over_the_limit(lateness_ms):
    found = summary(lateness_ms)
    p99_ns = np.sort(found.lateness_ns)[int(np.ceil(0.99 * len(lateness_ms))) - 1]
    assert (void(found) is not None) == (p99_ns > NS_PER_MS)


def test_notes_say_what_qualifies_the_figures():
    base = dataclasses.replace(summary([0.0]), unfinished=3, failed_in_warm_up=2, good=0)
    verdict = judge(base, rate=None, slo_ms=None, generator_cpu_share=0.97, waited=5)
    text = " / ".join(verdict.notes)
    for words in ("97 % of a core", "3 requests were still unanswered", "2 requests failed during the warm-up"):
        assert words in text
    assert "not one request" in text
    assert "waited" not in text  # a closed loop's clients wait by design
    assert "5 requests found all" in judge(base, rate=9, slo_ms=None, generator_cpu_share=0, waited=5).notes[0]


def test_a_generator_that_died_voids_the_run_whatever_the_figures():
    verdict = judge(
        summary([0.0] * 100),
        rate=None,
        slo_ms=None,
        generator_cpu_share=0,
        waited=0,
        deaths=["generator process 2 was killed by SIGKILL"],
    )
    assert "generator process 2 was killed by SIGKILL" in (verdict.void or "")


def test_lateness_is_told_at_three_points():
    lateness = judge(summary([0.1] * 98 + [0.5, 7]), rate=1, slo_ms=None, generator_cpu_share=0, waited=0).lateness
    assert (lateness.p50_ms, lateness.p99_ms, lateness.max_ms, lateness.limit_ms) == (0.1, 0.5, 7, 1)
