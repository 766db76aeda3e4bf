"""`convoy loadtest`: finds the target, runs the load, judges it, shows it.

Knows the order of things and the exit codes. An error before the run is raised (UsageError: exit 2,
JobError: exit 1) and is one line for the caller to print.

Exit codes of `run`: 0 - the run is valid and every measured request was answered well. 1 - the run is void, or any
request failed, refusals by an overloaded server (429, 503) included: a script must never take a run in
which requests were lost for a clean one; the table and the JSON say what was lost. 130 - stopped by Ctrl-C;
what was measured so far has been shown.
"""

from __future__ import annotations

from rich.console import Console

from loadtest import report
from loadtest.measure import Measurement, measure
from loadtest.options import LoadOptions
from loadtest.statistics import Summary, summarise
from loadtest.target import find_target
from loadtest.verdict import Verdict, judge
from loadtest.view import LiveView, print_summary

EXIT_GOOD = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run(options: LoadOptions, console: Console) -> int:
    """Gives the exit code. Raises UsageError and JobError."""
    target = find_target(options)
    with LiveView(console, options.duration_s) as view:
        measurement = measure(target, options, view.show)
    summary = summarise(measurement.records, measurement.window, options.slo_ms)
    verdict = judge(
        summary,
        rate=options.rate,
        slo_ms=options.slo_ms,
        generator_cpu_share=measurement.generator_cpu_s / max(measurement.wall_s, 1e-9),
        waited=measurement.waited,
    )
    print_summary(console, target, options, summary, verdict, interrupted=measurement.interrupted)
    if options.json_file is not None:
        report.write(options.json_file, report.document(target, options, measurement, summary, verdict))
        console.print(f"Written to {options.json_file}", markup=False, soft_wrap=True)
    return exit_code(measurement, summary, verdict)


def exit_code(measurement: Measurement, summary: Summary, verdict: Verdict) -> int:
    if measurement.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if verdict.void is not None or summary.failed else EXIT_GOOD
