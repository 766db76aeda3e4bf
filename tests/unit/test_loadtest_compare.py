from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from convoy.loadtest.compare import compare, ratio_bounds
from convoy.models.errors import UsageError
from tests.support.load_records import load_record

FIGURES = st.floats(0.01, 1e6)
WIDTHS = st.floats(1.0001, 3)


def shown(first: Path, second: Path, *, anyway: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80)
    compare(first, second, anyway=anyway, as_json=False, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def told(capsys: pytest.CaptureFixture[str], first: Path, second: Path, **options: bool) -> dict[str, Any]:
    compare(first, second, anyway=options.get("anyway", False), as_json=True, console=Console())
    return {f"{row['step']} {row['figure']}".strip(): row for row in json.loads(capsys.readouterr().out)["rows"]}


@given(FIGURES, WIDTHS, WIDTHS, FIGURES, WIDTHS, WIDTHS)
def test_the_ratio_lies_within_and_turned_round_it_is_the_reciprocal(a, down_a, up_a, b, down_b, up_b):
    around_a, around_b = (a / down_a, a * up_a), (b / down_b, b * up_b)
    found, turned = ratio_bounds(a, around_a, b, around_b), ratio_bounds(b, around_b, a, around_a)
    assert found.low < b / a < found.high
    assert (1 / turned.high, 1 / turned.low) == (pytest.approx(found.low), pytest.approx(found.high))
    assert ratio_bounds(a, (0, a), b, around_b) is None, "down to nothing there is no ratio"
    widest = max(math.log(down_b), math.log(up_a))
    assert widest <= math.log(b / a / found.low) * (1 + 1e-9)
    assert math.log(b / a / found.low) <= math.sqrt(2) * widest * (1 + 1e-9)


def test_what_differs_is_told_and_what_may_not_is_called_so(tmp_path, capsys):
    a = load_record(tmp_path, "a")
    latencies = {"latency_ms": {"p50": 3.5, "p99": 8.4}, "latency_ms_95": {"p50": [3.4, 3.6], "p99": [7.4, 9.9]}}
    use = {"cpu_ms_per_answer": 0.4, "cpu_ms_per_answer_95": [0.39, 0.41], "peak_mib": 220.0}
    b = load_record(tmp_path, "b", **latencies, server_use=use)
    rows = told(capsys, a, b)
    assert {name: row["told"] for name, row in rows.items()} == {
        "successful/s": "no difference",
        "p50, ms": "higher",
        "p99, ms": "no difference",
        "CPU per request, ms": "lower",
        "memory, MiB": None,
    }
    assert rows["p50, ms"]["ratio"] == pytest.approx(1.4)
    assert rows["memory, MiB"]["ratio"] == pytest.approx(1.1)
    text = " ".join(shown(a, b).split())
    assert "B higher" in text
    assert "B lower" in text
    assert "not significant" in text
    assert "not between starts of the server" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": {"concurrency": 8}}, "clients 16 and 8"),
        ({"options": {"concurrency": None, "rate": 50}}, "rate none and 50"),
        ({"options": {"deadline_ms": 50}}, "deadline in ms none and 50"),
        ({"target": {"url": "u", "model": "m", "body": "json"}}, "bodies image and json"),
        ({"target": {"url": "u", "model": "m", "body": "image", "protocol": "grpc"}}, "protocol http and grpc"),
    ],
)
def test_different_loads_are_refused_unless_one_says_otherwise(tmp_path, changes, words):
    a, b = load_record(tmp_path, "a"), load_record(tmp_path, "b", **changes)
    with pytest.raises(UsageError, match=f"different loads: .*{words}.*--anyway"):
        shown(a, b)
    assert words in shown(a, b, anyway=True)


def test_another_model_server_seed_or_duration_is_no_other_load(tmp_path):
    target = {"url": "http://other:1", "model": "n", "body": "image", "protocol": "http"}
    b = load_record(tmp_path, "b", target=target, options={"seed": 7, "duration_s": 3})
    assert "different" not in shown(load_record(tmp_path, "a"), b)


def test_of_searches_the_capacities_are_compared(tmp_path, capsys):
    def search(name: str, low: float, high: float) -> Path:
        capacity = {"sustained_rps": low, "failed_rps": high, "ending": "bracketed", "width_rps": high - low}
        return load_record(tmp_path, name, options={"find_capacity": True, "slo_ms": 50}, capacity=capacity)

    a, b, c = search("a", 100, 104), search("b", 102, 106), search("c", 150, 156)
    assert told(capsys, a, b)["capacity/s"]["told"] == "no difference"
    found = told(capsys, a, c)
    assert list(found) == ["capacity/s"]
    assert found["capacity/s"]["told"] == "higher"
    assert found["capacity/s"]["interval"] == [pytest.approx(150 / 104), pytest.approx(1.56)]
    assert "not a confidence interval" in shown(a, c)
    none = load_record(tmp_path, "n", options={"find_capacity": True, "slo_ms": 50}, capacity=None)
    with pytest.raises(UsageError, match="no capacity was found"):
        shown(a, none)


def test_what_is_void_or_no_run_is_refused_by_name(tmp_path):
    good, path = load_record(tmp_path, "a"), load_record(tmp_path, "b", void="the generator was late")
    with pytest.raises(UsageError, match=r"b\.json is not valid: the generator was late"):
        shown(good, path)
    for content in ("", "[]", "{}", '{"schema_version": 1}', "\x00"):
        path.write_text(content)
        with pytest.raises(UsageError, match=r"b\.json is not a file of `convoy loadtest --json`"):
            shown(good, path)
    path.unlink()
    with pytest.raises(UsageError, match="No such file"):
        shown(good, path)
