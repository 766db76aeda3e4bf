"""The search for the capacity, and what is said of outcomes of every kind, the empty ones included."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_export_report import Page

from convoy.loadtest import words
from convoy.loadtest.answers import AnswerCheck
from convoy.loadtest.arrivals import RateStep
from convoy.loadtest.capacity import MOST_PROBES, NARROW, Capacity, CapacityProbe, Limits, conclude, next_rate
from convoy.loadtest.command import EXIT_FAILED, exit_code, find_capacity
from convoy.loadtest.document import document, table
from convoy.loadtest.endpoint import Endpoint
from convoy.loadtest.observe import Observation
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.problems import Fault, Problem
from convoy.loadtest.records import Records
from convoy.loadtest.report.page import render
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.results import LoadTestOutcome, by_step, whole
from convoy.loadtest.runner import GeneratorUse, Measurement
from convoy.loadtest.server_side import BatchCount, ProcessReading, ServerSide, StageMean, UseReading, server_use
from convoy.loadtest.statistics import Window
from convoy.loadtest.target import LoadTarget
from convoy.loadtest.units import NS_PER_MS, NS_PER_S
from convoy.loadtest.view import LiveView, print_outcome

LIMITS = Limits(least=10, most=100_000)


def search(answer: Callable[[float], CapacityProbe], first: float) -> Capacity:
    probes: list[CapacityProbe] = []
    while (rate := next_rate(probes, first, LIMITS)) is not None:
        probes.append(answer(rate))
    return conclude(probes)


def sustains(limit: float) -> Callable[[float], CapacityProbe]:
    return lambda rate: CapacityProbe(rate, 1.0 if rate <= limit else 0.5, False, 100)


@given(st.floats(10, 99_000), st.floats(0, 200_000))
def test_the_bracket_holds_the_limit_and_is_narrow(limit, first):
    found = search(sustains(limit), first)
    assert found.ending == "bracketed"
    assert found.sustained <= limit < found.failed
    assert found.width <= NARROW * found.sustained
    assert len(found.probes) <= MOST_PROBES


def test_the_bracket_comes_before_the_bisection():
    rates = [probe.rate for probe in search(sustains(1000), 300).probes]
    assert rates[:5] == [300, 600, 1200, 900, 1050]


@pytest.mark.parametrize(
    ("limit", "said"), [(1, ("too slow", None, LIMITS.least)), (1e9, ("not reached", LIMITS.most, None))]
)
def test_a_server_that_sustains_nothing_or_everything_is_said_to(limit, said):
    found = search(sustains(limit), 5000)
    assert (found.ending, found.sustained, found.failed) == said


def test_a_rate_at_which_the_generator_was_late_once_is_tried_again():
    tried: list[float] = []

    def answer(rate: float) -> CapacityProbe:
        tried.append(rate)
        return CapacityProbe(rate, 1.0 if rate <= 1000 else 0.5, tried.count(rate) == 1 and rate > 900, 100)

    found = search(answer, 900)
    assert found.ending == "bracketed"
    assert found.sustained <= 1000 < found.failed
    assert tried[:4] == [900, 1800, 1800, 1350]


def test_where_everything_is_void_the_search_stops_soon_and_says_why():
    found = search(lambda rate: CapacityProbe(rate, 1.0, True, 100, f"late at {rate:g}"), 1000)
    assert [probe.rate for probe in found.probes] == [1000, 1000, 500, 500]
    assert (found.ending, found.sustained) == ("generator", None)
    assert found.probes[-1].reason == "late at 500"


@pytest.mark.parametrize(("goodput", "sustained"), [(0.99, True), (0.9899, False), (None, False)])
def test_sustained_is_99_percent(goodput, sustained):
    assert CapacityProbe(1, goodput, False, 1).sustained is sustained
    assert not CapacityProbe(1, goodput, True, 1).sustained


ENDPOINT = Endpoint("http://h:1", "h", "127.0.0.1", 1, False, "")
NASTY = '<b onclick="x">&'
FAILED = Problem(Fault.HTTP, NASTY, 500)
TARGET = LoadTarget(ENDPOINT, NASTY, "binary", RequestPool([b""], AnswerCheck("infer")), {"name": NASTY}, {})
SERVER = ServerSide(
    (StageMean("queue", 1.0, 10), StageMean("compute", 2.0, 10)), tuple(BatchCount(size, 3) for size in range(1, 200))
)

READINGS = [
    UseReading(at * NS_PER_S // 4, (ProcessReading("core", 0.2 * at, 50e6, 1), ProcessReading(NASTY, 0.1, 9e6, 1)))
    for at in range(20)
]


def measured(
    seconds: float,
    count: int,
    *,
    rates: Sequence[float] = (),
    late_ms: float = 0.0,
    problem: Problem | None = None,
    **changes: Any,
) -> Measurement:
    """So many requests, evenly spread over a step for each of the rates; all of them fail if there is a problem."""
    intended_ns = np.linspace(0, seconds * NS_PER_S, count, endpoint=False).astype(np.int64)
    taken_ns = intended_ns + int(late_ms * NS_PER_MS)
    latency_ns = (np.random.default_rng(0).exponential(5, count) * NS_PER_MS).astype(np.int64)
    outcome = np.full(count, 0 if problem is None else 1, dtype=np.int16)
    step_s = seconds / max(1, len(rates))
    given = {
        "records": Records(intended_ns, taken_ns, taken_ns + latency_ns, outcome, (problem or FAILED,)),
        "window": Window(0, int(0.1 * NS_PER_S), int(seconds * NS_PER_S)),
        "steps": tuple(RateStep(rate, at * step_s, (at + 1) * step_s) for at, rate in enumerate(rates)),
        "interrupted": False,
        "waited": 0,
        "generators": (GeneratorUse(0.5, "uvloop", "timerfd", None),),
        "wall_s": seconds,
    }
    return Measurement(**{**given, **changes})


def searched_against(answer: Callable[[LoadTestOptions], Measurement]) -> tuple[LoadTestOutcome, str]:
    """What comes of the command's own search where each probe is answered like this, and all that it prints."""
    console = Console(file=io.StringIO(), width=80)

    def observe(options: LoadTestOptions) -> Observation:
        return Observation(answer(options), None, None)

    observer: Any = SimpleNamespace(audience=LiveView(console), observe=observe)
    options = LoadTestOptions(find_capacity=True, slo_ms=20, duration_s=5, warm_up_s=0)
    outcome = find_capacity(TARGET, options, observer)
    print_outcome(console, outcome)
    return outcome, " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def probed(
    options: LoadTestOptions, late_ms: float = 0.0, problem: Problem | None = None, took_ms: float = 1.0
) -> Measurement:
    rate, seconds = options.rate or 500, options.duration_s
    rates = () if options.rate is None else (rate,)
    window = Window(0, 0, int(seconds * NS_PER_S))
    found = measured(seconds, int(rate * seconds), rates=rates, late_ms=late_ms, problem=problem, window=window)
    finished_ns = found.records.taken_ns + int(took_ms * NS_PER_MS)
    return replace(found, records=replace(found.records, finished_ns=finished_ns))


def printed(outcome: LoadTestOutcome) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_outcome(console, outcome)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


REFUSED = Problem(Fault.REFUSED, "nobody listens")


def test_the_most_that_a_server_sustains_is_bracketed_and_each_probe_is_told() -> None:
    outcome, said = searched_against(lambda options: probed(options, took_ms=1 if (options.rate or 0) <= 400 else 30))
    assert outcome.capacity is not None
    assert outcome.capacity.ending == "bracketed"
    assert 350 < (outcome.capacity.sustained or 0) <= 400 < (outcome.capacity.failed or 0) < 450
    for line in ("250.0 requests/s: 100.00 % in time, sustained", "probe 1", "Valid. Capacity: "):
        assert line in said
    assert exit_code(outcome) == 0


def test_where_the_generator_is_always_late_the_search_stops_and_says_why() -> None:
    outcome, said = searched_against(lambda options: probed(options, late_ms=0 if options.rate is None else 30))
    assert [row.rate for row in outcome.rows] == [250, 250, 125, 125]
    assert "Not valid. No capacity found: 4 probes in a row were not valid; the server was not measured" in said
    assert said.count("could not keep the schedule of 125 requests/s") == 1  # it is said once
    assert "give it its own core, or run it on another machine" in said
    assert exit_code(outcome) == EXIT_FAILED


def test_a_server_that_went_away_ends_it_with_how_it_failed() -> None:
    outcome, said = searched_against(lambda options: probed(options, problem=None if options.rate is None else REFUSED))
    assert len(outcome.rows) == 1
    assert "no request succeeded (connection refused: nobody listens)" in said
    assert exit_code(outcome) == EXIT_FAILED


def once(measurement: Measurement, **options) -> LoadTestOutcome:
    asked = LoadTestOptions(slo_ms=20, duration_s=5, warm_up_s=0.1, **options)
    rows, shown = by_step(asked, measurement), whole(asked, measurement)
    use = server_use(READINGS, measurement.records, measurement.window)
    return LoadTestOutcome(TARGET, asked, rows, shown, None, SERVER, use, measurement.interrupted)


def searched(ending: str, low: float | None, high: float | None, probes: int, **of_each) -> LoadTestOutcome:
    asked = LoadTestOptions(slo_ms=20, find_capacity=True, duration_s=5)
    rows = tuple(
        whole(LoadTestOptions(rate=100.0 * n, slo_ms=20), measured(5, 2000, rates=(100,)), f"probe {n}")
        for n in range(1, 5)
    )
    tried = tuple(CapacityProbe(100.0 * n, 0.5, **{"void": False, "answered": 10, **of_each}) for n in range(probes))
    return LoadTestOutcome(TARGET, asked, rows, rows[0], Capacity(tried, low, high, ending), None, None, False)  # type: ignore[arg-type]


def paced(seconds: float, rate: int, factor: float, **how: Any) -> Measurement:
    """Each response takes a millisecond. In the last tenth of the run the rate is multiplied by the factor."""
    found = measured(seconds, int(seconds * rate), **how)
    slow_s = 0.9 * seconds
    times_s = [*np.arange(0, slow_s, 1 / rate), *np.arange(slow_s, seconds, 1 / factor / rate)]
    intended_ns = (np.array(times_s) * NS_PER_S).astype(np.int64)
    outcome = np.zeros(len(intended_ns), dtype=np.int16)
    return replace(found, records=Records(intended_ns, intended_ns, intended_ns + NS_PER_MS, outcome, ()))


def failing(measurement: Measurement, count: int) -> Measurement:
    """With that many failed requests, evenly spread over what is measured."""
    outcome = measurement.records.outcome.copy()
    outcome[100 :: (len(outcome) - 100) // count][:count] = 1
    return replace(measurement, records=replace(measurement.records, outcome=outcome))


WORDS = {
    **dict.fromkeys(("closed", "open", "found"), "valid"),
    **dict.fromkeys(("unstable", "unstable steps"), "valid, but not stable"),
    "some failed": "valid, but requests failed",
}
OUTCOMES = {
    "closed": once(paced(5, 400, 1), concurrency=4),
    "open": once(paced(5, 400, 1, rates=(100,)), rate=400),
    "steps": once(measured(10, 4000, rates=(100, 200)), steps=(100, 200)),
    "all failed": once(measured(5, 500, problem=FAILED), concurrency=4),
    "one answer": once(measured(5, 1), concurrency=4),
    "unstable": once(paced(5, 100, 2), concurrency=4),
    "unstable steps": once(paced(10, 200, 2, rates=(100, 200)), steps=(100, 200)),
    "some failed": once(failing(measured(5, 2000), 100), concurrency=4),
    "stopped": once(measured(5, 2000, interrupted=True), concurrency=4),
    "nothing": once(measured(5, 0), concurrency=4),
    "stopped before the start": once(measured(5, 0, interrupted=True, window=Window(10, 20, 5)), concurrency=4),
    "died": once(measured(5, 500, generators=(GeneratorUse(0, "", "", "generator process 1 was killed"),)), rate=5),
    "found": searched("bracketed", 100, 104, 5),
    "generator": searched("generator", 100, 104, 5),
    "not reached": searched("not reached", 1e5, None, 5),
    "too slow": searched("too slow", None, 20, 5),
    "too noisy": searched("too noisy", 100, 200, 5),
    "dead": searched("dead", None, 50, 1, reason="connection refused: nobody listens"),
    "all void": searched("generator", None, 50, 4, void=True, reason="generator process 1 was killed"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_outcome_has_a_page_that_loads_nothing_and_trusts_no_text(name):
    page = render(OUTCOMES[name])
    tags = Page(page).tags
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags}
    assert not [tag for tag, attributes in tags if {"onclick", "src", "href"} & set(attributes)]
    assert "nan" not in page.lower().replace("finance", "")


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_outcome_is_printed_whole_in_80_columns_and_written(name):
    outcome = OUTCOMES[name]
    console = Console(file=io.StringIO(), width=80)
    print_outcome(console, outcome)
    shown = console.file.getvalue()
    assert words.title(outcome) in " ".join(shown.split())
    assert json.loads(document(outcome))["rows"]
    assert len(table(outcome).splitlines()) == 1 + len(outcome.rows)
    assert "\u2026" not in shown
    for row in outcome.rows if len(outcome.rows) > 1 else ():
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{row.name} ")]
        assert f" {row.rate:,.1f} " in line
        assert len(line.rstrip()) <= 80


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("closed", "All requests succeeded."),
        ("open", "All requests succeeded, and the load generator kept its schedule."),
        ("unstable", "Throughput varied by 100 % over the last three windows (limit 10 %)."),
        ("unstable steps", "1 of 2 steps; step 2: throughput varied by"),
        ("some failed", "100 of 1,960 requests failed."),
        ("all failed", "None of the 490 requests succeeded."),
        ("nothing", "Nothing was measured"),
        ("stopped before the start", "Nothing was measured"),
        ("stopped", "stopped early"),
        ("died", "Generator process 1 was killed"),
        ("found", "104.0 requests/s (4.0 % higher), was not sustained"),
        ("generator", "the server sustains at least 100.0"),
        ("not reached", "all rates were sustained"),
        ("too slow", "even 20.0 requests/s were not sustained"),
        ("too noisy", "wider than 5 %"),
        ("dead", "no request succeeded (connection refused: nobody listens)"),
        ("all void", "4 probes in a row were not valid; the server was not measured. Last reason: generator process 1"),
    ],
)
def test_page_console_json_and_exit_code_have_one_verdict(name, said):
    outcome = OUTCOMES[name]
    verdict = words.verdict(outcome)
    assert said in verdict.why
    assert verdict.word == WORDS.get(name, "not valid")
    page = render(outcome)
    level, word, why = re.search(r'<p class="verdict is-(\w+)"><b>(.*?)</b>(.*?)</p>', page).groups()
    assert level == {"valid": "good", "not valid": "bad"}.get(verdict.word, "warn")
    assert (word, html.unescape(why)) == (verdict.word.capitalize(), verdict.why)
    assert page.count(why) == 1, "no sentence twice"
    shown = printed(outcome)
    assert shown.endswith(f"{verdict.word.capitalize()}. {' '.join(verdict.why.split())}")
    assert shown.count(verdict.why) == 1
    written = json.loads(document(outcome))
    assert (written["verdict"], written["verdict_reason"]) == (verdict.word, verdict.why)
    if not outcome.interrupted:
        assert exit_code(outcome) == (0 if verdict.word in ("valid", "valid, but not stable") else 1)
