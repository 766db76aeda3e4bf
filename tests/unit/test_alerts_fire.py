"""Prometheus' own tests of the alerts: which fire on which series, and that none does where all is well."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support.promql import RULES, alerts
from tests.support.tools import tool

HERE = 'job="convoy", instance="a:8000"'
VERSION = f'{HERE}, model="digits", version="1"'
Series = dict[str, str]


def calls(outcome: str) -> str:
    return f'convoy_call_duration_seconds_count{{{VERSION}, protocol="v2", outcome="{outcome}"}}'


def soon() -> str:
    return f'convoy_call_duration_seconds_bucket{{{VERSION}, protocol="v2", outcome="answered", le="0.25"}}'


def well(points: int, **instead: str) -> Series:
    """A server on which all is well: 100 calls a second at one point a minute, of which one in 10,000 fails."""
    still, up = f"0x{points}", f"1x{points}"
    return {
        f"up{{{HERE}}}": up,
        f"convoy_ready{{{HERE}}}": up,
        f"process_start_time_seconds{{{HERE}}}": f"1700000000x{points}",
        calls("answered"): f"0+6000x{points}",
        calls("failed"): f"0+0.6x{points}",
        calls("invalid"): f"0+600x{points}",
        soon(): f"0+5990x{points}",
        f'convoy_rejected_total{{{HERE}, reason="queue_full"}}': f"0+0.6x{points}",
        f'convoy_rejected_total{{{HERE}, reason="draining"}}': still,
        f"convoy_inflight_bytes{{{HERE}}}": f"100x{points}",
        f"convoy_inflight_limit_bytes{{{HERE}}}": f"1000x{points}",
        f'convoy_gpu_memory_used_bytes{{{HERE}, device="cuda:0"}}': f"500x{points}",
        f'convoy_gpu_memory_total_bytes{{{HERE}, device="cuda:0"}}': f"1000x{points}",
        f'convoy_canary_runs_total{{{VERSION}, result="passed"}}': f"0+1x{points}",
        f'convoy_canary_runs_total{{{VERSION}, result="failed"}}': still,
        f'convoy_canary_runs_total{{{VERSION}, result="hung"}}': still,
        f"convoy_engine_replacements_total{{{VERSION}}}": still,
        f'convoy_plans_total{{{VERSION}, result="serves"}}': f"0 1x{points}",
        f'convoy_plans_total{{{VERSION}, result="not_faster"}}': f"0 1x{points}",
        f'convoy_plans_total{{{VERSION}, result="not_built"}}': still,
        f'convoy_plans_total{{{VERSION}, result="not_proved"}}': still,
        f'convoy_loads_total{{{HERE}, result="loaded"}}': f"0 1x{points}",
        f'convoy_loads_total{{{HERE}, result="refused"}}': still,
    } | instead


class Case(NamedTuple):
    """What differs from a server on which all is well, for so many minutes, and what must fire at the end of them."""

    name: str
    minutes: int
    instead: Series
    fires: set[str]


def rare(values: str) -> Series:
    """All that happens so seldom that its first time is told."""
    return {
        f'convoy_canary_runs_total{{{VERSION}, result="failed"}}': values,
        f"convoy_engine_replacements_total{{{VERSION}}}": values,
        f'convoy_plans_total{{{VERSION}, result="not_built"}}': values,
        f'convoy_loads_total{{{HERE}, result="refused"}}': values,
    }


RARE = {"ConvoyCanaryFailed", "ConvoyEngineReplaced", "ConvoyPlanFailed", "ConvoyVersionRefused"}
HOURS, DAYS = 60, 24 * 60
# Of 6,000 calls a minute. Allowed is 1 in 1,000 that is not done, and 1 in 100 that is late.
CASES = (
    Case("all is well", 4 * DAYS, {}, set()),
    Case(
        "a twentieth fails for an hour",
        1 * HOURS,
        {calls("failed"): "0+300x60"},
        {"ConvoyAvailabilityBurnsFast", "ConvoyAvailabilityBurnsSlowly"},
    ),
    Case(
        "one in 125 fails for six hours",
        6 * HOURS,
        {calls("late"): "0+48x360"},
        {"ConvoyAvailabilityBurnsFast", "ConvoyAvailabilityBurnsSlowly"},
    ),
    Case("one in 250 fails for a day", 1 * DAYS, {calls("failed"): "0+24x1440"}, {"ConvoyAvailabilityBurnsSlowly"}),
    Case("one in 660 fails for three days", 3 * DAYS, {calls("failed"): "0+9x4320"}, {"ConvoyAvailabilityBurnsSlowly"}),
    Case("all failed in an hour that is long over", 1 * DAYS, {calls("failed"): "0+200x60 12000x1380"}, set()),
    Case(
        "nothing is answered",
        1 * HOURS,
        {calls("answered"): "0x60", soon(): "0x60", calls("failed"): "0+6000x60"},
        {"ConvoyAvailabilityBurnsFast", "ConvoyAvailabilityBurnsSlowly"},
    ),
    Case(
        "a fifth is late for an hour",
        1 * HOURS,
        {soon(): "0+4800x60"},
        {"ConvoyLatencyBurnsFast", "ConvoyLatencyBurnsSlowly"},
    ),
    Case("one in 25 is late for a day", 1 * DAYS, {soon(): "0+5760x1440"}, {"ConvoyLatencyBurnsSlowly"}),
    Case("clients send nonsense", 1 * HOURS, {calls("invalid"): "0+60000x60"}, set()),
    Case("Prometheus is not answered", 10, {f"up{{{HERE}}}": "1x5 0x5"}, {"ConvoyDown"}),
    Case("Prometheus was not answered once", 10, {f"up{{{HERE}}}": "1x8 0 1"}, set()),
    Case("it is not ready", 20, {f"convoy_ready{{{HERE}}}": "1x5 0x15"}, {"ConvoyNotReady"}),
    Case("it loads for four minutes", 20, {f"convoy_ready{{{HERE}}}": "0x3 1x17"}, set()),
    Case(
        "it begins anew",
        20,
        {f"process_start_time_seconds{{{HERE}}}": "1700000000x10 1700000600x10"},
        {"ConvoyRestarted"},
    ),
    Case(
        "it refuses for long",
        20,
        {f'convoy_rejected_total{{{HERE}, reason="queue_full"}}': "0+120x20"},
        {"ConvoyRefuses"},
    ),
    Case(
        "it refuses because it leaves",
        20,
        {f'convoy_rejected_total{{{HERE}, reason="draining"}}': "0+999x20"},
        set(),
    ),
    Case("memory is full", 20, {f"convoy_inflight_bytes{{{HERE}}}": "950x20"}, {"ConvoyMemoryNearlyFull"}),
    Case("memory was full for a moment", 20, {f"convoy_inflight_bytes{{{HERE}}}": "100x17 950x2"}, set()),
    Case(
        "a GPU's memory is full",
        20,
        {f'convoy_gpu_memory_used_bytes{{{HERE}, device="cuda:0"}}': "990x20"},
        {"ConvoyGpuMemoryNearlyFull"},
    ),
    Case(
        "a canary fails, and its engine is replaced",
        20,
        {
            f'convoy_canary_runs_total{{{VERSION}, result="failed"}}': "0x10 1x10",
            f"convoy_engine_replacements_total{{{VERSION}}}": "0x11 1x9",
        },
        {"ConvoyCanaryFailed", "ConvoyEngineReplaced"},
    ),
    Case(
        "a canary hangs",
        20,
        {f'convoy_canary_runs_total{{{VERSION}, result="hung"}}': "0x10 1x10"},
        {"ConvoyCanaryFailed"},
    ),
    Case(
        "a canary failed an hour ago",
        90,
        {f'convoy_canary_runs_total{{{VERSION}, result="failed"}}': "0x10 1x80"},
        set(),
    ),
    Case(
        "a plan is not built",
        30,
        {f'convoy_plans_total{{{VERSION}, result="not_built"}}': "0x10 1x20"},
        {"ConvoyPlanFailed"},
    ),
    Case(
        "a plan is wrong",
        30,
        {f'convoy_plans_total{{{VERSION}, result="not_proved"}}': "0x10 1x20"},
        {"ConvoyPlanFailed"},
    ),
    Case(
        "a version is refused",
        20,
        {f'convoy_loads_total{{{HERE}, result="refused"}}': "0x10 1x10"},
        {"ConvoyVersionRefused"},
    ),
    Case("all of it was there at the first look", 10, rare("1x10"), RARE),
    Case("all of it was there at the first look at a new version", 30, rare("_x20 1x9"), RARE),
    Case("all of it was there at a first look that is long over", 90, rare("1x90"), set()),
    Case(
        "all of it is long over, and one look was missed a quarter of an hour ago", 80, rare("1x64 stale 1x14"), set()
    ),
    Case("all of it is long over, and one look was missed an hour ago", 180, rare("1x119 stale 1x59"), set()),
)


def test_every_alert_has_a_case() -> None:
    assert set().union(*(case.fires for case in CASES)) == alerts().keys()


@pytest.mark.long
@pytest.mark.parametrize("every", ["1m", "1h"])
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path, every: str) -> None:
    """What takes days is looked at once an hour, because promtool takes a second for some thousand looks."""
    tests = [_test(case) for case in CASES if (case.minutes > 2 * HOURS) == (every == "1h")]
    file = tmp_path / "alerts.yml"
    # Otherwise in any order: and what is recorded after the alerts is an hour old for them.
    order = [group["name"] for group in yaml.safe_load(RULES.read_text())["groups"]]
    whole = {"rule_files": [str(RULES)], "evaluation_interval": every, "group_eval_order": order, "tests": tests}
    file.write_text(yaml.safe_dump(whole))
    told = subprocess.run([tool("promtool"), "test", "rules", file], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


def _test(case: Case) -> dict[str, Any]:
    series = well(case.minutes, **case.instead)
    fires = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(case.fires)]
    asked = 'count by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "name": case.name,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": asked, "eval_time": f"{case.minutes}m", "exp_samples": fires}],
    }
