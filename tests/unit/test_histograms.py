"""Our histograms say what the client library's own would."""

from __future__ import annotations

import math

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from convoy.app.telemetry.metrics import Histogram

BOUNDS = (0.001, 0.5, 1, 2, 10)


def text_of(registry: CollectorRegistry) -> set[str]:
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


@given(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(BOUNDS))))
def test_the_text_is_the_client_librarys(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histogram("seconds_taken", "How long", ("model", "stage"), BOUNDS)
    ours.register(mine)
    reference = prometheus_client.Histogram(
        "seconds_taken", "How long", ("model", "stage"), buckets=BOUNDS, registry=theirs
    )
    mine.at("m", "a")
    reference.labels("m", "a")
    for value in values:
        mine.at("m", "a").observe(value)
        reference.labels("m", "a").observe(value)
    assert math.isclose(mine.at("m", "a").sorted()[1], sum(values), abs_tol=1e-9)
    assert text_of(ours) == text_of(theirs)


def test_a_model_that_leaves_takes_all_its_series_along() -> None:
    histogram = Histogram("x", "x", ("model", "version", "stage"), BOUNDS)
    for place in (("a", "1", "s"), ("a", "1", "t"), ("a", "2", "s"), ("b", "1", "s")):
        histogram.at(*place).observe(1)
    histogram.forget("a", "1")
    (family,) = histogram.collect()
    left = {(s.labels["model"], s.labels["version"]) for s in family.samples}
    assert left == {("a", "2"), ("b", "1")}
