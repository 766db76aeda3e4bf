"""What docs/metrics.md says that there is, and what a server shows: each metric with its type and labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.stores import ROOT

PAGE = ROOT / "docs" / "metrics.md"
_ROW = re.compile(r"^\| `(\w+)` \| (counter|gauge|histogram|untyped) \| (.*?) ?\| .*\|$")
# The client library's word for what has no type.
_TYPES = {"unknown": "untyped"}


class Shape(NamedTuple):
    """`labels` in the alphabet's order, and not a histogram's `le`."""

    type: str
    labels: tuple[str, ...]


@cache
def documented() -> dict[str, Shape]:
    """By name. Every row that begins with a metric must be understood."""
    found: dict[str, Shape] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            match = _ROW.match(line)
            assert match, f"not a row of a metric: {line}"
            name, kind, labels = match.groups()
            assert name not in found, f"{name} is there twice"
            found[name] = Shape(kind, tuple(sorted(re.findall(r"\w+", labels))))
    return found


def shown(text: str) -> Iterator[tuple[str, Shape]]:
    """Every metric of an answer that has a series; `_created`, which every counter has beside it, is left out."""
    return shapes(text_string_to_metric_families(text))


def shapes(families: Iterable[Metric]) -> Iterator[tuple[str, Shape]]:
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if not (family.type == "gauge" and name.endswith("_created")):
            for one in family.samples:
                labels = tuple(sorted(one.labels.keys() - {"le"}))
                yield name, Shape(_TYPES.get(family.type, family.type), labels)
