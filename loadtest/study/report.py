"""What the study found as JSON, as tables in `docs/simulation.md` and as a chart. Knows nothing of how it was found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.loadtest.simulation.frontier import Difference
from convoy.loadtest.simulation.workload import Scenario, VirtualDevice, equal
from convoy.loadtest.study.small_cases import SmallFinding
from convoy.loadtest.study.study import CONVOY, OVERLOADS, Finding
from convoy.models.page.axis import Axis
from convoy.models.page.chart import LEFT, RIGHT, Chart
from convoy.models.page.markup import CHART_STYLE, add, element, rendered

_BEGIN, _END = "<!-- study: written by `make simulate` -->", "<!-- end of study -->"
# Where the bound of the fluid argument is close to what is possible.
_BOUND_SHARE, _BOUND_OBJECTIVE, _BOUND_KAPPA = 0.9, 10, 5
_WIDTH, _HEIGHT = 320, 240
_CLASSES = {
    "bound": "dashed k6",
    CONVOY: "line k4",
    "early drop": "line k0",
    "feasible": "line k2",
    "window": "line k1",
    "deferral": "line k3",
    "serve all": "line k1",
}


@dataclass(frozen=True, slots=True)
class Study:
    findings: Sequence[Finding]
    small: Sequence[SmallFinding]

    @property
    def lost(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.against_best.is_worse]

    @property
    def won(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.against_best.is_better]


def write(study: Study, docs: Path) -> None:
    """Writes `results/simulation.json`, two charts beside it, and the tables between the marks of
    `simulation.md`, whose other words stay."""
    (docs / "results" / "simulation.json").write_text(json.dumps(_document(study), indent=1) + "\n")
    for name, charts in (("frontier", _frontier_charts), ("overload", _overload_charts)):
        (docs / "results" / f"simulation-{name}.svg").write_text(_drawn(charts(study.findings)))
    page = docs / "simulation.md"
    before, _, rest = page.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}\n\n{_tables(study)}\n{_END}{after}")


def _document(study: Study) -> dict[str, object]:
    return {
        "overload_factors": OVERLOADS,
        "scenarios": [
            {
                "scenario": _named(finding.scenario),
                "bound": finding.scenario.bound,
                "frontiers": finding.frontiers,
                "goodput_at_overload_factors": finding.overload,
            }
            for finding in study.findings
        ],
        "small_cases": [
            {
                "fixed_slots": found.case.fixed,
                "within_slots": found.case.within,
                "chance": found.case.chance,
                "best_share": found.best,
                "convoy_share": found.ours,
            }
            for found in study.small
        ],
    }


def _named(scenario: Scenario) -> dict[str, object]:
    return {
        "kappa": scenario.device.kappa,
        "max_batch": scenario.device.max_batch,
        "objective": scenario.objective,
        "shares": scenario.shares,
        "arrivals": scenario.arrivals,
    }


def _tables(study: Study) -> str:
    count = len(study.findings)
    lines = [
        f"Of {count} scenarios Convoy's frontier is above that of the best other rule in {len(study.won)}, "
        f"not to be told from it in {count - len(study.won) - len(study.lost)}, and below it in {len(study.lost)}.",
        "",
        *_losses(study.lost),
        *_targets(study),
        "![Highest load at which 99 % are in time, by objective](results/simulation-frontier.svg)",
        "",
        "![Goodput by offered load](results/simulation-overload.svg)",
        "",
        *_frontier_table(study.findings),
        "",
        *_small_table(study.small),
    ]
    return "\n".join(lines) + "\n"


def _losses(lost: Sequence[Finding]) -> Iterable[str]:
    if not lost:
        return
    yield "Where Convoy loses:"
    yield ""
    for finding in lost:
        yield f"- {_title(finding.scenario)}: {_percent(finding.against_best)} against *{finding.best_other}*."
    yield ""


def _targets(study: Study) -> Iterable[str]:
    bounded = [
        finding.mean(CONVOY) / finding.scenario.bound for finding in study.findings if _is_bounded(finding.scenario)
    ]
    kept = [finding.kept_in_overload for finding in study.findings]
    reached = [found.reached for found in study.small]
    yield "| what is asked | lowest that was found |"
    yield "|---|---|"
    yield (
        f"| at least {_BOUND_SHARE} of the bound (one model, D >= {_BOUND_OBJECTIVE} l(1), kappa >= {_BOUND_KAPPA}) "
        f"| {min(bounded, default=float('nan')):.3f} |"
    )
    yield f"| goodput at three times the capacity, at least 0.9 of its peak | {min(kept):.3f} |"
    yield f"| share in time at least 0.95 of the optimum (small cases) | {min(reached):.3f} |"
    yield ""


def _is_bounded(scenario: Scenario) -> bool:
    device = scenario.device
    # The bound knows no largest batch: where one is in the way, it says nothing.
    is_free = scenario.bound <= 0.99 * device.capacity
    is_one = len(scenario.shares) == 1 and scenario.arrivals == "poisson"
    return is_one and is_free and scenario.objective >= _BOUND_OBJECTIVE and device.kappa >= _BOUND_KAPPA


def _frontier_table(findings: Sequence[Finding]) -> Iterable[str]:
    yield "| scenario | bound | Convoy | best other | Convoy against it | at 3x capacity |"
    yield "|---|---|---|---|---|---|"
    yield from map(row, findings)


def row(finding: Finding) -> str:
    """One scenario as a row of the table."""
    best = finding.best_other
    return (
        f"| {_title(finding.scenario)} | {finding.scenario.bound:.3f} | {finding.mean(CONVOY):.3f} "
        f"| {finding.mean(best):.3f} ({best}) | {_percent(finding.against_best)} {_verdict(finding.against_best)} "
        f"| {finding.kept_in_overload:.2f} |"
    )


def _small_table(small: Sequence[SmallFinding]) -> Iterable[str]:
    yield "| fixed cost, objective (slots) | load | optimum | Convoy | of the optimum |"
    yield "|---|---|---|---|---|"
    for found in small:
        case = found.case
        shares = f"{found.best:.4f} | {found.ours:.4f} | {found.reached:.3f}"
        yield f"| {case.fixed}, {case.within} | {case.chance:g} | {shares} |"


def _title(scenario: Scenario) -> str:
    models = len(scenario.shares)
    uneven = " Zipf" if len(set(scenario.shares)) > 1 else ""
    shape = "" if scenario.arrivals == "poisson" else f", {scenario.arrivals}"
    limit = f", batch <= {scenario.device.max_batch}" if scenario.device.max_batch < 1024 else ""
    return f"kappa {scenario.device.kappa:g}, D {scenario.objective:g}, {models}{uneven}{shape}{limit}"


def _percent(difference: Difference) -> str:
    return f"{100 * difference.mean:+.1f} ± {100 * difference.half_width:.1f} %"


def _verdict(difference: Difference) -> str:
    if difference.is_worse:
        return "**loses**"
    return "wins" if difference.is_better else ""


def _frontier_charts(findings: Sequence[Finding]) -> list[Chart]:
    cases = ((1.0, 1), (20.0, 1), (20.0, 4))
    return [
        _frontier_chart(f"kappa {kappa:g}, {models} model{'s' * (models > 1)}", _by_objective(findings, kappa, models))
        for kappa, models in cases
    ]


def _by_objective(findings: Sequence[Finding], kappa: float, models: int) -> list[Finding]:
    """Those with equal models, Poisson arrivals and no bound on the batch, tightest first."""
    device, shares = VirtualDevice(kappa), equal(models)
    chosen = [f for f in findings if f.scenario == Scenario(device, f.scenario.objective, shares)]
    return sorted(chosen, key=lambda finding: finding.scenario.objective)


def _frontier_chart(title: str, findings: Sequence[Finding]) -> Chart:
    def best(name: str) -> list[float]:
        settings = [one for one in findings[0].frontiers if one.partition(":")[0] == name]
        return [max(map(finding.mean, settings)) for finding in findings]

    lines = {name: best(name) for name in ("window", "early drop", "feasible", "deferral", CONVOY)}
    bound = [finding.scenario.bound for finding in findings]
    objectives = [finding.scenario.objective for finding in findings]
    return _chart(title, "objective, in units of l(1)", "highest load", objectives, {"bound": bound, **lines})


def _overload_charts(findings: Sequence[Finding]) -> list[Chart]:
    wanted = {
        "kappa 1, D 10, 1 model": Scenario(VirtualDevice(1.0), 10),
        "kappa 20, D 20, 1 model": Scenario(VirtualDevice(20.0), 20),
        "kappa 20, D 20, 4 models": Scenario(VirtualDevice(20.0), 20, equal(4)),
    }
    found = {finding.scenario: finding for finding in findings}
    x_label = "offered, in units of the capacity"
    return [_chart(title, x_label, "goodput", OVERLOADS, found[one].overload) for title, one in wanted.items()]


def _chart(title: str, x_label: str, y_label: str, xs: Sequence[float], lines: Mapping[str, Sequence[float]]) -> Chart:
    x = Axis(x_label, 0.9 * xs[0], 1.1 * xs[-1], "log", tuple(xs))
    chart = Chart(title, f"{y_label} over {x_label}", x, Axis(y_label, 0, 1), width=_WIDTH, height=_HEIGHT)
    for name, ys in lines.items():
        chart.line(list(zip(xs, ys, strict=True)), _CLASSES[name.partition(":")[0]], name)
    return chart


def _drawn(charts: Sequence[Chart]) -> str:
    """The charts beside each other as one SVG with the legend that they have in common."""
    drawn = element(
        "svg", element("style", CHART_STYLE), element("rect", width="100%", height="100%", fill="var(--paper)")
    )
    for number, chart in enumerate(charts):
        left = number * _WIDTH
        middle = left + (LEFT + _WIDTH - RIGHT) / 2
        add(drawn, element("text", chart.name, x=middle, y=18, font_weight="bold", class_="label middle"))
        chart.svg.attrib.update(x=f"{left}", y="24", width=f"{_WIDTH}", height=f"{_HEIGHT}")
        add(drawn, chart.svg)
    x, y = LEFT, _HEIGHT + 44
    for name, class_ in charts[0].legend:
        add(drawn, element("path", d=f"M{x:g} {y - 4} h22", class_=class_))
        add(drawn, element("text", name, x=x + 27, y=y))
        x += 50 + 6 * len(name)
    size = {"viewBox": f"0 0 {len(charts) * _WIDTH} {y + 14}", "font-family": "sans-serif"}
    drawn.attrib.update({"xmlns": "http://www.w3.org/2000/svg", **size})
    return rendered(drawn) + "\n"
