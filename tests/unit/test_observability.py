"""What docs/deploy/observability holds: made of one source, of metrics that exist, in forms that its readers take."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from convoy.app.telemetry.metrics import LATENCY_BUCKETS_S, CanaryResult, LoadResult, PlanResult
from convoy.app.telemetry.nvml import THROTTLE_REASONS
from convoy.app.telemetry.outcomes import CallOutcome, Refusal
from convoy.app.telemetry.statistics import STAGES
from docs.deploy.observability.make import files
from docs.deploy.observability.objective import Objective
from tests.support.metric_table import documented
from tests.support.promql import (
    FOLDER,
    RULES,
    TARGET_LABELS,
    Asked,
    alerts,
    asked_everywhere,
    grouped_by,
    panels,
    recorded,
    selectors,
)
from tests.support.stores import DATA
from tests.support.tools import tool

DASHBOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
# A histogram's own series.
PARTS = re.compile(r"_(bucket|sum|count)$")
# What a label may be, where that is known beforehand.
VALUES = {
    "outcome": {str(one) for one in CallOutcome},
    "stage": set(STAGES),
    "le": {repr(bound) for bound in LATENCY_BUCKETS_S},
    "result": {*get_args(CanaryResult), *get_args(PlanResult), *get_args(LoadResult)},
    "reason": {str(one) for one in Refusal} | set(THROTTLE_REASONS),
}


def test_the_files_are_those_that_the_program_writes() -> None:
    for name, text in files(Objective()).items():
        assert (FOLDER / name).read_text() == text, f"{name}: run python -m docs.deploy.observability.make"
    assert {path.name for path in DASHBOARDS} == {
        f"{one}.json" for one in ("overview", "model", "stages", "devices", "objective")
    }


def test_another_objective_is_in_the_rules_and_on_its_page() -> None:
    found = files(Objective(availability=0.995, latency_s=0.1, latency_share=0.95))
    rules, page = found["rules.yml"], found["dashboards/objective.json"]
    assert "14.4 * 0.005" in rules
    assert 'le="0.1"' in rules
    assert "14.4 * 0.05" in rules
    assert 'le=\\"0.1\\"' in page
    assert "/ 0.005" in page


@pytest.mark.parametrize("given", [{"latency_s": 0.2}, {"availability": 99.9}, {"latency_share": 1.0}])
def test_an_objective_that_cannot_be_measured_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(SystemExit, match=r"buckets|shares"):
        Objective(**given)


def labels_of(metric: str) -> frozenset[str] | None:
    """Those that its series have; None: there is no such metric."""
    if metric == "up" or metric in recorded():
        return TARGET_LABELS
    known = documented()
    if metric in known and known[metric].type != "histogram":
        return TARGET_LABELS | set(known[metric].labels)
    family = known.get(PARTS.sub("", metric))
    if family is None or family.type != "histogram" or not PARTS.search(metric):
        return None
    return TARGET_LABELS | set(family.labels) | ({"le"} if metric.endswith("_bucket") else set())


@pytest.mark.parametrize("asked", asked_everywhere(), ids=lambda asked: asked.where)
def test_every_expression_asks_for_metrics_and_labels_that_exist(asked: Asked) -> None:
    chosen = selectors(asked.expr)
    assert chosen
    known: set[str] = set()
    for metric, labels in chosen:
        has = labels_of(metric)
        assert has is not None, f"there is no metric {metric}"
        assert labels.keys() <= has, f"{metric} has no {labels.keys() - has}"
        known |= has
        for label, value in labels.items():
            if label in VALUES and value != ".*":
                assert set(value.split("|")) <= VALUES[label], f"{label} is never {value}"
    assert grouped_by(asked.expr) <= known


def test_what_an_expression_names_is_found() -> None:
    expr = 'sum by (a, le) (rate(x_total{b=~"c|d", e!="f"}[5m])) / on (g) y:z > 0.5 and h or 1e3 * count_of_i'
    assert [(one.metric, one.labels) for one in selectors(expr)] == [
        ("x_total", {"b": "c|d", "e": "f"}),
        ("y:z", {}),
        ("h", {}),
        ("count_of_i", {}),
    ]
    assert grouped_by(expr) == {"a", "le"}


def test_prometheus_understands_every_expression(tmp_path: Path) -> None:
    asked = [{"record": f"asked:{number}", "expr": one.expr} for number, one in enumerate(asked_everywhere())]
    file = tmp_path / "asked.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": asked}]}))
    for checked in (["rules", file], ["rules", RULES], ["config", FOLDER / "prometheus.yml"]):
        told = subprocess.run([tool("promtool"), "check", *checked], capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stdout + told.stderr


# Dashboards


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafanas_own_types_know_every_field(path: Path) -> None:
    """What they do not know they leave out, so nothing may be lost on the way through them."""
    given = json.loads(path.read_text())
    read = json.loads(json.dumps(Dashboard.from_json(given), cls=JSONEncoder))
    assert lost(given, read) == []
    given["panels"][0]["fieldConfig"]["defaults"]["units"] = "s"
    read = json.loads(json.dumps(Dashboard.from_json(given), cls=JSONEncoder))
    assert lost(given, read) == ["panels/0/fieldConfig/defaults/units"]


def lost(given: Any, read: Any, place: str = "") -> list[str]:
    """Where something differs that was given."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [one for name in given for one in lost(given[name], read.get(name), f"{place}/{name}".lstrip("/"))]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        both = enumerate(zip(given, read, strict=True))
        return [one for number, (own, other) in both for one in lost(own, other, f"{place}/{number}")]
    return [] if given == read else [place]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_variable_is_declared_and_used(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$([a-z]\w*)", json.dumps(dashboard["panels"])))
    assert used == variables.keys()
    for one in variables.values():
        if one["type"] == "query":
            asked, label = re.fullmatch(r"label_values\((.*), (\w+)\)", one["query"]["query"]).groups()  # type: ignore[union-attr]
            (selector,) = selectors(asked.replace("$", ""))
            has = labels_of(selector.metric)
            assert has is not None
            assert {label, *selector.labels} <= has
            assert label == one["name"]


def test_every_panel_says_what_it_shows_by_labels_that_are_left_and_none_lies_on_another() -> None:
    places: dict[tuple[str, int, int], str] = {}
    for name, panel in panels():
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] for target in panel["targets"]) or panel["type"] == "table"
        for target in panel["targets"]:
            chosen = selectors(target["expr"])
            plain = {one for selector in chosen for one in labels_of(selector.metric) or ()}
            in_legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert in_legend <= (grouped_by(target["expr"]) or plain), f"{name}: {panel['title']}"
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert x < 24
                other = places.setdefault((name, x, y), panel["title"])
                assert other == panel["title"], f"{name}: {other} and {panel['title']}"


# Alerts


def test_every_alert_has_words_for_whoever_is_called() -> None:
    for name, alert in alerts().items():
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert {"summary", "description"} == alert["annotations"].keys()
        told = re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])
        has = grouped_by(alert["expr"]) or set.intersection(
            *(set(labels_of(one.metric) or ()) for one in selectors(alert["expr"]))
        )
        assert set(told) <= has, f"{name} has no {set(told) - has}"


# The compose file


def test_the_compose_file_is_one_and_mounts_what_is_there() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yml").read_text())
    schema = json.loads((DATA / "compose-spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate(compose)
    services = compose["services"]
    mounts = [mount.split(":") for one in services.values() for mount in one.get("volumes", ())]
    inside = {target: FOLDER / source for source, target, *_ in mounts if source.startswith(".")}
    assert all(path.exists() for path in inside.values())
    assert {source for source, *_ in mounts if not source.startswith(".")} == compose["volumes"].keys()
    # Where each finds what it is told to look for.
    prometheus = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"]["command"]
    # Without it what leads from a histogram to a trace is dropped.
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]
    assert all(f"/etc/prometheus/{name}" in inside for name in prometheus["rule_files"])
    (scraped,) = prometheus["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == ["convoy:8000"]
    assert "--port=8000" in services["convoy"]["command"]
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((FOLDER / "provisioning/dashboards/convoy.yml").read_text())["providers"]
    assert inside[provider["options"]["path"]] == FOLDER / "dashboards"
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (inside[str(home.parent)] / home.name).exists()
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one["ports"])
    broken = {**compose, "services": {**services, "convoy": {**services["convoy"], "comand": []}}}
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        jsonschema.Draft7Validator(schema).validate(broken)
