"""The study's page, from findings that were made up."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from convoy.loadtest.simulation.rules import rules
from convoy.loadtest.simulation.workload import Scenario
from convoy.loadtest.study.optimum import SmallCase
from convoy.loadtest.study.report import Study, write
from convoy.loadtest.study.small_cases import SmallFinding
from convoy.loadtest.study.study import CONVOY, OVERLOADS, Finding, scenarios


def finding(scenario: Scenario, ours: float) -> Finding:
    """Everybody else reaches half of the bound."""
    theirs = 0.5 * scenario.bound + 0.01
    frontiers = {name: [theirs, theirs * 1.01, theirs * 0.99] for name in rules(scenario)}
    goodput = [min(factor, 0.8) for factor in OVERLOADS]
    overload = dict.fromkeys(("serve all", "early drop:2", CONVOY), goodput)
    return Finding(scenario, {**frontiers, CONVOY: [ours * one for one in frontiers["serve all"]]}, overload)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    page = "# A page\n\n<!-- study: written by `make simulate` -->\nthe last run\n<!-- end of study -->\n\nmore words\n"
    (tmp_path / "simulation.md").write_text(page)
    return tmp_path


def written(docs: Path, *ours: float) -> str:
    chosen = scenarios()
    findings = [finding(scenario, ours[number % len(ours)]) for number, scenario in enumerate(chosen)]
    write(Study(findings, [SmallFinding(SmallCase(2, 9, 0.5), 0.9, 0.88)]), docs)
    return (docs / "simulation.md").read_text()


def test_the_tables_replace_what_was_between_the_marks_and_nothing_else(docs: Path) -> None:
    page = written(docs, 1.2)
    assert page.startswith("# A page")
    assert page.endswith("<!-- end of study -->\n\nmore words\n")
    assert "the last run" not in page
    assert written(docs, 1.2) == page
    assert page.count("| kappa ") == len(scenarios())


def test_losses_are_named_before_anything_else(docs: Path) -> None:
    count = len(scenarios())
    assert "Where Convoy loses" not in written(docs, 1.2, 1.0)
    page = written(docs, 0.9)
    assert f"above that of the best other rule in 0, not to be told from it in 0, and below it in {count}" in page
    assert page.index("Where Convoy loses") < page.index("| scenario |")
    assert page.count("**loses**") == count


def test_the_numbers_are_all_in_the_json_and_the_charts_can_be_read(docs: Path) -> None:
    written(docs, 1.1)
    document = json.loads((docs / "results" / "simulation.json").read_text())
    assert len(document["scenarios"]) == len(scenarios())
    assert document["small_cases"][0]["best_share"] == 0.9
    for name in ("frontier", "overload"):
        chart = ElementTree.parse(docs / "results" / f"simulation-{name}.svg")
        titles = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text") if text.get("font-weight")]
        assert len(titles) == 3
