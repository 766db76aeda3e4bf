"""The figures as CSV: one row for the run, or for each step or probe.

Knows the columns, which are a promise: columns are added at the end, never renamed. A figure that there is
not is an empty field.
"""

from __future__ import annotations

import csv
import io

from convoy.loadtest.results import LoadTestOutcome, Result
from convoy.loadtest.statistics import PERCENTILES

COLUMNS = (
    "name",
    "rate_rps",
    "clients",
    "window_s",
    "offered",
    "good",
    "failed",
    "offered_rps",
    "throughput_rps",
    "goodput",
    "mean_ms",
    *(f"p{name}_ms" for name in PERCENTILES),
    "max_ms",
    "lateness_p99_ms",
    "stable",
    "void",
)


def table(outcome: LoadTestOutcome) -> str:
    """Comma-separated, with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_row(outcome, result) for result in outcome.rows)
    return text.getvalue()


def _row(outcome: LoadTestOutcome, result: Result) -> list[object]:
    summary, verdict = result.summary, result.verdict
    return [
        result.name or "run",
        result.rate,
        None if result.rate is not None else outcome.options.clients,
        summary.window_s,
        summary.offered,
        summary.good,
        summary.failed,
        summary.offered_rps,
        summary.throughput_rps,
        summary.goodput,
        summary.mean_ms,
        *(percentile.latency_ms for percentile in summary.percentiles),
        summary.max_ms,
        verdict.lateness.p99_ms if verdict.lateness else None,
        result.stability.why_not is None,
        verdict.void or "",
    ]
