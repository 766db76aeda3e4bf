"""docs/scaling.md and its picture say what was measured: `python -m docs.results.make_scaling` writes both."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from docs.results.make_scaling import FOLDER, PAGE, PICTURE, drawn, written


def test_the_tables_and_the_picture_are_those_of_the_figures() -> None:
    page = PAGE.read_text()
    assert written(page) == page
    assert PICTURE.read_text() == drawn()


def test_other_figures_would_show() -> None:
    page = PAGE.read_text().replace("| 25 % | ", "| 26 % | ")
    assert written(page) != page


def test_the_picture_is_drawn_inside_its_frame() -> None:
    svg = ElementTree.fromstring(drawn())
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for one in svg.iter("{http://www.w3.org/2000/svg}text"):
        if "transform" not in one.attrib:
            assert 0 <= float(one.attrib["x"]) <= width
            assert 0 <= float(one.attrib["y"]) <= height


def test_what_is_said_of_utilisation_holds_in_what_was_measured() -> None:
    load = json.loads((FOLDER / "replica-costs.json").read_text())["load"]
    by_share = {one["share_percent"]: one for one in load}
    assert abs(by_share[25]["utilisation"] - by_share[75]["utilisation"]) < 0.05
    assert by_share[75]["waiting"] > 5 * by_share[25]["waiting"]
    assert by_share[25]["utilisation"] > 0.7
