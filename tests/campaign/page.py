"""The campaign as one HTML page that needs nothing but itself: verdict, time lines, periods, books, promises.

Computes nothing but sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from xml.etree.ElementTree import Element

from convoy.loadtest.report.page import STYLE
from convoy.models.page.axis import Axis, number, spanning
from convoy.models.page.chart import Chart
from convoy.models.page.markup import Content, card, element, page, table
from tests.campaign.checks import KNOWN_DISAGREEMENTS, MIB, MORE_DESCRIPTORS, MORE_OWN_BYTES, MORE_THREADS, NOT_COMPARED
from tests.campaign.endings import BOUND_S, COUNTED
from tests.campaign.plan import SCENES
from tests.campaign.records import PeriodRun, Records, Sample

_WIDTH, _TALL, _LOW = 1120.0, 270.0, 150.0
_STYLE = """\
  .wide figure { max-width: none; margin: .2rem 0 1rem; } .wide .legend { padding-left: 5.5%; }
  .edge { fill: none; stroke: var(--soft); stroke-width: .8; }
  td.bad, .bad > b { color: var(--bad); } table.words td { vertical-align: top; }
"""
_NOT_ANSWERED = (
    ("rejected", "refused (429)", "k0"),
    ("deadline_exceeded", "too late (504)", "k3"),
    ("failed", "not available (503)", "k1"),
    ("broken", "connection lost", "bad"),
    ("left", "left on purpose", "k6"),
)
_INVARIANTS = (
    (
        "answers",
        "Every answer is right by the model's own arithmetic, and every call ends once, "
        f"within {BOUND_S:g} s, and as its period allows.",
    ),
    ("books", "Clients and server count the same calls with the same outcomes, where no process was killed."),
    (
        "rest",
        "After each period nothing is in flight, no process is left, and none has over "
        f"{MORE_DESCRIPTORS} descriptors or {MORE_THREADS} threads more than after the warm-up.",
    ),
    (
        "readiness",
        "Whenever the server says that it is ready, a real request that follows at once is answered; "
        "and it says so unless a fault is on.",
    ),
    ("memory", f"No server's own memory grows by more than {MORE_OWN_BYTES / MIB:.0f} MiB after its warm-up."),
    ("end", "SIGTERM ends it with 0, and nobody outlives it."),
    ("log", "No stack trace and no admitted bug in its log."),
)


def render(records: Records) -> str:
    """The whole page."""
    body = element(
        "main",
        _head(records),
        _verdict(records),
        element("div", *_cards(records), class_="cards"),
        *(part for edges in records.plan.edges for part in _time_lines(records, edges)),
        element("h2", "Periods"),
        _periods(records),
        element("h2", "Time to recover"),
        _recoveries(records),
        element("h2", "What has to hold"),
        _invariants(records),
        element("h2", "The books, and where they are not compared"),
        _books(records),
        _known(),
        element("h2", "Kinds of periods"),
        table(("kind", "what is done"), [(kind, scene.about) for kind, scene in SCENES.items()], class_="words"),
    )
    return page(f"Campaign {records.plan.seed}", body, STYLE + _STYLE)


def _head(records: Records) -> Element:
    plan = records.plan
    what = (
        f"{plan.minutes:g} min of faults and of {len({one.client for one in records.endings})} kinds of clients "
        f"against a server of {' and of '.join(map(str, plan.edges))} edge processes. The same plan again: "
    )
    lead = element("p", what, element("code", records.replay), class_="lead")
    return element("header", element("h1", f"Campaign, seed {plan.seed}"), lead)


def _verdict(records: Records) -> Element:
    breaches = records.breaches
    if not breaches:
        text = f"{len(records.endings):,} calls in {len(records.runs)} periods, and every invariant held"
        return element("p", element("b", "Held"), text, class_="verdict is-good")
    lines = element("ul", *(element("li", line) for line in breaches[:30]))
    return element("div", element("b", "Broken"), f"{len(breaches)} breaches", lines, class_="verdict is-bad")


def _cards(records: Records) -> Iterator[Element]:
    outcomes = Counter(one.outcome for one in records.endings)
    faults = [window for run in records.runs for window in run.windows]
    yield card("calls", f"{len(records.endings):,}", "of all clients, each with one ending")
    yield card("answered", f"{outcomes['success']:,}", "and every one held against the arithmetic")
    wrong = outcomes["wrong"] + outcomes["hung"] + outcomes["undocumented"]
    yield card("wrong, hung, undocumented", f"{wrong:,}", "none is allowed")
    yield card("faults", f"{len(faults):,}", ", ".join(sorted({window.kind for window in faults})))
    looks = [one for one in records.looks if one.ready]
    yield card("said ready", f"{len(looks):,}", f"of {len(records.looks):,} times asked, a real request after each")
    most = max((one.own_bytes for one in records.samples), default=0)
    yield card("memory at most", f"{most / MIB:.0f} MiB", "of all processes together, without the slab")


# Time lines


def _time_lines(records: Records, edges: int) -> list[Element]:
    runs = [run for run in records.runs if run.period.edges == edges]
    if not runs:
        return []
    from_s, to_s = max(0.0, runs[0].began_s - 2), runs[-1].ended_s + 1
    axis = Axis("seconds since the campaign began", from_s, to_s)
    name = "one process" if edges == 0 else f"{edges} edge processes and a core"
    charts = (_answered, _not_answered, _ready, _memory, _in_flight)
    drawn = element("div", *(chart(records, runs, axis) for chart in charts), class_="wide")
    return [element("h2", f"Time line: {name}"), drawn]


def _chart(name: str, about: str, runs: Sequence[PeriodRun], x: Axis, y: Axis, height: float = _LOW) -> Chart:
    """A chart with the periods' borders and the faults' times."""
    chart = Chart(name, about, x, y, width=_WIDTH, height=height)
    for run in runs:
        for window in run.windows:
            last_s = max(window.to_s, window.from_s + (x.high - x.low) / 500)
            chart.area(
                window.from_s, last_s, f"{window.kind}: {window.what}", "shade bad" if window.excuses else "shade k5"
            )
        chart.upright(run.began_s, "edge")
    return chart


def _answered(records: Records, runs: Sequence[PeriodRun], x: Axis) -> Element:
    points = _per_second(records, x, lambda outcome: outcome in ("success", "invalid"))
    top = max((y for _, y in points), default=1.0)
    y = Axis("answers / s", 0, 1.3 * max(top, 1.0))
    chart = _chart("Calls answered", "Right answers, also to wrong requests, per second.", runs, x, y, _TALL)
    for place, run in enumerate(runs):
        # In two rows, so that the names of short periods stand beside each other.
        chart.words(run.began_s, y.high * (0.96 if place % 2 == 0 else 0.88), run.period.kind)
    chart.line(points, "line k2")
    chart.explain("answered", "line k2")
    chart.explain("a fault under which calls may fail, and its aftermath", "shade bad")
    chart.explain("a change that nobody may notice", "shade k5")
    return chart.figure()


def _not_answered(records: Records, runs: Sequence[PeriodRun], x: Axis) -> Element:
    lines = [
        (_per_second(records, x, lambda one, outcome=outcome: one == outcome), words, class_)  # type: ignore[misc]
        for outcome, words, class_ in _NOT_ANSWERED
    ]
    seen = [line for line in lines if any(y for _, y in line[0])]
    top = max((y for points, _, _ in seen for _, y in points), default=1.0)
    # What is refused in one period is a hundredth of what breaks off in another; nothing lies on the floor.
    y = Axis("calls / s", 0.9, 1.5 * max(top, 10.0), "log")
    chart = _chart(
        "Calls not answered", "Refused, late, failed, broken and abandoned calls per second.", runs, x, y, 200.0
    )
    for points, words, class_ in seen:
        chart.line(points, f"line {class_}")
        chart.explain(words, f"line {class_}")
    return chart.figure()


def _ready(records: Records, runs: Sequence[PeriodRun], x: Axis) -> Element:
    y = Axis("ready", 0, 1.25)
    chart = _chart("Ready", "Whether the server said that it is ready, and whether that was so.", runs, x, y, 110.0)
    points: list[tuple[float, float]] = []
    for one in records.looks:
        if x.low <= one.began_s <= x.high:
            level = 1.0 if one.ready else 0.0
            points += [(one.began_s, points[-1][1] if points else level), (one.began_s, level)]
    chart.line(points, "line k2")
    chart.explain("says that it is ready", "line k2")
    for one in records.looks:
        if x.low <= one.began_s <= x.high and one.ready and one.outcome != "success":
            chart.dot(one.began_s, 1.0, f"a real request ended as {one.outcome}: {one.words}", "dot k1")
    chart.explain("a real request was not answered", "dot k1")
    return chart.figure()


def _memory(records: Records, runs: Sequence[PeriodRun], x: Axis) -> Element:
    samples = _within(records, x)
    y = spanning("MiB", [one.own_bytes / MIB for one in samples])
    chart = _chart("Memory", "What all processes hold for themselves.", runs, x, y, 170.0)
    chart.line([(one.at_s, one.own_bytes / MIB) for one in samples], "line k0")
    chart.explain("resident, of all processes, without the slab that they share", "line k0")
    return chart.figure()


def _in_flight(records: Records, runs: Sequence[PeriodRun], x: Axis) -> Element:
    samples = _within(records, x)
    lines: tuple[tuple[str, str, Callable[[Sample], float | None]], ...] = (
        ("requests unfinished", "k1", lambda one: one.held[1] if one.held else None),
        ("descriptors", "thin k0", lambda one: one.descriptors),
        ("threads", "thin k3", lambda one: one.threads),
    )
    values = [value for one in samples for _, _, read in lines if (value := read(one)) is not None]
    y = spanning("count", values or [1.0])
    chart = _chart("In flight", "Requests, descriptors and threads that the server holds.", runs, x, y, 190.0)
    for words, class_, read in lines:
        chart.broken_line([(one.at_s, read(one)) for one in samples], f"line {class_}")
        chart.explain(words, f"line {class_}")
    return chart.figure()


def _within(records: Records, x: Axis) -> list[Sample]:
    return [one for one in records.samples if x.low <= one.at_s <= x.high]


def _per_second(records: Records, x: Axis, wanted: Callable[[str], bool]) -> list[tuple[float, float]]:
    """How many calls ended so in each second."""
    bins = [0] * (int(x.high - x.low) + 1)
    for one in records.endings:
        if x.low <= one.ended_s < x.high and wanted(one.outcome):
            bins[int(one.ended_s - x.low)] += 1
    return [(min(x.high, x.low + place + 0.5), float(many)) for place, many in enumerate(bins)]


# Tables


def _periods(records: Records) -> Element:
    rows: list[Sequence[Content]] = []
    for run in records.runs:
        outcomes: Counter[str] = Counter()
        for (_, _, outcome), many in run.seen.items():
            outcomes[outcome] += many
        lost = sum(outcomes[one] for one in ("failed", "broken"))
        verdict = element("span", f"{len(run.breaches)} broken", class_="bad") if run.breaches else "held"
        rows.append(
            (
                *(_what_was_done(run), str(run.period.edges), f"{run.began_s:.0f}"),
                *(f"{outcomes[one]:,}" for one in ("success", "invalid", "rejected", "deadline_exceeded")),
                *(f"{lost:,}", f"{outcomes['left']:,}", element("b", verdict) if run.breaches else "held"),
            )
        )
    heads = ("period", "edges", "at, s", "answered", "wrong requests", "refused", "late", "lost", "left", "verdict")
    return table(heads, rows)


def _what_was_done(run: PeriodRun) -> Element:
    """The period's name, and below it each fault."""
    faults = (element("div", f"{window.from_s:.1f} s: {window.what}", class_="note") for window in run.windows)
    return element("div", f"{run.period.number} · {run.period.kind}", *faults)


def _recoveries(records: Records) -> Element:
    rows = [
        (kind, str(len(times_s)), f"{median(times_s):.1f}", f"{max(times_s):.1f}")
        for kind, times_s in sorted(records.recoveries_s().items())
    ]
    note = "From the moment when nothing is done to the server any more until every look is answered; 0: none was not."
    return element("div", table(("trouble", "times", "median s", "worst s"), rows), element("p", note, class_="note"))


def _invariants(records: Records) -> Element:
    checked = Counter(records.checked)
    rows = [(name, about, f"{checked[name]} times") for name, about in _INVARIANTS]
    return table(("what", "how it is meant", "looked at"), rows, class_="words")


def _books(records: Records) -> Element:
    seen: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    compared = [run for run in records.runs if not run.period.scene.loses_calls and run.period.kind != "spoiled"]
    for run in compared:
        for books, total in ((run.seen, seen), (run.counted, counted)):
            for (_, model, outcome), many in books.items():
                if model not in run.period.scene.changing:
                    total[outcome] += many
    rows = [(outcome, number(seen[outcome]), number(counted[outcome])) for outcome in (*COUNTED, "left", "broken")]
    note = f"Over the {len(compared)} periods in which they are compared; by protocol and model they were, too."
    return element(
        "div", table(("outcome", "at the clients", "convoy_requests_total"), rows), element("p", note, class_="note")
    )


def _known() -> Element:
    rows = [(one.what, one.reason) for one in (*NOT_COMPARED, *KNOWN_DISAGREEMENTS)]
    return table(("not compared", "why"), rows, class_="words")
