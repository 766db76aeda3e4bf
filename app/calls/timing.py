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


class StagesNs(NamedTuple):
    """The same in nanoseconds, as it is kept for every request."""

    decode_wait: int
    decode: int
    queue: int
    compute: int
    total: int

    @classmethod
    def of(cls, done: Done, decode_wait: int, decode: int, total: int) -> StagesNs:
        """Of a request that was answered so long after its arrival."""
        return cls(decode_wait, decode, done.queue_ns, 0 if done.times is None else done.times.total_ns, total)

    def timing_ms(self) -> Timing:
        return Timing(*[ns / 1e6 for ns in self])


def timing_document(stages: StagesNs) -> dict[str, float]:
    """Milliseconds for a JSON answer, in whole microseconds."""
    return {stage: (ns + 500) // 1000 / 1000 for stage, ns in stages._asdict().items()}


def server_timing(stages: StagesNs) -> tuple[bytes, bytes]:
    """The `Server-Timing` header, which browsers and proxies know how to show."""
    return SERVER_TIMING, _HEADER % stages.timing_ms()
