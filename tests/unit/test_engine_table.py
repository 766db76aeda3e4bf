"""The table of the CPU's engines: its page says what was measured and what failed."""

from __future__ import annotations

from convoy.export.engine_table import race
from convoy.export.engine_table.page import render
from convoy.export.engine_table.race import EngineResult, Throughput
from convoy.models.bundle import Interval
from convoy.models.errors import JobError


def test_the_page_has_a_line_for_each_engine_and_one_for_what_failed():
    first = EngineResult(
        "net", "onnxruntime-cpu", "onnxruntime 1", "fp32", (Throughput(10.04, None), Throughput(20.0, None)), 1.0
    )
    pace = Throughput(15.0, Interval(1.5, 1.4, 1.6))
    second = EngineResult("net", "openvino", "openvino 2", "int8", (pace, pace), 0.5, 0.03)
    page = render("a machine", [first, second, EngineResult("other", "", "", "", problem="it | broke\nhere")])
    assert "Machine: a machine. onnxruntime 1, openvino 2." in page
    head, rule, *lines = page[page.index("| network") :].splitlines()
    assert lines[0] == "| net | fp32 | onnxruntime-cpu | 10.0 | 1 | 20.0 | 1 | 100% | 0 |"
    assert lines[1].endswith("| 15.0 | 1.50 (1.40 to 1.60) | 15.0 | 1.50 (1.40 to 1.60) | 50% | 0.03 |")
    assert "it / broke here" in lines[2]
    assert {line.count("|") for line in (head, rule, *lines)} == {head.count("|")}


def test_a_network_that_cannot_be_exported_is_one_line_with_the_reason(monkeypatch):
    def refuse(name: str) -> None:
        raise JobError(f"{name} is not known")

    monkeypatch.setattr(race, "image_of", refuse)
    (entry,) = race.race("nothing", threads=1)
    assert (entry.model, entry.problem) == ("nothing", "nothing is not known")
