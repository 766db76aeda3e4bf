"""Measuring in turns, in virtual time; the line, the interval and the rule that are drawn from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.engines.measure import (
    Line,
    Pace,
    best_per_sample_ms,
    fit_line,
    is_worthwhile,
    latency_tables,
    paired_speedup,
    run_in_turns,
)
from convoy.app.engines.select import choose_on_cpu
from convoy.models.bundle import Interval, LatencyPoint, LatencyTable, Variant
from convoy.models.spec import TensorSpec
from tests.support.fake_engine import FakeEngine

PACE = Pace(budget_s=10, limit_s=100, warm_up=1, fewest=3, most=20)
TENSORS = (TensorSpec("x", "FP32", (3,)),), (TensorSpec("y", "FP32", (3,)),)


class Clock:
    """Stands in for the module `time`; only sleeping makes it pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s

    def perf_counter_ns(self) -> int:
        return round(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("convoy.app.engines.measure.time", clock)
    return clock


def engine(clock: Clock, latency_s: Callable[[int], float], max_batch_size: int = 8) -> FakeEngine:
    inputs, outputs = TENSORS
    return FakeEngine(
        inputs, outputs, max_batch_size=max_batch_size, run_rows=lambda x: x, latency_s=latency_s, sleep=clock.sleep
    )


def points(*medians_ms: float) -> tuple[LatencyPoint, ...]:
    return tuple(LatencyPoint(1 << index, ms, ms, ms) for index, ms in enumerate(medians_ms))


def test_engines_that_differ_by_a_factor_are_told_apart_while_the_machine_drifts(clock):
    def slow_s(samples: int) -> float:
        # The machine becomes ten times slower while it is measured.
        return (0.004 + 0.002 * samples) * (1 + clock.now_s / 10)

    engines = [engine(clock, slow_s), engine(clock, lambda b: slow_s(b) / 3)]
    reference, faster = latency_tables(engines, list(run_in_turns(engines, PACE)))
    assert reference.speedup is None
    assert faster.speedup.median == pytest.approx(3, rel=0.01)
    assert faster.speedup.low <= 3 <= faster.speedup.high
    assert [point.batch_size for point in faster.points] == [1, 2, 4, 8]
    assert reference.device_fingerprint == "fake"


def test_a_slow_network_is_measured_at_the_sizes_that_can_be_afforded(clock):
    slow = engine(clock, lambda b: 1.0 * b, max_batch_size=64)
    sizes = [rounds.batch_size for rounds in run_in_turns([slow], replace(PACE, limit_s=20))]
    assert sizes == [1, 2, 4]
    assert clock.now_s == pytest.approx((1 + 10) * 1 + (1 + 5) * 2 + (1 + 3) * 4)


def test_a_fast_network_is_measured_often_but_not_for_ever(clock):
    fast = engine(clock, lambda b: 0.001)
    assert {rounds.runs_ms.shape for rounds in run_in_turns([fast, fast], PACE)} == {(2, 20)}


@given(st.floats(0, 100), st.floats(0.001, 100), st.integers(2, 8))
def test_a_line_is_recognised(fixed_ms, per_sample_ms, count):
    exact = Line(fixed_ms, per_sample_ms)
    line = fit_line(points(*(exact.at(1 << index) for index in range(count))))
    assert line.at(1) == pytest.approx(exact.at(1))
    assert line.at(1 << count) == pytest.approx(exact.at(1 << count))


def test_one_disturbed_size_does_not_bend_the_line():
    assert fit_line(points(5, 6, 8, 120, 20, 36)) == Line(pytest.approx(4), pytest.approx(1))  # type: ignore[arg-type]


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        reference = [generator.lognormal(1, 0.2, 20) for _ in range(4)]
        own = [theirs / 1.5 * generator.lognormal(0, 0.1, 20) for theirs in reference]
        interval = paired_speedup(reference, own, seed=trial)
        hits += interval.low <= 1.5 <= interval.high
    assert 0.90 <= hits / 200 <= 0.99


def table(*medians_ms: float, speedup: Interval | None = None) -> LatencyTable:
    return LatencyTable("here", points(*medians_ms), speedup=speedup)


def test_a_gain_pays_only_if_its_lower_end_does():
    assert not is_worthwhile(table(1))
    assert not is_worthwhile(table(1, speedup=Interval(1.5, 1.02, 2)))
    assert is_worthwhile(table(1, speedup=Interval(1.04, 1.03, 1.05)))
    assert best_per_sample_ms(table(4, 5, 12)) == 2.5


def variants(*latencies: LatencyTable) -> tuple[Variant, ...]:
    return tuple(
        Variant(file, "int8" if "int8" in file else "fp32", "cpu", True, "because", 0.0, None, latency)
        for file, latency in zip(("fp32.onnx", "int8-cpu.onnx"), latencies, strict=True)
    )


@pytest.mark.parametrize(
    ("speedup", "chosen"),
    [
        (Interval(1.5, 1.4, 1.6), ["int8-cpu.onnx"]),
        (Interval(1.5, 0.9, 2.5), ["fp32.onnx"]),
        # Without an interval nothing is known for sure: both are measured at start-up.
        (None, ["fp32.onnx", "int8-cpu.onnx"]),
    ],
)
def test_the_server_chooses_by_the_same_rule(speedup, chosen):
    choice = choose_on_cpu(variants(table(3, 4), table(2, 3, speedup=speedup)), "auto", "here")
    assert [variant.file for variant in choice.variants] == chosen


def test_of_several_that_beat_the_exact_one_none_is_called_the_fastest_before_they_are_measured():
    faster = table(2, 3, speedup=Interval(1.5, 1.4, 1.6))
    fp32, int8 = variants(table(3, 4), faster)
    choice = choose_on_cpu((fp32, int8, replace(int8, file="bf16.onnx", precision="bf16")), "auto", "here")
    assert [variant.file for variant in choice.variants] == ["int8-cpu.onnx", "bf16.onnx"]
    assert choice.reason == "measured at start, together with all variants that were faster than fp32 at export"
