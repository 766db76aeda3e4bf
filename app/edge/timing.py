"""Where an answer's time went, told to the client: one set of stages for every route."""

from __future__ import annotations

from typing import NamedTuple

from convoy.app.scheduling.request import Done

SERVER_TIMING = b"server-timing"
_HEADER = b"decode_wait;dur=%.3f, decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, total;dur=%.3f"


class Timing(NamedTuple):
    """Milliseconds of one request; `total` counts from the arrival of its headers."""

    decode_wait: float
    decode: float
    queue: float
    compute: float
    total: float


def timing_ms(done: Done, wait_ns: int, decode_ns: int, total_ns: int) -> Timing:
    """By stage, of a request that arrived so long ago."""
    compute_ns = done.times.total_ns if done.times is not None else 0
    return Timing(wait_ns / 1e6, decode_ns / 1e6, done.queue_ns / 1e6, compute_ns / 1e6, total_ns / 1e6)


def timing_document(timing: Timing) -> dict[str, float]:
    """For a JSON answer, in whole microseconds."""
    # Rounding as `round` does takes a third of a microsecond for each.
    return {stage: int(ms * 1000 + 0.5) / 1000 for stage, ms in zip(Timing._fields, timing, strict=True)}


def server_timing(timing: Timing) -> tuple[bytes, bytes]:
    """The `Server-Timing` header, which browsers and proxies know how to show."""
    return SERVER_TIMING, _HEADER % timing
