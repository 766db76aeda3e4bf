"""From pairs to ratios to the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.peers.bound import Round, bound_table
from convoy.loadtest.peers.compare import PairRatio, Spread, bound_rank, matches, ratio
from convoy.loadtest.peers.page import replace_block, tables
from convoy.loadtest.peers.results import (
    ClosedLoad,
    Conditions,
    Failure,
    HostInfo,
    Pair,
    Reading,
    Results,
    Setting,
    write_json,
)
from convoy.models.errors import JobError

LOAD, BATCH = ClosedLoad("binary", 16), Setting(8, 1.0)


def reading(rps: float, p50_ms: float = 1.0, cpu_us: float = 80.0, failed: int = 0) -> Reading:
    return Reading(2.0, round(2 * rps), failed, p50_ms, 3 * p50_ms, cpu_us, 12.0)


def pair(theirs: Reading, ours: Reading, turn: int = 0, load: ClosedLoad = LOAD) -> Pair:
    return Pair(turn, "mosec", load, BATCH, theirs, ours)


def results(*pairs: Pair, failures: tuple[Failure, ...] = (), interrupted: bool = False) -> Results:
    machine = HostInfo("a CPU", 2, "6.1", "3.11.7", 0.1)
    conditions = Conditions(
        started_at="2026-01-01T00:00+00:00",
        machine=machine,
        generator="wrk",
        threads=1,
        networks={"cnn": "ab" * 32},
        duration_s=2.0,
        warm_up_s=1.0,
        rounds=3,
        rounds_per_start=1,
        seed=0,
        versions={"convoy": {"convoy": "0.1.0"}, "mosec": {"mosec": "0.9.8"}},
        titles={"convoy": "Convoy", "mosec": "Mosec", "ray": "Ray Serve"},
        notes={"convoy": "", "mosec": "a note"},
    )
    return Results(conditions, (), pairs, failures, interrupted)


def test_ratios_are_taken_within_a_pair_and_above_1_is_in_convoys_favour() -> None:
    # The machine was twice as fast in the second round; the ratio of medians would not know.
    (match,) = matches(
        [
            pair(reading(100, 4.0, 90.0), reading(150, 2.0, 60.0), 0),
            pair(reading(200, 2.0, 45.0), reading(300, 1.0, 30.0), 1),
            pair(reading(100, 4.0, 90.0), reading(120, 1.0, 90.0), 2),
        ]
    )
    assert match.rps_ratio == PairRatio(1.5, 1.2, 1.5, False)
    assert match.p50_ratio == PairRatio(2.0, 2.0, 4.0, False)
    assert match.cpu_ratio == PairRatio(1.5, 1.0, 1.5, False)


def test_bounds_are_those_of_the_sign_test() -> None:
    # 1/32 of all fives lie wholly above their median, and 576/32768 of all fifteens have at most three below it.
    assert [bound_rank(count) for count in (1, 4, 5, 7, 8, 15, 20)] == [0, 0, 1, 1, 2, 4, 6]
    fifteen = PairRatio.of([float(value) for value in range(15, 0, -1)])
    assert fifteen == PairRatio(8.0, 4.0, 12.0, True)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [([1.1] * 5, "won"), ([0.9] * 5, "lost"), ([0.9, *[1.1] * 4], "open"), ([1.1] * 4, "open")],
)
def test_nothing_is_won_or_lost_without_a_bound(ratios: list[float], verdict: str) -> None:
    assert PairRatio.of(ratios).verdict == verdict


def test_lost_rows_are_named_as_plainly_as_the_won_ones_are_counted() -> None:
    lost = [pair(reading(100, cpu_us=90), reading(50, cpu_us=60), turn) for turn in range(5)]
    text = tables(results(*lost))
    assert "By rate, of 1 rows Convoy has won 0, lost 1, open 0. Lost: Mosec at binary-16." in text
    assert "By CPU a request, of 1 rows Convoy has won 1, lost 0, open 0." in text
    assert "**0.50** (0.50 to 0.50), lost" in text


@given(st.lists(st.floats(0.01, 1e6), min_size=1))
def test_the_spread_holds_its_median(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.low <= spread.median <= spread.high
    assert spread.count == len(values)


def test_a_ratio_over_nothing_is_infinite_and_of_two_nothings_is_even() -> None:
    assert ratio(5, 0) == float("inf")
    assert ratio(0, 0) == 1.0
    assert ratio(0, 5) == 0.0


def test_the_tables_show_both_servers_the_ratio_and_the_generators_cost() -> None:
    text = tables(results(pair(reading(100, cpu_us=90), reading(150, cpu_us=60))))
    assert "### binary bodies, 16 connections" in text
    assert "| Convoy | untouched | - | 150 | 1.00 | 3.00 | 60 | - | - | - |" in text
    assert "| Mosec | batch 8, 1 ms | 1 | 100 | 1.00 | 3.00 | 90 | **1.50** (1.50 to 1.50), too few pairs |" in text
    assert "The load generator spent 12 to 12 us of CPU a request" in text
    assert "- Mosec: a note." in text
    assert "mosec 0.9.8" in text


def test_the_loads_come_in_the_same_order_whatever_the_lots_said() -> None:
    loads = [ClosedLoad("json", 16), ClosedLoad("binary", 64), ClosedLoad("binary", 1)]
    text = tables(results(*(pair(reading(1), reading(1), load=load) for load in loads)))
    order = [text.index(f"### {load.body} bodies, {load.connections} ") for load in loads]
    assert order == sorted(order, reverse=True)


def test_failures_and_a_premature_end_are_said() -> None:
    failures = (Failure("ray", "start", "with no batching: it ended\n    Traceback"),)
    text = tables(results(pair(reading(100, failed=3), reading(150)), failures=failures, interrupted=True))
    assert "- Ray Serve (start): with no batching: it ended Traceback" in text
    assert "100 (3 failed)" in text
    assert "stopped before its end" in text


def test_nothing_measured_is_a_page_too() -> None:
    assert "Convoy" in tables(results())


def test_the_json_says_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "new" / "peers.json"
    write_json(path, results(pair(reading(100), reading(150))))
    document = json.loads(path.read_text())
    assert document["pairs"][0]["theirs"]["answered"] == 200
    assert document["conditions"]["machine"]["cores"] == 2


def test_a_block_is_replaced_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    replace_block(page, "peers", "first")
    page.write_text("before\n" + page.read_text() + "after\n<!-- measured: other -->\nkept\n<!-- end of other -->\n")
    replace_block(page, "peers", "second")
    text = page.read_text()
    assert text.startswith("before\n")
    assert "second" in text
    assert "first" not in text
    assert text.endswith("kept\n<!-- end of other -->\n")


def test_a_page_without_a_place_is_refused_and_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("by hand\n")
    with pytest.raises(JobError, match="measured: peers"):
        replace_block(page, "peers", "text")
    assert page.read_text() == "by hand\n"


def test_the_bound_adds_up_what_an_image_costs() -> None:
    with_images = Round("resnet18", "jpeg", 8, 100.0, 300.0, reading(60))
    assert with_images.bound_rps == pytest.approx(75)
    assert with_images.share == pytest.approx(0.8)
    assert Round("resnet50", "tensor", 8, 20.0, None, reading(19)).share == pytest.approx(0.95)


def test_the_bounds_table_has_a_row_per_network() -> None:
    rounds = [Round("resnet18", "jpeg", 8, 100.0, 300.0, reading(rps)) for rps in (60, 66, 72)]
    text = bound_table([*rounds, Round("resnet50", "tensor", 4, 20.0, None, reading(19, failed=1))])
    assert "| resnet18 | jpeg | 100.0 (batch 8) | 300.0 | 75.0 | 66.0 | **0.88** (0.80 to 0.96) |" in text
    assert "| resnet50 | tensor | 20.0 (batch 4) | - | 20.0 | 19.0 (1 failed) | **0.95**" in text
