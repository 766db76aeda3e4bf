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


class StagesNs:
    """The same in nanoseconds, as it is kept for every request."""

    __slots__ = ("compute", "decode", "decode_wait", "queue", "total")

    def __init__(self, done: Done, decode_wait: int, decode: int, total: int) -> None:
        """Of a request that was answered so long after its arrival."""
        times = done.times
        self.decode_wait = decode_wait
        self.decode = decode
        self.queue = done.queue_ns
        self.compute = 0 if times is None else times.total_ns
        self.total = total

    def timing_ms(self) -> Timing:
        return Timing(self.decode_wait / 1e6, self.decode / 1e6, self.queue / 1e6, self.compute / 1e6, self.total / 1e6)


def timing_document(stages: StagesNs) -> dict[str, float]:
    """Milliseconds for a JSON answer, in whole microseconds."""
    return {
        "decode_wait": _whole_us_ms(stages.decode_wait),
        "decode": _whole_us_ms(stages.decode),
        "queue": _whole_us_ms(stages.queue),
        "compute": _whole_us_ms(stages.compute),
        "total": _whole_us_ms(stages.total),
    }


def _whole_us_ms(ns: int) -> float:
    return (ns + 500) // 1000 / 1000


def server_timing(stages: StagesNs) -> tuple[bytes, bytes]:
    """The `Server-Timing` header, which browsers and proxies know how to show."""
    return SERVER_TIMING, _HEADER % (
        stages.decode_wait / 1e6,
        stages.decode / 1e6,
        stages.queue / 1e6,
        stages.compute / 1e6,
        stages.total / 1e6,
    )
