"""The page, the tables and the sentences for outcomes of every kind, the empty ones included."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from convoy.loadtest import words
from convoy.loadtest.answers import AnswerCheck
from convoy.loadtest.arrivals import RateStep
from convoy.loadtest.capacity import Capacity, CapacityProbe
from convoy.loadtest.document import document, table
from convoy.loadtest.endpoint import Endpoint
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
from convoy.loadtest.view import print_outcome

ENDPOINT = Endpoint("http://h:1", "h", "127.0.0.1", 1, False, "")
NASTY = '<b onclick="x">&'
TARGET = LoadTarget(ENDPOINT, NASTY, "binary", RequestPool([b""], AnswerCheck("infer")), {"name": NASTY}, {})
SERVER = ServerSide(
    (StageMean("queue", 1.0, 10), StageMean("compute", 2.0, 10)), tuple(BatchCount(size, 3) for size in range(1, 200))
)

READINGS = [
    UseReading(at * NS_PER_S // 4, (ProcessReading("core", 0.2 * at, 50e6, 1), ProcessReading(NASTY, 0.1, 9e6, 1)))
    for at in range(20)
]


def measured(seconds: float, count: int, *, failed: bool = False, steps: int = 0, **changes) -> Measurement:
    intended_ns = np.linspace(0, seconds * NS_PER_S, count, endpoint=False).astype(np.int64)
    latency_ns = (np.random.default_rng(0).exponential(5, count) * NS_PER_MS).astype(np.int64)
    outcome = np.full(count, 1 if failed else 0, dtype=np.int16)
    problem = Problem(Fault.HTTP, NASTY, 500)
    given = {
        "records": Records(intended_ns, intended_ns + 1000, intended_ns + latency_ns, outcome, (problem,)),
        "window": Window(0, int(0.1 * NS_PER_S), int(seconds * NS_PER_S)),
        "steps": tuple(RateStep(100.0 * (i + 1), i * seconds / steps, (i + 1) * seconds / steps) for i in range(steps)),
        "interrupted": False,
        "waited": 0,
        "generators": (GeneratorUse(0.5, "uvloop", "timerfd", None),),
        "wall_s": seconds,
    }
    return Measurement(**{**given, **changes})


def once(measurement: Measurement, **options) -> LoadTestOutcome:
    asked = LoadTestOptions(slo_ms=20, duration_s=5, warm_up_s=0.1, **options)
    rows, shown = by_step(asked, measurement), whole(asked, measurement)
    use = server_use(READINGS, measurement.records, measurement.window)
    return LoadTestOutcome(TARGET, asked, rows, shown, None, SERVER, use, measurement.interrupted)


def searched(ending: str, low: float | None, high: float | None, probes: int, **of_each) -> LoadTestOutcome:
    asked = LoadTestOptions(slo_ms=20, find_capacity=True, duration_s=5)
    rows = tuple(
        whole(LoadTestOptions(rate=100.0 * n, slo_ms=20), measured(5, 2000, steps=1), f"probe {n}") for n in range(1, 5)
    )
    tried = tuple(CapacityProbe(100.0 * n, 0.5, **{"void": False, "answered": 10, **of_each}) for n in range(probes))
    return LoadTestOutcome(TARGET, asked, rows, rows[0], Capacity(tried, low, high, ending), None, None, False)  # type: ignore[arg-type]


OUTCOMES = {
    "closed": once(measured(5, 2000), concurrency=4),
    "open": once(measured(5, 2000, steps=1), rate=400),
    "steps": once(measured(10, 4000, steps=2), steps=(100, 200)),
    "all failed": once(measured(5, 500, failed=True), concurrency=4),
    "one answer": once(measured(5, 1), concurrency=4),
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


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, [name for name, _ in attrs]))


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_outcome_has_a_page_that_loads_nothing_and_trusts_no_text(name):
    page = render(OUTCOMES[name])
    tags = Tags()
    tags.feed(page)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags.found}
    assert not [tag for tag, attributes in tags.found if {"onclick", "src", "href"} & set(attributes)]
    assert "nan" not in page.lower().replace("finance", "")


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_outcome_can_be_printed_and_written(name):
    outcome = OUTCOMES[name]
    console = Console(file=io.StringIO(), width=120)
    print_outcome(console, outcome)
    assert words.title(outcome) in console.file.getvalue()
    assert json.loads(document(outcome))["rows"]
    assert len(table(outcome).splitlines()) == 1 + len(outcome.rows)


@pytest.mark.parametrize("name", OUTCOMES)
def test_nothing_is_cut_at_80_columns(name):
    console = Console(file=io.StringIO(), width=80)
    print_outcome(console, OUTCOMES[name])
    shown = console.file.getvalue()
    assert "\u2026" not in shown
    for row in OUTCOMES[name].rows if len(OUTCOMES[name].rows) > 1 else ():
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{row.name} ")]
        assert f" {row.rate:,.1f} " in line
        assert len(line.rstrip()) <= 80


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("closed", "Valid"),
        ("all failed", "got no good answer"),
        ("nothing", "nothing was measured"),
        ("died", "generator process 1 was killed"),
        ("found", "The bracket is 4.0 requests/s (4.0 %) wide"),
        ("generator", "the server sustains at least 100.0"),
        ("not reached", "every rate tried was sustained"),
        ("too slow", "even 20.0 requests/s are not sustained"),
        ("too noisy", "wider than 5 %"),
        ("dead", "not one request was answered well (connection refused: nobody listens)"),
        ("all void", "4 tries in a row were void; nothing is known of the server. The last one: generator process 1"),
    ],
)
def test_the_page_says_the_one_thing_first(name, said):
    page = render(OUTCOMES[name])
    verdict = page[page.index('<p class="verdict') :]
    assert said in verdict[: verdict.index("</p>")]
