"""The results of a run, of each of its steps, or of a probe: figures, verdict and stability.

Divides the measurement into windows of steps. The figures are computed elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoy.loadtest.arrivals import RateStep
from convoy.loadtest.capacity import Capacity
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.runner import Measurement
from convoy.loadtest.server_side import ServerSide, ServerUse
from convoy.loadtest.statistics import Summary, Window, summarise
from convoy.loadtest.target import LoadTarget
from convoy.loadtest.units import NS_PER_S
from convoy.loadtest.verdict import Stability, Verdict, judge, stability_of


@dataclass(frozen=True, slots=True)
class Result:
    """`name` is "" for a whole run. `rate` is None in a closed loop."""

    name: str
    rate: float | None
    measurement: Measurement
    window: Window
    summary: Summary
    verdict: Verdict
    stability: Stability


@dataclass(frozen=True, slots=True)
class LoadTestOutcome:
    """All results of one load test.

    `rows` has one result per step or probe, or the one of the whole run. `shown` is the result whose latencies are
    drawn: the whole run, or the fastest probe that met the objective. `server` are the server's own figures for the
    requests of `shown`, `use` is the CPU and memory that it used; None if it does not tell.
    """

    target: LoadTarget
    options: LoadTestOptions
    rows: tuple[Result, ...]
    shown: Result
    capacity: Capacity | None
    server: ServerSide | None
    use: ServerUse | None
    interrupted: bool


def whole(options: LoadTestOptions, measurement: Measurement, name: str = "") -> Result:
    """The result of the whole run."""
    rate = None
    if measurement.steps:
        rate = sum(step.rate for step in measurement.steps) / len(measurement.steps)
    return _result(name, rate, options, measurement, measurement.window)


def by_step(options: LoadTestOptions, measurement: Measurement) -> tuple[Result, ...]:
    """One result per step, each with its own warm-up. Steps that were never reached are left out."""
    if len(measurement.steps) < 2:
        return (whole(options, measurement),)
    found = []
    for number, step in enumerate(measurement.steps, start=1):
        window = _window(options, measurement.window, step)
        if window.start_ns < window.end_ns:
            found.append(_result(f"step {number}", step.rate, options, measurement, window))
    return tuple(found) or (whole(options, measurement),)


def _window(options: LoadTestOptions, run: Window, step: RateStep) -> Window:
    begin_ns = run.run_start_ns + int(step.start_s * NS_PER_S)
    start_ns = begin_ns + int(options.warm_up_cut_s * NS_PER_S)
    return Window(begin_ns, start_ns, min(run.end_ns, run.run_start_ns + int(step.end_s * NS_PER_S)))


def _result(
    name: str, rate: float | None, options: LoadTestOptions, measurement: Measurement, window: Window
) -> Result:
    summary = summarise(measurement.records, window, options.slo_ms)
    verdict = judge(
        summary,
        rate=rate,
        slo_ms=options.slo_ms,
        generator_cpu_share=measurement.busiest_cpu_share,
        waited=measurement.waited,
        deaths=measurement.deaths,
    )
    return Result(name, rate, measurement, window, summary, verdict, stability_of(measurement.records, window))
