"""What the study found as JSON, as tables in `docs/simulation.md` and as a chart. Knows nothing of how it was found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.loadtest.simulation.frontier import Difference
from convoy.loadtest.simulation.workload import Device, Scenario, equal
from convoy.loadtest.study.chart import Curve, Panel, draw_panels
from convoy.loadtest.study.small_cases import SmallFinding
from convoy.loadtest.study.study import CONVOY, OVERLOADS, Finding

_BEGIN, _END = "<!-- study: written by `make simulate` -->", "<!-- end of study -->"
# Where the bound of the fluid argument is close to what is possible.
_BOUND_SHARE, _BOUND_OBJECTIVE, _BOUND_KAPPA = 0.9, 10, 5
_COLOURS = {
    "bound": "#999",
    CONVOY: "#c0392b",
    "early drop": "#2471a3",
    "feasible": "#1e8449",
    "window": "#b7950b",
    "deferral": "#7d3c98",
    "serve all": "#b7950b",
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
    for name, panels in (("frontier", _frontier_panels), ("overload", _overload_panels)):
        (docs / "results" / f"simulation-{name}.svg").write_text(draw_panels(panels(study.findings)))
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


def _frontier_panels(findings: Sequence[Finding]) -> list[Panel]:
    cases = ((1.0, 1), (20.0, 1), (20.0, 4))
    return [
        _frontier_panel(f"kappa {kappa:g}, {models} model{'s' * (models > 1)}", _by_objective(findings, kappa, models))
        for kappa, models in cases
    ]


def _by_objective(findings: Sequence[Finding], kappa: float, models: int) -> list[Finding]:
    """Those with equal models, Poisson arrivals and no bound on the batch, tightest first."""
    device, shares = Device(kappa), equal(models)
    chosen = [f for f in findings if f.scenario == Scenario(device, f.scenario.objective, shares)]
    return sorted(chosen, key=lambda finding: finding.scenario.objective)


def _frontier_panel(title: str, findings: Sequence[Finding]) -> Panel:
    def curve(name: str) -> Curve:
        settings = [one for one in findings[0].frontiers if one.partition(":")[0] == name]
        return Curve(name, tuple(max(map(finding.mean, settings)) for finding in findings), _COLOURS[name])

    bound = Curve("bound", tuple(finding.scenario.bound for finding in findings), _COLOURS["bound"], dashed=True)
    names = ("window", "early drop", "feasible", "deferral", CONVOY)
    ticks = tuple(f"{finding.scenario.objective:g}" for finding in findings)
    return Panel(title, "objective, in units of l(1)", ticks, (bound, *map(curve, names)))


def _overload_panels(findings: Sequence[Finding]) -> list[Panel]:
    wanted = {
        "kappa 1, D 10, 1 model": Scenario(Device(1.0), 10),
        "kappa 20, D 20, 1 model": Scenario(Device(20.0), 20),
        "kappa 20, D 20, 4 models": Scenario(Device(20.0), 20, equal(4)),
    }
    found = {finding.scenario: finding for finding in findings}
    return [_overload_panel(title, found[scenario]) for title, scenario in wanted.items()]


def _overload_panel(title: str, finding: Finding) -> Panel:
    ticks = tuple(f"{factor:g}" for factor in OVERLOADS)
    curves = tuple(
        Curve(name, tuple(goodput), _COLOURS[name.partition(":")[0]]) for name, goodput in finding.overload.items()
    )
    return Panel(title, "offered, in units of the capacity", ticks, curves)
