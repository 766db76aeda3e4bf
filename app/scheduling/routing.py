"""To which of several servers that batch the next request goes: where it is expected to be done first. Pure.

How many requests a server has says little where servers differ: one half as fast needs twice the time for as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class BatchSpeed(NamedTuple):
    """How long a server computes: a batch of b samples, at most `max_batch`, takes `fixed_s + b * per_sample_s`."""

    fixed_s: float
    per_sample_s: float
    max_batch: int

    def batch_s(self, samples: int) -> float:
        return self.fixed_s + samples * self.per_sample_s


def expected_finish_s(outstanding: int, speed: BatchSpeed) -> float:
    """When one more request would be done behind those that a server owes answers: in as few batches as they fit."""
    full, rest = divmod(outstanding + 1, speed.max_batch)
    return full * speed.batch_s(speed.max_batch) + (speed.batch_s(rest) if rest else 0.0)


def ranked(outstanding: Sequence[int], speeds: Sequence[BatchSpeed | None]) -> list[int]:
    """The indices of the servers, the one first that is expected to be done first.

    A server that has not told its speed yet is thought to be like the others.
    """
    known = [speed for speed in speeds if speed is not None] or [_UNKNOWN]
    usual = BatchSpeed(
        median(speed.fixed_s for speed in known),
        median(speed.per_sample_s for speed in known),
        round(median(speed.max_batch for speed in known)),
    )
    finish_s = [expected_finish_s(count, speed or usual) for count, speed in zip(outstanding, speeds, strict=True)]
    return sorted(range(len(finish_s)), key=finish_s.__getitem__)


# Where no server has told its speed: the fewest requests first.
_UNKNOWN = BatchSpeed(0.0, 1e-3, 1)
