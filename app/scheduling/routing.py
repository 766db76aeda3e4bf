"""Choose among several batching servers the one that is expected to finish the next request first. Pure.

The number of outstanding requests is not enough if servers differ in speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class BatchSpeed(NamedTuple):
    """A server's speed: a batch of b samples, at most `max_batch`, takes `fixed_s + b * per_sample_s`."""

    fixed_s: float
    per_sample_s: float
    max_batch: int

    def batch_s(self, samples: int) -> float:
        return self.fixed_s + samples * self.per_sample_s


def expected_finish_s(outstanding: int, speed: BatchSpeed) -> float:
    """Predict when one more request ends, if the outstanding ones run in as few batches as possible."""
    full, rest = divmod(outstanding + 1, speed.max_batch)
    return full * speed.batch_s(speed.max_batch) + (speed.batch_s(rest) if rest else 0.0)


def ranked(outstanding: Sequence[int], speeds: Sequence[BatchSpeed | None]) -> list[int]:
    """The indices of the servers, sorted by expected finish.

    A server whose speed is unknown counts as the median of the others.
    """
    known = [speed for speed in speeds if speed is not None] or [_UNKNOWN]
    usual = BatchSpeed(
        median(speed.fixed_s for speed in known),
        median(speed.per_sample_s for speed in known),
        round(median(speed.max_batch for speed in known)),
    )
    finish_s = [expected_finish_s(count, speed or usual) for count, speed in zip(outstanding, speeds, strict=True)]
    return sorted(range(len(finish_s)), key=finish_s.__getitem__)


# If no speed is known, this ranks by outstanding requests.
_UNKNOWN = BatchSpeed(0.0, 1e-3, 1)
