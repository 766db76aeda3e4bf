"""What is counted of batches that ran: a record of each, and those of a version together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.app.engines.batch import StageTimes


@dataclass(slots=True, eq=False)
class BatchRecord:
    """`samples` were wanted, `padded` were computed on the device. `queued_ns` has how long each request waited.

    `total_ns` is the sum over all of them since they arrived, until `ended_ns`, when their answers were there, on the
    clock of `time.monotonic_ns`.
    """

    device: str
    samples: int
    padded: int
    times: StageTimes
    queued_ns: list[int]
    total_ns: int
    ended_ns: int


@dataclass(slots=True, eq=False)
class StageSums:
    """Nanoseconds in each stage, of `count` batches; or of `count` requests, for each of which its batch counts."""

    count: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0

    def add(self, times: StageTimes, count: int) -> None:
        """Add `count` that took that long each."""
        self.count += count
        self.copy_in_ns += times.copy_in_ns * count
        self.compute_ns += times.compute_ns * count
        self.copy_out_ns += times.copy_out_ns * count


class RanBatches:
    """Some batches of one version: in lists what each of them took, and sums.

    `for_requests` counts a batch once for each of its requests, `by_size` once.
    """

    def __init__(self, records: Sequence[BatchRecord]) -> None:
        self.samples = [one.samples for one in records]
        self.copy_in_ns = [one.times.copy_in_ns for one in records]
        self.compute_ns = [one.times.compute_ns for one in records]
        self.copy_out_ns = [one.times.copy_out_ns for one in records]
        self.queued_ns = [ns for one in records for ns in one.queued_ns]  # of each request
        self.padding = sum([one.padded - one.samples for one in records])
        self.total_ns = sum([one.total_ns for one in records])
        self.ended_ns = max([one.ended_ns for one in records], default=0)
        self.for_requests = StageSums()
        self.by_size = defaultdict[int, StageSums](StageSums)
        self.compute_ns_by_device = defaultdict[str, int](int)
        for one in records:
            self.for_requests.add(one.times, len(one.queued_ns))
            self.by_size[one.samples].add(one.times, 1)
            self.compute_ns_by_device[one.device] += one.times.compute_ns
