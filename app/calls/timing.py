"""The timing of an answer for its client: the same stages on every route."""

from __future__ import annotations

from typing import NamedTuple

from convoy.app.scheduling.request import Done


class Timing(NamedTuple):
    """The stages of one request in milliseconds; `total` counts from the arrival of its headers."""

    decode_wait: float
    decode: float
    queue: float
    compute: float
    total: float

    @classmethod
    def of(cls, done: Done, decode_wait_ns: int, decode_ns: int, total_ns: int) -> Timing:
        """The timing of a request that was answered `total_ns` after its arrival."""
        compute_ns = 0 if done.times is None else done.times.total_ns
        return cls(decode_wait_ns / 1e6, decode_ns / 1e6, done.queue_ns / 1e6, compute_ns / 1e6, total_ns / 1e6)

    def document(self) -> dict[str, float]:
        """The timing as a JSON object, rounded to microseconds."""
        return {stage: round(ms, 3) for stage, ms in self._asdict().items()}

    def header(self) -> tuple[bytes, bytes]:
        """The value of the `Server-Timing` header."""
        return b"server-timing", _HEADER % self


_HEADER = b"decode_wait;dur=%.3f, decode;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, total;dur=%.3f"
