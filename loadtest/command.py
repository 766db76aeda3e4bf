"""`convoy loadtest`: finds the target, runs the load, prints the results and writes the files.

Errors before the run are raised as UsageError (exit 2) or JobError (exit 1); the caller prints them.

Exit codes of `run`: 0 - the run is valid and no request failed, or the capacity was found. 1 - the run is not valid,
a request failed, or no capacity was found. Refusals by an overloaded server (429, 503) are failures, so that a script
never takes a run with lost requests for a clean one. 130 - stopped by Ctrl-C after the results so far were printed.

The capacity search runs here, probe by probe. `capacity` chooses the rates and interprets the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from convoy.loadtest import words
from convoy.loadtest.capacity import LEAST_REQUESTS, CapacityProbe, Limits, conclude, next_rate
from convoy.loadtest.document import document, table
from convoy.loadtest.observe import Observation, TargetObserver
from convoy.loadtest.options import DEFAULT_CONCURRENCY, MAX_REQUESTS, LoadTestOptions
from convoy.loadtest.report.page import render
from convoy.loadtest.results import LoadTestOutcome, Result, by_step, whole
from convoy.loadtest.target import LoadTarget, find_target, open_client
from convoy.loadtest.view import LiveView, print_outcome
from convoy.models.errors import JobError

# A short closed loop measures roughly what the server can do. The search starts at half of that.
SCOUTING_S = 2.0
FIRST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Found:
    result: Result
    observed: Observation


def find_capacity(target: LoadTarget, options: LoadTestOptions, observer: TargetObserver) -> LoadTestOutcome:
    """Search for the highest sustained rate. Ctrl-C ends the search, without the probe that it interrupts."""
    found = [_first_look(options, observer)]
    probes: list[CapacityProbe] = []
    measured_s = options.duration_s - options.warm_up_cut_s
    limits = Limits(least=LEAST_REQUESTS / measured_s, most=MAX_REQUESTS / options.duration_s)
    rate = next_rate(probes, FIRST_SHARE * found[0].result.summary.throughput_rps, limits)
    while rate is not None and not found[-1].observed.measurement.interrupted:
        at_rate = replace(options, find_capacity=False, rate=rate)
        observed = observer.observe(at_rate)
        result = whole(at_rate, observed.measurement, f"probe {len(probes) + 1}")
        found.append(_Found(result, observed))
        if not observed.measurement.interrupted:
            probes.append(_probe(rate, result))
            observer.audience.probed(probes[-1])
            rate = next_rate(probes, rate, limits)
    return _outcome(target, options, found, probes)


def _probe(rate: float, result: Result) -> CapacityProbe:
    summary, void = result.summary, result.verdict.void
    most = max(summary.errors, key=lambda error: error.count, default=None)
    reason = void if void is not None or most is None else f"{most.problem.title}: {most.problem.text}"
    return CapacityProbe(rate, summary.goodput, void is not None, summary.good, reason)


def _first_look(options: LoadTestOptions, observer: TargetObserver) -> _Found:
    duration_s = min(SCOUTING_S, options.duration_s)
    closed = replace(
        options, find_capacity=False, concurrency=DEFAULT_CONCURRENCY, duration_s=duration_s, warm_up_s=None
    )
    observed = observer.observe(closed)
    return _Found(whole(closed, observed.measurement, "closed loop"), observed)


def _outcome(
    target: LoadTarget, options: LoadTestOptions, found: Sequence[_Found], probes: Sequence[CapacityProbe]
) -> LoadTestOutcome:
    capacity = conclude(probes)
    tried = [one for one in found[1:] if not one.observed.measurement.interrupted]
    shown = next((one for one in reversed(tried) if one.result.rate == capacity.sustained), found[-1])
    return LoadTestOutcome(
        target=target,
        options=options,
        rows=tuple(one.result for one in tried) or (shown.result,),
        shown=shown.result,
        capacity=capacity,
        server=shown.observed.server,
        use=shown.observed.use,
        interrupted=found[-1].observed.measurement.interrupted,
    )


EXIT_GOOD = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run(options: LoadTestOptions, console: Console) -> int:
    """Run the load test and return the exit code. Raises UsageError and JobError."""
    client = open_client(options)
    try:
        target = find_target(client, options)
        with LiveView(console) as view:
            observer = TargetObserver(target, client, view)
            outcome = (find_capacity if options.find_capacity else _run_once)(target, options, observer)
    finally:
        client.close()
    print_outcome(console, outcome)
    files = (("--json", options.json_file, document), ("--csv", options.csv_file, table))
    for option, path, made in (*files, ("--report", options.report_file, render)):
        if path is not None:
            _write(path, option, made(outcome))
            console.print(f"Wrote {path}", markup=False, soft_wrap=True)
    return exit_code(outcome)


def exit_code(outcome: LoadTestOutcome) -> int:
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_GOOD if words.verdict(outcome).word in ("valid", "valid, but not stable") else EXIT_FAILED


def _run_once(target: LoadTarget, options: LoadTestOptions, observer: TargetObserver) -> LoadTestOutcome:
    """One run, with or without steps."""
    observed = observer.observe(options)
    measurement = observed.measurement
    return LoadTestOutcome(
        target=target,
        options=options,
        rows=by_step(options, measurement),
        shown=whole(options, measurement),
        capacity=None,
        server=observed.server,
        use=observed.use,
        interrupted=measurement.interrupted,
    )


def _write(path: Path, option: str, text: str) -> None:
    """Write to a temporary file and rename it, so that a reader never sees half a file. Raises JobError.

    `option` is the option that gave the path.
    """
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise JobError(f"cannot write {path} ({error.strerror}); choose another path with {option}") from None
