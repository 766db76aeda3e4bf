"""A run as `--json` wrote it, read again: what a comparison needs of it.

Knows the layout that `document` writes. A file of anything else is refused by name.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from convoy.models.errors import UsageError

Bounds = tuple[float, float]


class KeptOptions(msgspec.Struct):
    """What decides the load; what younger versions write may be missing in a file of an older one."""

    rate: float | None
    steps: tuple[float, ...]
    concurrency: int | None
    find_capacity: bool
    slo_ms: float | None
    arrivals: str
    burst_on_s: float
    burst_off_s: float
    deadline_ms: float | None = None
    images: str | None = None


class KeptTarget(msgspec.Struct):
    url: str
    model: str
    body: str
    protocol: str = "http"


class KeptFigures(msgspec.Struct):
    """Of the run, or of a step: intervals hold with 95 %."""

    void: str | None
    throughput_rps: float
    throughput_rps_95: Bounds | None
    goodput: float | None
    goodput_95: Bounds | None
    latency_ms: dict[str, float | None]
    latency_ms_95: dict[str, Bounds | None]


class KeptRow(KeptFigures, kw_only=True):
    name: str
    rate: float | None


class KeptCapacity(msgspec.Struct):
    sustained_rps: float | None
    failed_rps: float | None
    ending: str


class KeptUse(msgspec.Struct):
    cpu_ms_per_answer: float | None
    cpu_ms_per_answer_95: Bounds | None
    peak_mib: float


class KeptRun(KeptFigures, kw_only=True):
    schema_version: int
    environment: dict[str, object]
    target: KeptTarget
    options: KeptOptions
    interrupted: bool
    rows: list[KeptRow]
    capacity: KeptCapacity | None
    server_use: KeptUse | None = None


def read_run(path: Path) -> KeptRun:
    """Raises UsageError for what is no file of `convoy loadtest --json`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeptRun)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name a file of `convoy loadtest --json`") from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is no file of `convoy loadtest --json`: {error}") from None
