"""Records of load tests, as `convoy loadtest --json` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load_record(folder: Path, name: str, **changes: Any) -> Path:
    """A file as `--json` writes it: the fields that are read, and some that are not."""
    figures = {
        "void": None,
        "throughput_rps": 1000.0,
        "throughput_rps_95": [980.0, 1020.0],
        "goodput": None,
        "goodput_95": None,
        "latency_ms": {"mean": 3.0, "max": 9.0, "p50": 2.5, "p99": 8.0, "p99.9": None},
        "latency_ms_95": {"p50": [2.4, 2.6], "p99": [7.0, 9.5], "p99.9": None},
    }
    options = {"rate": None, "steps": [], "concurrency": 16, "find_capacity": False, "slo_ms": None, "seed": 0}
    options |= {"arrivals": "poisson", "burst_on_s": 1.0, "burst_off_s": 1.0, **changes.pop("options", {})}
    content = {
        "schema_version": 1,
        "environment": {"platform": "Linux", "cores": 2},
        "target": {"url": "http://h:1", "model": "m", "body": "image", "protocol": "http", "server": {}},
        "options": options,
        "interrupted": False,
        "rows": [{"name": "", "rate": None, **figures}],
        "capacity": None,
        "server_use": {"cpu_ms_per_answer": 0.5, "cpu_ms_per_answer_95": [0.49, 0.51], "peak_mib": 200.0, "cores": 0.5},
        **figures,
        **changes,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return path
