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
from convoy.loadtest.view import print_outcome

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


def measured(options: LoadTestOptions, *, good: bool, late_ms: float = 0, death: str | None = None) -> Measurement:
    rate = options.rate or 500
    due_ns = np.linspace(0, options.duration_s * NS_PER_S, int(rate * options.duration_s), endpoint=False).astype(
        np.int64
    )
    outcome = np.full(len(due_ns), 0 if good else 1, dtype=np.int16)
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


def searched(answer: Callable[[LoadTestOptions], Measurement]) -> LoadTestOutcome:
    class Observer:
        audience = SimpleNamespace(probed=lambda probe: None)

        def observe(self, options: LoadTestOptions) -> Observation:
            return Observation(answer(options), None, None)

    observer: Any = Observer()
    return find_capacity(TARGET, OPTIONS, observer)


def printed(outcome: LoadTestOutcome) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_outcome(console, outcome)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_where_the_generator_is_always_late_the_search_stops_and_says_why() -> None:
    outcome = searched(lambda options: measured(options, good=True, late_ms=0 if options.rate is None else 30))
    assert [row.rate for row in outcome.rows] == [250, 250, 125, 125]
    said = printed(outcome)
    assert "No capacity: 4 tries in a row were void; nothing is known of the server" in said
    assert said.count("could not keep the schedule of 125 requests/s") == 1  # it is said once
    assert "give it a core of its own, or run it on another machine" in said
    assert exit_code(outcome) == EXIT_FAILED


def test_a_server_that_went_away_ends_it_with_how_it_failed() -> None:
    outcome = searched(lambda options: measured(options, good=options.rate is None))
    assert len(outcome.rows) == 1
    assert "not one request was answered well (connection refused: nobody listens)" in printed(outcome)
    assert exit_code(outcome) == EXIT_FAILED
