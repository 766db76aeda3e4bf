"""The JSON document of a run, and its CSV table.

The layout of both is stable: fields and columns are added, never renamed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from convoy.loadtest import words
from convoy.loadtest.capacity import Capacity
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.results import LoadTestOutcome, Result
from convoy.loadtest.runner import Measurement
from convoy.loadtest.server_side import ServerUse
from convoy.loadtest.statistics import ConfidenceInterval, Summary
from convoy.loadtest.verdict import Lateness

SCHEMA_VERSION = 1
Document = dict[str, object]


def document(outcome: LoadTestOutcome) -> str:
    """All results as JSON, without the API key.

    The figures at the top are those of the whole run, or of the fastest probe that met the objective.
    """
    target, shown, verdict = outcome.target, outcome.shown, words.verdict(outcome)
    content: Document = {
        "schema_version": SCHEMA_VERSION,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(shown.measurement),
        "target": {
            "url": target.endpoint.url,
            "model": target.model,
            "body": target.body,
            "protocol": target.requests.protocol,
            "server": target.server,
            "metadata": target.metadata,
        },
        "options": _options(outcome.options),
        "interrupted": outcome.interrupted,
        "verdict": verdict.word,
        "verdict_reason": verdict.why,
        **_result(shown),
        "rows": [{"name": row.name, "rate": row.rate, **_result(row)} for row in outcome.rows],
        "capacity": None if outcome.capacity is None else _capacity(outcome.capacity),
        "server_side": None if outcome.server is None else asdict(outcome.server),
        "server_use": None if outcome.use is None else _use(outcome.use),
    }
    return json.dumps(content, indent=2) + "\n"


def table(outcome: LoadTestOutcome) -> str:
    """The figures as CSV with a header: one row for the run, or one per step or probe."""
    rows = [_row(outcome, result) for result in outcome.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(outcome: LoadTestOutcome, result: Result) -> Document:
    summary, verdict = result.summary, result.verdict
    return {
        "name": result.name or "run",
        "rate_rps": result.rate,
        "clients": None if result.rate is not None else outcome.options.clients,
        "window_s": summary.window_s,
        "offered": summary.offered,
        "good": summary.good,
        "failed": summary.failed,
        "offered_rps": summary.offered_rps,
        "throughput_rps": summary.throughput_rps,
        "goodput": summary.goodput,
        "mean_ms": summary.mean_ms,
        **{f"p{percentile.name}_ms": percentile.latency_ms for percentile in summary.percentiles},
        "max_ms": summary.max_ms,
        "lateness_p99_ms": verdict.lateness.p99_ms if verdict.lateness else None,
        "stable": result.stability.why_not is None,
        "void": verdict.void or "",
    }


def _result(result: Result) -> Document:
    verdict = result.verdict
    return {
        "void": verdict.void,
        "notes": list(verdict.notes),
        "generator": _generator(result.measurement, verdict.lateness),
        "stability": {
            "stable": result.stability.why_not is None,
            "why_not": result.stability.why_not,
            "windows": [asdict(window) for window in result.stability.windows],
        },
        **_figures(result.summary),
    }


def _generator(measurement: Measurement, lateness: Lateness | None) -> Document:
    return {
        "processes": len(measurement.generators),
        "cpu_s": measurement.generator_cpu_s,
        "busiest_cpu_share": measurement.busiest_cpu_share,
        "wall_s": measurement.wall_s,
        "waited_for_connection": measurement.waited,
        "lateness_p50_ms": lateness and lateness.p50_ms,
        "lateness_p99_ms": lateness and lateness.p99_ms,
        "lateness_max_ms": lateness and lateness.max_ms,
        "lateness_limit_ms": lateness and lateness.limit_ms,
        "deaths": list(measurement.deaths),
    }


def _figures(summary: Summary) -> Document:
    return {
        "window_s": summary.window_s,
        "offered": summary.offered,
        "good": summary.good,
        "failed": summary.failed,
        "failed_in_warm_up": summary.failed_in_warm_up,
        "unfinished": summary.unfinished,
        "offered_rps": summary.offered_rps,
        "throughput_rps": summary.throughput_rps,
        "throughput_rps_95": _interval(summary.throughput_interval_rps),
        "goodput": summary.goodput,
        "goodput_95": _interval(summary.goodput_interval),
        "latency_ms": {
            "mean": summary.mean_ms,
            "max": summary.max_ms,
            **{f"p{percentile.name}": percentile.latency_ms for percentile in summary.percentiles},
        },
        "latency_ms_95": {f"p{one.name}": _interval(one.interval_ms) for one in summary.percentiles},
        "errors": [
            {
                "kind": error.problem.fault.value,
                "status": error.problem.status,
                "text": error.problem.text,
                "count": error.count,
            }
            for error in summary.errors
        ],
        "per_second": {"good": list(summary.good_per_second), "failed": list(summary.failed_per_second)},
    }


def _interval(interval: ConfidenceInterval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _use(use: ServerUse) -> Document:
    return {
        "cpu_s": use.cpu_s,
        "cores": use.cores,
        "cores_95": _interval(use.cores_interval),
        "cpu_ms_per_answer": use.cpu_ms_per_answer,
        "cpu_ms_per_answer_95": _interval(use.cpu_ms_per_answer_interval),
        "peak_mib": use.peak_mib,
        "processes": [asdict(process) for process in use.processes],
        "samples": [asdict(sample) for sample in use.samples],
    }


def _capacity(capacity: Capacity) -> Document:
    return {
        "sustained_rps": capacity.sustained,
        "failed_rps": capacity.failed,
        "width_rps": capacity.width,
        "ending": capacity.ending,
        "probes": [asdict(probe) for probe in capacity.probes],
    }


def _options(options: LoadTestOptions) -> Document:
    values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    values["warm_up_s"] = options.warm_up_cut_s
    values["concurrency"] = options.clients
    values["api_key"] = None if options.api_key is None else "(given)"
    return values


def environment(measurement: Measurement) -> Document:
    """The machine and the libraries of the load generator."""
    event_loops = {generator.event_loop for generator in measurement.generators if generator.death is None}
    timers = {generator.timer for generator in measurement.generators if generator.death is None}
    return {
        "convoy": _own_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "event_loop": ", ".join(sorted(event_loops)),
        "timer": ", ".join(sorted(timers)),
    }


def _own_version() -> str | None:
    try:
        return metadata.version("convoy-serve")
    except metadata.PackageNotFoundError:
        return None
