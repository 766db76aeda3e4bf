"""The search against targets that are a formula: what it tries, what it ends with, and what it says."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

from convoy.loadtest.answers import AnswerCheck
from convoy.loadtest.arrivals import RateStep
from convoy.loadtest.command import EXIT_FAILED, exit_code, find_capacity
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.observe import Observation
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.problems import Fault, Problem
from convoy.loadtest.records import Records
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.results import LoadTestOutcome
from convoy.loadtest.runner import GeneratorUse, Measurement
from convoy.loadtest.statistics import Window
from convoy.loadtest.target import LoadTarget
from convoy.loadtest.units import NS_PER_MS, NS_PER_S
from convoy.loadtest.view import LiveView, print_outcome

TARGET = LoadTarget(
    Endpoint("http://h:1", "h", "127.0.0.1", 1, False, ""),
    "m",
    "binary",
    RequestPool([b""], AnswerCheck("infer")),
    {},
    {},
)
OPTIONS = LoadTestOptions(find_capacity=True, slo_ms=20, duration_s=5, warm_up_s=0)
REFUSED = Problem(Fault.REFUSED, "nobody listens")


def measured(options: LoadTestOptions, *, good: float, late_ms: float = 0, death: str | None = None) -> Measurement:
    """`good` is the share that is answered well."""
    rate = options.rate or 500
    due_ns = np.linspace(0, options.duration_s * NS_PER_S, int(rate * options.duration_s), endpoint=False).astype(
        np.int64
    )
    outcome = (np.arange(len(due_ns)) % 100 >= 100 * good).astype(np.int16)
    taken_ns = due_ns + int(late_ms * NS_PER_MS)
    return Measurement(
        records=Records(due_ns, taken_ns, taken_ns + NS_PER_MS, outcome, (REFUSED,)),
        window=Window(0, 0, int(options.duration_s * NS_PER_S)),
        steps=() if options.rate is None else (RateStep(rate, 0, options.duration_s),),
        interrupted=False,
        waited=0,
        generators=(GeneratorUse(0.1, "uvloop", "timerfd", death),),
        wall_s=options.duration_s,
    )


def searched(answer: Callable[[LoadTestOptions], Measurement]) -> tuple[LoadTestOutcome, str]:
    """What comes of it, and all that is printed meanwhile and in the end."""
    console = Console(file=io.StringIO(), width=80)
    observe = lambda options: Observation(answer(options), None, None)  # noqa: E731
    observer: Any = SimpleNamespace(audience=LiveView(console), observe=observe)
    outcome = find_capacity(TARGET, OPTIONS, observer)
    print_outcome(console, outcome)
    return outcome, " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_the_most_that_a_server_sustains_is_bracketed_and_each_probe_is_told() -> None:
    outcome, said = searched(lambda options: measured(options, good=1.0 if (options.rate or 0) <= 400 else 0.5))
    assert outcome.capacity is not None
    assert outcome.capacity.ending == "bracketed"
    assert 350 < (outcome.capacity.sustained or 0) <= 400 < (outcome.capacity.failed or 0) < 450
    assert [
        words
        for words in ("250.0 requests/s: 100.00 % good, sustained", "probe 1", "The bracket is")
        if words not in said
    ] == []
    assert exit_code(outcome) == 0


def test_where_the_generator_is_always_late_the_search_stops_and_says_why() -> None:
    outcome, said = searched(lambda options: measured(options, good=True, late_ms=0 if options.rate is None else 30))
    assert [row.rate for row in outcome.rows] == [250, 250, 125, 125]
    assert "No capacity: 4 tries in a row were void; nothing is known of the server" in said
    assert said.count("could not keep the schedule of 125 requests/s") == 1  # it is said once
    assert "give it a core of its own, or run it on another machine" in said
    assert exit_code(outcome) == EXIT_FAILED


def test_a_server_that_went_away_ends_it_with_how_it_failed() -> None:
    outcome, said = searched(lambda options: measured(options, good=options.rate is None))
    assert len(outcome.rows) == 1
    assert "not one request was answered well (connection refused: nobody listens)" in said
    assert exit_code(outcome) == EXIT_FAILED
