from __future__ import annotations

import numpy as np
import pytest

from convoy.loadtest.records import Records
from convoy.loadtest.rows import GOOD
from convoy.loadtest.statistics import Window
from convoy.loadtest.units import NS_PER_MS, NS_PER_S
from convoy.loadtest.verdict import LEAST_ANSWERS, stability_of

SECONDS = 10
WINDOW = Window(0, 0, SECONDS * NS_PER_S)


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
    return stability_of(answers(per_window, latencies_ms), WINDOW).why_not


def test_three_windows_alike_are_stable_whatever_came_before():
    assert why_not([60] * 7 + [100, 105, 109], [50] * 7 + [10, 10, 10.9]) is None


@pytest.mark.parametrize(
    ("last", "latencies_ms", "words"),
    [
        ([100, 100, 112], [10, 10, 10], "throughput differed by 12 %"),
        ([100, 100, 100], [10, 11.5, 10], "mean latency differed by 15 %"),
        ([100, 120, 100], [10, 12, 10], "throughput differed by 20 % and mean latency differed by 20 %"),
        ([100, 100, 0], [10, 10, 10], "without a good answer"),
    ],
)
def test_what_differs_among_the_last_three_is_named(last, latencies_ms, words):
    assert words in (why_not([100] * 7 + last, [10] * 7 + latencies_ms) or "")


def test_windows_are_made_only_where_there_are_answers_for_three():
    assert "run longer" in (why_not([14] * 10, [1] * 10) or "")
    found = stability_of(answers([16] * 10, [1] * 10), WINDOW)
    assert len(found.windows) == 160 // LEAST_ANSWERS == 3
    assert sum(window.throughput_rps * (window.end_s - window.start_s) for window in found.windows) == pytest.approx(
        160
    )
