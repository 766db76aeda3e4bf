"""`convoy loadtest`: finds the target, runs the load, judges it, shows it.

Knows the order of things and the exit codes. An error before the run is raised (UsageError: exit 2,
JobError: exit 1) and is one line for the caller to print.

Exit codes of `run`: 0 - the run is valid and every measured request was answered well; or the capacity lies
between two rates that were both tried. 1 - the run is void, or any request failed, refusals by an overloaded
server (429, 503) included: a script must never take a run in which requests were lost for a clean one; the
table and the JSON say what was lost; or no capacity was found. 130 - stopped by Ctrl-C; what was measured so
far has been shown.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from rich.console import Console

from convoy.loadtest.document import document, table
from convoy.loadtest.find_capacity import find_capacity
from convoy.loadtest.observe import TargetObserver
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.report.page import render
from convoy.loadtest.results import LoadTestOutcome, by_step, whole
from convoy.loadtest.target import LoadTarget, find_target, open_client
from convoy.loadtest.view import LiveView, print_outcome
from convoy.models.errors import JobError

EXIT_GOOD = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run(options: LoadTestOptions, console: Console) -> int:
    """Gives the exit code. Raises UsageError and JobError."""
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
            console.print(f"Written to {path}", markup=False, soft_wrap=True)
    return exit_code(outcome)


def exit_code(outcome: LoadTestOutcome) -> int:
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    if outcome.capacity is not None:
        return EXIT_GOOD if outcome.capacity.ending == "bracketed" else EXIT_FAILED
    is_clean = all(row.verdict.void is None and not row.summary.failed for row in outcome.rows)
    return EXIT_GOOD if is_clean else EXIT_FAILED


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
    """Writes aside and renames, so that a reader never finds half a file. `option` named the path. Raises JobError."""
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise JobError(f"cannot write {path} ({error.strerror}); choose another place with {option}") from None
