"""The timing of an answer for its client: the same stages on every route."""

from __future__ import annotations

from convoy.app.scheduling.request import Done
from convoy.models.answers import Timing


def timing_of(done: Done, decode_wait_ns: int, decode_ns: int, total_ns: int) -> Timing:
    """The timing of a request that was answered `total_ns` after its arrival."""
    compute_ns = 0 if done.times is None else done.times.total_ns
    return Timing(decode_wait_ns / 1e6, decode_ns / 1e6, done.queue_ns / 1e6, compute_ns / 1e6, total_ns / 1e6)
