"""Everything about a run as one JSON document, for other programs and for later.

Knows the document's layout, which is a promise: fields are added, never renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from loadtest.measure import Measurement
from loadtest.options import LoadOptions
from loadtest.statistics import Summary
from loadtest.target import Target
from loadtest.verdict import Verdict
from models.errors import JobError

SCHEMA_VERSION = 1


def document(
    target: Target, options: LoadOptions, measurement: Measurement, summary: Summary, verdict: Verdict
) -> dict[str, object]:
    """Plain JSON values. The API key is left out."""
    return {
        "schema_version": SCHEMA_VERSION,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": _environment(measurement),
        "target": {
            "url": target.endpoint.url,
            "model": target.model,
            "body": target.body,
            "server": target.server,
            "metadata": target.metadata,
        },
        "options": _options(options),
        "interrupted": measurement.interrupted,
        "void": verdict.void,
        "notes": list(verdict.notes),
        "generator": {
            "cpu_s": measurement.generator_cpu_s,
            "wall_s": measurement.wall_s,
            "waited_for_connection": measurement.waited,
            "lateness_p99_ms": verdict.lateness_p99_ms,
            "lateness_limit_ms": verdict.lateness_limit_ms,
        },
        **_figures(summary),
    }


def write(path: Path, content: dict[str, object]) -> None:
    """Writes aside and renames, so that a reader never finds half a document. Raises JobError."""
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise JobError(f"cannot write {path} ({error.strerror}); choose another place with --json") from None


def _figures(summary: Summary) -> dict[str, object]:
    return {
        "window_s": summary.window_s,
        "offered": summary.offered,
        "good": summary.good,
        "failed": summary.failed,
        "failed_in_warm_up": summary.failed_in_warm_up,
        "unfinished": summary.unfinished,
        "offered_rps": summary.offered_rps,
        "throughput_rps": summary.throughput_rps,
        "goodput": summary.goodput,
        "latency_ms": {
            "mean": summary.mean_ms,
            "max": summary.max_ms,
            **{f"p{percentile.name}": percentile.latency_ms for percentile in summary.percentiles},
        },
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


def _options(options: LoadOptions) -> dict[str, object]:
    values = asdict(options)
    values["json_file"] = None if options.json_file is None else str(options.json_file)
    values["warm_up_s"] = options.warm_up_cut_s
    values["concurrency"] = options.clients
    values["api_key"] = None if options.api_key is None else "(given)"
    return values


def _environment(measurement: Measurement) -> dict[str, object]:
    return {
        "convoy": _own_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "event_loop": measurement.event_loop,
        "timer": measurement.timer,
    }


def _own_version() -> str | None:
    try:
        return metadata.version("convoy-serve")
    except metadata.PackageNotFoundError:
        return None
