"""Where an answer's time went, told to the client: one set of stages for every route."""

from __future__ import annotations

import time

from app.scheduling.request import Done


def timing_ms(done: Done, decode_ns: int, arrival_ns: int) -> dict[str, float]:
    """Milliseconds by stage, up to now; `total` counts from the arrival of the headers."""
    stages_ns = {
        "decode": decode_ns,
        "queue": done.queue_ns,
        "compute": done.times.total_ns if done.times is not None else 0,
        "total": time.monotonic_ns() - arrival_ns,
    }
    return {stage: round(ns / 1e6, 3) for stage, ns in stages_ns.items()}


def server_timing(stages_ms: dict[str, float]) -> tuple[bytes, bytes]:
    """The `Server-Timing` header, which browsers and proxies know how to show."""
    return b"server-timing", ", ".join(f"{stage};dur={ms}" for stage, ms in stages_ms.items()).encode()
