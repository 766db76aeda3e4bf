"""The expressions that docs/ asks Prometheus, and which metrics and labels each of them names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import yaml

from tests.support.manifests import DEPLOY
from tests.support.metric_table import PAGE

FOLDER = DEPLOY / "observability"
RULES = FOLDER / "rules.yml"
# What Prometheus itself puts on every series, or makes of every scrape.
TARGET_LABELS = frozenset({"job", "instance"})
_KEYWORDS = frozenset({"and", "or", "unless", "bool", "offset"})


class Asked(NamedTuple):
    """An expression as Prometheus gets it, and where it stands."""

    where: str
    expr: str


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((FOLDER / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            yield path.stem, panel


def asked_by_panels(rate_interval: str = "5m") -> list[Asked]:
    """With all variables at All, and Grafana's own interval so long."""
    return [
        Asked(f"{name}: {panel['title']} {target['refId']}", _filled(target["expr"], rate_interval))
        for name, panel in panels()
        for target in panel["targets"]
    ]


def _filled(expr: str, rate_interval: str) -> str:
    return re.sub(r"\$\w+", ".*", expr.replace("$__rate_interval", rate_interval))


@cache
def rules() -> list[dict[str, str]]:
    """Recorded ones and alerts, as they stand in the file."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recorded() -> frozenset[str]:
    return frozenset(rule["record"] for rule in rules() if "record" in rule)


def asked_by_rules() -> list[Asked]:
    return [Asked(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


def asked_in_the_page() -> list[Asked]:
    blocks = re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [Asked(f"metrics.md {number}", block.strip()) for number, block in enumerate(blocks, 1)]


def asked_everywhere() -> list[Asked]:
    return [*asked_by_panels(), *asked_by_rules(), *asked_in_the_page()]


class Selector(NamedTuple):
    """A metric, and the labels by which its series are chosen, with what they are to match."""

    metric: str
    labels: dict[str, str]


def selectors(expr: str) -> list[Selector]:
    """Every metric that an expression names."""
    plain = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)|\[[^\]]*\]", "", expr)
    found = re.findall(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?:\{([^}]*)\}|(\s*\())?", plain)
    return [
        Selector(name, dict(re.findall(r'(\w+)\s*[=!]~?=?\s*"([^"]*)"', labels)))
        for name, labels, is_function in found
        if not is_function and name not in _KEYWORDS
    ]


def grouped_by(expr: str) -> frozenset[str]:
    """The labels by which an expression sums up."""
    found = re.findall(r"\bby\s*\(([^)]*)\)", expr)
    return frozenset(label.strip() for labels in found for label in labels.split(","))
