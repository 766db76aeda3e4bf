"""Where an answer's time went, told to the client: one set of stages for every route."""

from __future__ import annotations

import time

from app.scheduling.request import Done

_HEADER = b"decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, total;dur=%.3f"


def timing_ms(done: Done, decode_ns: int, arrival_ns: int) -> dict[str, float]:
    """Milliseconds by stage, up to now; `total` counts from the arrival of the headers."""
    compute_ns = done.times.total_ns if done.times is not None else 0
    total_ns = time.monotonic_ns() - arrival_ns
    return {
        "decode": round(decode_ns / 1e6, 3),
        "queue": round(done.queue_ns / 1e6, 3),
        "compute": round(compute_ns / 1e6, 3),
        "total": round(total_ns / 1e6, 3),
    }


def server_timing(stages_ms: dict[str, float]) -> tuple[bytes, bytes]:
    """The `Server-Timing` header, which browsers and proxies know how to show."""
    return b"server-timing", _HEADER % tuple(stages_ms.values())
