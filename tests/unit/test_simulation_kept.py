"""A study that was stopped goes on where it stopped, and takes nothing from other code."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.loadtest.simulation.workload import Scenario, VirtualDevice
from convoy.loadtest.study import study
from convoy.loadtest.study.kept import Kept
from convoy.loadtest.study.study import CONVOY, find

ONE, OTHER = Scenario(VirtualDevice(1.0), 5), Scenario(VirtualDevice(2.0), 5)
FIGURES = {"frontiers": {CONVOY: [0.5, 0.6], "serve all": [0.4, 0.5]}, "overload": {CONVOY: [0.5, 0.9]}}


def test_what_was_found_is_found_again_and_nothing_else(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "new", seeds=2)
    assert kept.figures(ONE) is None
    kept.keep(ONE, FIGURES)
    assert Kept(tmp_path / "new", seeds=2).figures(ONE) == FIGURES
    assert kept.figures(OTHER) is None
    assert Kept(tmp_path / "new", seeds=3).figures(ONE) is None


def test_a_file_that_was_cut_off_is_not_used(tmp_path: Path) -> None:
    kept = Kept(tmp_path, seeds=2)
    kept.keep(ONE, FIGURES)
    (only,) = tmp_path.iterdir()
    only.write_text(only.read_text()[:-5])
    assert kept.figures(ONE) is None


def test_the_study_seeks_only_what_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path, seeds=2)
    for scenario in (ONE, OTHER):
        kept.keep(scenario, FIGURES)

    def fail(*_: object) -> None:
        raise AssertionError("this was known")

    monkeypatch.setattr(study, "_finding", fail)
    findings = list(find([OTHER, ONE], 2, kept))
    assert [finding.scenario for finding in findings] == [OTHER, ONE]
    assert findings[0].mean(CONVOY) == pytest.approx(0.55)


def test_what_the_study_finds_is_kept(tmp_path: Path) -> None:
    tiny = Scenario(VirtualDevice(0.2), 3)
    (found,) = find([tiny], 1, Kept(tmp_path, 1))
    assert Kept(tmp_path, 1).figures(tiny) == {"frontiers": found.frontiers, "overload": found.overload}
